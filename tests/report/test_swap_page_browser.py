"""Pages of swaps, sweeps and searches for neurons in Chromium: whole texts, both schemes, a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic_neurons import neurons_record
from synthetic_swaps import swap_record, sweep_record
from test_page_browser import CONTRASTS, FAULTS, HOSTILE

from conftest import write_run
from twinscope.report.page import render

CONFIG = 'name = "a"\n'


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    hostile = swap_record(texts=4, changes=(0.0, 5.0), kind="q_norm")
    hostile["provenance"]["name"] = HOSTILE
    hostile["summary"]["model"] = hostile["summary"]["pair"]["chosen"] = HOSTILE
    for part in hostile["summary"]["directions"]:
        part["reason"] = HOSTILE
    return render(
        [
            write_run(root, swap_record(), name="pair", config=CONFIG),
            write_run(root, hostile, name="hostile", config=CONFIG),
            write_run(root, sweep_record(layers=30, texts=4, kinds=("mlp",)), name="sweep", config=CONFIG),
            write_run(root, sweep_record(layers=4, kinds=("attention",)), name="little", config=CONFIG),
            write_run(root, neurons_record(), name="neurons", config=CONFIG),
        ]
    )


@pytest.mark.parametrize(
    "options",
    [
        {"viewport": {"width": 1200, "height": 900}},
        {"viewport": {"width": 1200, "height": 900}, "color_scheme": "dark"},
        {
            "viewport": {"width": 390, "height": 844},
            "device_scale_factor": 2,
            "is_mobile": True,
            "has_touch": True,
        },
    ],
    ids=["light", "dark", "phone"],
)
def test_every_text_is_whole_and_legible(browser: Any, page_file: Path, options: dict[str, Any]):
    context = browser.new_context(**options)
    page = context.new_page()
    noise: list[str] = []
    page.on("console", lambda message: noise.append(message.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("request", lambda request: noise.append(request.url))
    page.goto(page_file.as_uri())
    assert page.evaluate(FAULTS) == []
    found = page.evaluate(CONTRASTS)
    assert len(found) > 500
    assert [item for item in found if item[0] < 4.5] == []
    assert page.evaluate("document.documentElement.scrollWidth") == options["viewport"]["width"]
    assert page.title() == "5 runs side by side"
    assert page.locator("svg[role=img]").count() == 4 + 4 + 2 + 2 + (2 + 2 + 2)
    assert noise == [page_file.as_uri()]
    context.close()


def test_colours_of_a_map_follow_the_scheme(browser: Any, page_file: Path):
    shades = []
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        page = context.new_page()
        page.goto(page_file.as_uri())
        shades.append(
            page.evaluate(
                "[...new Set([...document.querySelectorAll('#run-3 svg path')]"
                ".map((e) => getComputedStyle(e).fill))]"
            )
        )
        context.close()
    light, dark = (set(found) - {"none", "rgb(0, 0, 0)"} for found in shades)
    assert len(light) >= 8
    assert not light & dark
