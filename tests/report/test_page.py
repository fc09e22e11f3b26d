"""The page as text: content in order, escaping, several runs, damaged and read-only places, sameness."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from synthetic_spectra import COLLAPSE_CONFIG, LEAK_CONFIG, collapse_record, leak_record

from twinscope.lab.errors import ConfigError
from twinscope.report.page import render
from twinscope.report.reading import read_run
from twinscope.report.tables import provenance

HOSTILE = (
    "<script>alert(1)</script>\"'><img src=x onerror=alert(2)></title></style>{{ 7*7 }} $\\frac{1}$ 漢 \u202e"
)


@pytest.fixture
def record(make_record):
    """One seed: fewer panels to draw."""
    return make_record(seeds=(0,))


class Elements(HTMLParser):
    """Start tags of a page in order, and its visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def named(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def test_page_in_its_order_and_figures_on_disk(record, build):
    path = build(record)
    out = render([path])
    assert out == path / "report.html"
    text = out.read_text(encoding="utf-8")
    page = Elements(text)
    final = {arm: part["val_loss"] for arm, part in record["summary"]["arms"].items()}
    behind = final["ep"] - final["bp"]
    order = [
        "twin-sotu",
        f"EP reaches {final['ep']:.3f} nats per token on held-out text, {behind:.3f} above",
        "Before you read on",
        "One seed",
        "measured",
        "Each EP model ends within",
        "Does not support",
        "anything about speed.",
        "Figure 1. Held-out loss.",
        "Figure 2. Paired difference",
        "Figure 3. Cosine",
        "Figure 4. Displacement",
        "n-gram baseline",
        "with 95 % intervals",
        "Gate points",
        "displacement = 0.002",
        "load_at_start",
    ]
    places = [page.text.index(words) for words in order]
    assert places[2:] == sorted(places[2:])
    assert sorted(file.name for file in (path / "figures").iterdir()) == sorted(
        f"{name}.{kind}"
        for name in ("heldout-loss", "paired-difference", "block-cosine", "displaced-states")
        for kind in ("svg", "png", "csv", "parquet")
    )
    assert not list(path.glob(".*.tmp"))


def test_nothing_is_fetched_and_every_figure_has_its_words(record, build):
    text = render([build(record)]).read_text(encoding="utf-8")
    page = Elements(text)
    policy = next(str(tag["content"]) for tag in page.named("meta") if tag.get("http-equiv"))
    assert policy.startswith(
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'unsafe-inline'"
    )
    for _, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "data", "srcset", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    outside = set(re.findall(r"https?://[^\s\"'<]+", text))
    assert outside == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    svgs = [tag for tag in page.named("svg") if tag.get("class") == "plot"]
    assert len(svgs) == 5
    assert all(tag["role"] == "img" and tag["aria-labelledby"] for tag in svgs)
    assert len(page.named("figure")) == 4
    identities = [tag["id"] for _, tag in page.tags if "id" in tag]
    assert len(identities) == len(set(identities))


def test_every_string_of_a_record_is_escaped(make_record, build):
    record = make_record(arms=(HOSTILE, "bp"), seeds=(0,))
    record["provenance"] |= {HOSTILE: HOSTILE, "name": HOSTILE, "started": HOSTILE}
    record["provenance"]["compute"] = {"device": HOSTILE}
    record["summary"]["seed_scatter"]["note"] = HOSTILE
    record["claims"][0] |= {"statement": HOSTILE, "supports": HOSTILE, "does_not_support": HOSTILE}
    arm = record["summary"]["arms"][HOSTILE]
    arm |= {"val_bits_per_byte": None, "val_bits_per_byte_reason": HOSTILE, "rule": HOSTILE}
    path = build(record, config=f'name = "x"\n# {HOSTILE}\n')
    text = render([path]).read_text(encoding="utf-8")
    page = Elements(text)
    assert len(page.named("script")) == len(page.named("style")) == 1
    assert page.named("img") == []
    assert not [name for _, tag in page.tags for name in tag if name.startswith("on")]
    assert "{{ 7*7 }}" in text
    for file in (path / "figures").glob("*.svg"):
        assert "<script" not in file.read_text(encoding="utf-8")


def test_very_long_and_broken_names(make_record, build):
    record = make_record(arms=("x" * 3000, "bp"), seeds=(0,))
    record["provenance"]["name"] = "\ud800" + "n" * 5000
    text = render([build(record)]).read_text(encoding="utf-8")
    title = re.search(r"<title>(.*?)</title>", text)
    assert title is not None
    assert len(title[1]) == 80
    assert "n" * 200 not in text.split("Provenance</h2>")[0]


def test_an_interrupted_run_shows_its_journal_with_a_warning(record, build):
    record["rows"] = [row for row in record["rows"] if row["step"] <= 800]
    page = Elements(render([build(record, result=False)]).read_text(encoding="utf-8"))
    assert "This run was interrupted and wrote no result" in page.text
    assert "Figure 4." in page.text
    assert "makes no claim" in page.text


def test_a_run_that_measured_nothing(record, build):
    record["rows"] = []
    page = Elements(render([build(record, result=False)]).read_text(encoding="utf-8"))
    assert "No held-out loss has been measured." in page.text
    assert "Nothing has been measured that could be drawn." in page.text


def test_a_stopped_run_without_a_summary(record, build):
    record |= {"status": "stopped", "reason": "SIGINT", "summary": {}, "claims": []}
    page = Elements(render([build(record)]).read_text(encoding="utf-8"))
    assert "This run was stopped (SIGINT)" in page.text


def test_the_amp_gate_is_shown(record, build):
    row = {"kind": "amp_gate", "seed": 0, "step": 0, "arm": "ep", "passed": True}
    record["rows"].append(row | {"key": "amp", "amp_cosine": 0.96823, "full_cosine": 0.96871})
    page = Elements(render([build(record, result=False)]).read_text(encoding="utf-8"))
    assert "0.9682" in page.text
    assert "0.9687" in page.text


def test_a_missing_number_stands_with_its_reason(record, build):
    record["summary"]["baselines"] |= {"trigram": None, "trigram_reason": "the text is too short"}
    record["summary"]["gate"] = None
    record["summary"]["gate_reason"] = "no arm is EP"
    page = Elements(render([build(record)]).read_text(encoding="utf-8"))
    assert "the text is too short" in page.text
    assert "unigram 3.11 and bigram 2.50" in page.text


def test_several_runs_side_by_side(record, build, tmp_path):
    first = build(record)
    second = build(record, name="again")
    record["provenance"]["name"] = "battery"
    third = build(record, name="battery")
    out = render([first, second, third, first], tmp_path / "all.html")
    assert out == tmp_path / "all.html"
    page = Elements(out.read_text(encoding="utf-8"))
    assert "3 training runs side by side" in page.text
    assert [tag["href"] for tag in page.named("a")] == ["#run-1", "#run-2", "#run-3"]
    # Two runs share name and second: the number tells them apart.
    assert "twin-sotu, 20261130T141530Z (1)" in page.text
    assert "battery (" not in page.text
    identities = [tag["id"] for _, tag in page.tags if "id" in tag]
    assert len(identities) == len(set(identities))
    assert (third / "figures" / "block-cosine.svg").is_file()


def test_all_kinds_of_runs_on_one_page(record, build, tmp_path):
    leak = leak_record(blocks=2)
    paths = [
        build(record),
        build(leak, name="absorption", config=LEAK_CONFIG),
        build(leak_record(blocks=2, study="amp"), name="amp", config=LEAK_CONFIG),
        build(collapse_record((32, 48), blocks=3), name="five-widths", config=COLLAPSE_CONFIG),
    ]
    page = Elements(render(paths, tmp_path / "all.html").read_text(encoding="utf-8"))
    assert "4 runs side by side" in page.text
    # Of one verb there are two runs: they alone stand in a table together.
    assert "all-leak-comparison" in [tag.get("id") for _, tag in page.tags]
    assert "all-comparison" not in [tag.get("id") for _, tag in page.tags]
    order = [
        "EP reaches",
        "At gain 1 the projection of the leak",
        "Self-test passed.",
        "Projection of the leak over gain, per block.",
        "Recommended settings",
        "displacement = 4.4e-05",
        "Study: EP in amp",
        "Over 5 blocks of 2 models",
        "Where the law fails:",
        "The threshold law.",
        "Every block, with the 95 % interval",
    ]
    text = page.text.split("run-4", 1)[0]
    body = text[text.index("least displacement ratio") :]
    places = [body.index(words) for words in order]
    assert places == sorted(places)
    identities = [tag["id"] for _, tag in page.tags if "id" in tag]
    assert len(identities) == len(set(identities))
    names = [sorted(file.stem for file in (path / "figures").glob("*.svg")) for path in paths[1:]]
    assert names == [["gain-one", "operating-window", "projection-over-gain"]] * 2 + [["collapse"]]


def test_every_string_of_a_spectrum_is_escaped(build, tmp_path):
    leak = leak_record(blocks=2)
    leak["summary"]["model"] = leak["summary"]["control"]["description"] = HOSTILE
    leak["summary"]["recommended"]["config_fragment"] = HOSTILE
    leak["summary"]["self_test"]["null"]["detail"] = HOSTILE
    leak["summary"]["gain_high_reason"] = f"block 1: {HOSTILE}"
    leak["summary"] |= {"extended_from": [8], "recomputed": [HOSTILE]}
    for row in leak["rows"]:
        if row["block"] == 2:
            row["mean_projection_reason"] = HOSTILE
    law = collapse_record((32, 48), blocks=3)
    law["summary"]["fails"] = [HOSTILE]
    law["summary"]["controls"]["description"] = HOSTILE
    for row in law["rows"]:
        row["model"] = row["run"] = HOSTILE
    paths = [build(leak, name="a", config=LEAK_CONFIG), build(law, name="b", config=COLLAPSE_CONFIG)]
    page = Elements(render(paths, tmp_path / "all.html").read_text(encoding="utf-8"))
    assert len(page.named("script")) == len(page.named("style")) == 1
    assert page.named("img") == []
    for path in paths:
        for file in (path / "figures").glob("*.svg"):
            assert "<script" not in file.read_text(encoding="utf-8")


def test_a_verb_that_is_not_shown(record, build, monkeypatch):
    from twinscope.report import page

    path = build(record)
    monkeypatch.delitem(page.CONTENT, "train")
    with pytest.raises(ConfigError, match="is a 'train' run: the report shows 'leak', 'collapse'"):
        render([path])


def test_equal_runs_give_equal_pages(record, build):
    path = build(record)
    page = render([path]).read_bytes()
    figures = {file.name: file.read_bytes() for file in (path / "figures").iterdir()}
    assert render([path]).read_bytes() == page
    assert {file.name: file.read_bytes() for file in (path / "figures").iterdir()} == figures


def test_a_place_that_cannot_be_written(record, build, tmp_path):
    path = build(record)
    # A file where the folder should be fails for every user, root included.
    (path / "figures").write_text("in the way", encoding="utf-8")
    page = Elements(render([path]).read_text(encoding="utf-8"))
    assert "The figures were not saved as files: cannot write" in page.text
    with pytest.raises(ConfigError, match="cannot write"):
        render([path], tmp_path / "no" / "such" / "folder.html")


def test_provenance_is_flat_and_keeps_reasons(record, build):
    record["provenance"] |= {
        "git": None,
        "git_reason": "git is not installed",
        "compute": {"deterministic": True},
    }
    table = provenance(read_run(build(record)))
    found = {name.text: value.text for name, value in table.rows}
    assert found["git"] == "– (git is not installed)"
    assert "git_reason" not in found
    assert found["compute.deterministic"] == "yes"
    assert found["cpu.affinity"] == "0, 1"


def test_no_paths():
    with pytest.raises(ConfigError, match="at least one run"):
        render([])
