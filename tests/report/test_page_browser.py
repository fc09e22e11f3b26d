"""The page in Chromium: quiet, alone, legible in both schemes and on a phone, tables that work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twinscope.report.page import render

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">" + "w" * 300

# Contrast (WCAG 2) of every text with the nearest opaque background behind it.
CONTRASTS = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = (colour) => {
    const [r, g, b] = numbers(colour).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let e = node; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      const parts = numbers(colour);
      if (parts.length < 4 || parts[3] > 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  const texts = "h1, h2, p, li, dt, dd, td span, th button, code, summary, .plot text";
  for (const e of document.querySelectorAll(texts)) {
    const style = getComputedStyle(e);
    const front = luminance(e.closest("svg") ? style.fill : style.color);
    const back = luminance(behind(e));
    found.push([(Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05), e.textContent.slice(0, 40)]);
  }
  return found;
}"""

DESCRIPTIONS = """() => [...document.querySelectorAll("svg[role=img]")].map((svg) =>
  svg.getAttribute("aria-labelledby").split(" ").map((id) => document.getElementById(id).textContent))"""

# Texts of a figure that leave its frame or lie on each other.
FAULTS = """() => [...document.querySelectorAll("svg[role=img]")].flatMap((svg) => {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].map((e) => [e.textContent, e.getBoundingClientRect()]);
  return texts.flatMap(([text, a], i) => {
    const outside = a.left < frame.left - 1 || a.right > frame.right + 1
      || a.top < frame.top - 1 || a.bottom > frame.bottom + 1;
    const touched = texts.slice(i + 1).filter(([, b]) =>
      Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3);
    return [...(outside ? [`${text} outside`] : []), ...touched.map(([other]) => `${text} on ${other}`)];
  });
})"""


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Fixtures of a test cannot serve a module, so the generator is taken from its own file.
    from synthetic_spectra import COLLAPSE_CONFIG, LEAK_CONFIG, collapse_record, leak_record

    from conftest import synthetic_record, write_run

    root = tmp_path_factory.mktemp("runs")
    hostile = synthetic_record(arms=("ep", HOSTILE, "bp"), seeds=(0,), blocks=12)
    hostile["provenance"]["name"] = HOSTILE
    return render(
        [
            write_run(root, synthetic_record()),
            write_run(root, hostile, name="hostile"),
            write_run(root, leak_record(blocks=4, study="amp"), name="leak", config=LEAK_CONFIG),
            write_run(root, collapse_record(), name="widths", config=COLLAPSE_CONFIG),
        ]
    )


@pytest.fixture
def open_page(browser: Any, page_file: Path) -> Iterator[Any]:
    """Open the page with the given options; at the end nothing was logged and nothing fetched."""
    contexts, noise = [], []

    def opened(width: int = 1200, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: noise.append(message.text))
        page.on("pageerror", lambda error: noise.append(str(error)))
        page.on("dialog", lambda dialog: noise.append(dialog.message))
        page.on("request", lambda request: noise.append(request.url))
        page.goto(page_file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    # Each opened page asks for itself, and for nothing else.
    assert noise == [page_file.as_uri()] * len(contexts)


def test_figures_have_a_size_and_words(open_page):
    page = open_page()
    assert page.title() == "4 runs side by side"
    figures = page.locator("svg[role=img]")
    assert figures.count() == 8 + 8 + (4 + 1 + 2) + 2
    for figure in figures.all():
        box = figure.bounding_box()
        assert box["width"] > 280
        assert box["height"] > 200
    described = page.evaluate(DESCRIPTIONS)
    assert all(len(title) > 5 and any(char.isdigit() for char in words) for title, words in described)
    assert page.evaluate("document.scripts.length") == 1
    assert page.locator("#run-3 .label").inner_text() == "Study: EP in amp, read by an fp32 instrument"


def test_no_text_of_a_figure_is_cut_off_or_overlaps_another(open_page):
    page = open_page()
    faults = page.evaluate(FAULTS)
    assert faults == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_in_both_schemes(open_page, scheme):
    page = open_page(color_scheme=scheme)
    found = page.evaluate(CONTRASTS)
    assert len(found) > 300
    assert [item for item in found if item[0] < 4.5] == []
    paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert paper == {"light": "rgb(254, 254, 253)", "dark": "rgb(21, 23, 26)"}[scheme]


def test_phone_has_no_sideways_scroll_of_the_page(open_page):
    page = open_page(width=390, device_scale_factor=2, is_mobile=True, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    # Wide tables scroll inside their own container.
    inner = page.evaluate(
        "[...document.querySelectorAll('.scroll')].map((e) => [e.scrollWidth, e.clientWidth])"
    )
    assert any(scroll > client for scroll, client in inner)
    assert all(client <= 390 for _, client in inner)
    for figure in page.locator("svg[role=img]").all():
        assert figure.bounding_box()["width"] > 340
    # Text of a figure stays at a readable size.
    heights = page.evaluate(
        "[...document.querySelectorAll('.plot text')].map((e) => e.getBoundingClientRect())"
    )
    assert min(max(box["height"], 0) for box in heights if box["width"] > box["height"]) >= 8.5


def test_sorting(open_page):
    page = open_page()
    table = page.locator("#run-1-arms-table")

    def losses() -> list[float]:
        return [float(text) for text in table.locator("tbody tr td:nth-child(4)").all_inner_texts()]

    before = losses()
    button = table.locator("th button", has_text="held-out loss")
    button.click()
    assert losses() == sorted(before)
    assert before != sorted(before)
    assert button.locator("..").get_attribute("aria-sort") == "ascending"
    button.click()
    assert losses() == sorted(before, reverse=True)
    # By the number and not by its text: 1,600 comes after 800.
    steps = page.locator("#run-1-windows-table tbody tr td:nth-child(2)")
    page.locator("#run-1-windows-table th button", has_text="from step").click()
    page.locator("#run-1-windows-table th button", has_text="from step").click()
    assert steps.all_inner_texts()[::3] == ["1,601", "1,201", "801", "401", "1"]
    # What has no number stays last in either direction.
    differences = table.locator("tbody tr td:nth-child(6)")
    for _ in range(2):
        table.locator("th button", has_text="minus BP").click()
        assert [bool(text) for text in differences.all_inner_texts()] == [True] * 3 + [False] * 6


def test_copy_as_tsv(open_page):
    page = open_page()
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    button = page.locator("button[data-copy=run-1-arms-table]")
    button.click()
    page.wait_for_function("window.copied !== undefined")
    lines = [line.split("\t") for line in page.evaluate("window.copied").rstrip("\n").split("\n")]
    assert lines[0][:4] == ["arm", "rule", "seed", "held-out loss"]
    assert {len(line) for line in lines} == {9}
    assert len(lines) == 1 + 6 + 3
    # Numbers are copied with all their digits.
    assert len(lines[1][3]) > 10
    assert float(lines[1][3]) == pytest.approx(
        float(page.locator("#run-1-arms-table td:nth-child(4)").first.inner_text()), abs=1e-4
    )
    assert button.inner_text() == "Copied"


def test_print_is_on_light_paper_without_buttons(open_page):
    page = open_page(color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(254, 254, 253)"
    assert not page.locator("button.copy").first.is_visible()
    assert page.evaluate("getComputedStyle(document.querySelector('.scroll')).overflow") == "visible"
