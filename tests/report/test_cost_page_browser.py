"""Pages of cost, check and plan runs in Chromium: whole texts, both schemes, a phone, hostile names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic_costs import COST_CONFIG, check_record, cost_record, plan_record
from test_page_browser import CONTRASTS, FAULTS, HOSTILE

from conftest import write_run
from twinscope.report.page import render


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
    hostile = cost_record(arms=("ep", "bp", HOSTILE), shapes=(HOSTILE,), disturbed=True)
    hostile["summary"]["comparisons"][0]["train_step_ratio"] |= {"low": 0.02, "high": 90.0}
    for claim in hostile["summary"]["claims"]:
        claim |= {"name": HOSTILE, "source": HOSTILE}
    frontier = cost_record(arms=("ep", "bp"), shapes=("model",), frontier=True)
    frontier["summary"]["frontier"]["references"][0]["name"] = HOSTILE
    frontier["summary"]["frontier"]["beyond_reference"] = {HOSTILE: []}
    return render(
        [
            write_run(root, cost_record(), name="two", config=COST_CONFIG),
            write_run(root, hostile, name="hostile", config='name = "hostile"\n'),
            write_run(root, frontier, name="frontier", config='name = "frontier"\n'),
            write_run(root, check_record(), name="check", config='name = "a"\n'),
            write_run(root, plan_record(), name="plan", config='name = "b"\n'),
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
    assert page.locator("svg[role=img]").count() == (4 * 2 + 1) + (4 + 1) + (4 + 1 + 4) + 3 + 1
    # A sentence in a cell is shown to its end.
    hidden = page.evaluate(
        "[...document.querySelectorAll('.verdicts td span')].filter((e) => e.scrollWidth > e.clientWidth + 1)"
        ".map((e) => e.textContent.slice(0, 40))"
    )
    assert [text for text in hidden if not text.startswith("<script>")] == []
    assert noise == [page_file.as_uri()]
    context.close()
