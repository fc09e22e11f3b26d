"""One self-contained HTML page from run directories, and the figures of each run as files.

Covers putting sentences, figures and tables into the template. The page asks the network for nothing;
every string of a record is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from twinscope.lab.durable import write_atomic, writing
from twinscope.lab.errors import ConfigError
from twinscope.report.check import figures as check_figures
from twinscope.report.check import findings as check_findings
from twinscope.report.check import tables as check_tables
from twinscope.report.collapse import figures as collapse_figures
from twinscope.report.collapse import findings as collapse_findings
from twinscope.report.collapse import tables as collapse_tables
from twinscope.report.cost import figures as cost_figures
from twinscope.report.cost import findings as cost_findings
from twinscope.report.cost import tables as cost_tables
from twinscope.report.drawing import PALETTE, SMALL_PANEL, Plot, block_colours, panel_svg, plot_files
from twinscope.report.leak import figures as leak_figures
from twinscope.report.leak import findings as leak_findings
from twinscope.report.leak import tables as leak_tables
from twinscope.report.neurons import figures as neurons_figures
from twinscope.report.neurons import findings as neurons_findings
from twinscope.report.neurons import tables as neurons_tables
from twinscope.report.plan import figures as plan_figures
from twinscope.report.plan import findings as plan_findings
from twinscope.report.plan import tables as plan_tables
from twinscope.report.probe import figures as probe_figures
from twinscope.report.probe import findings as probe_findings
from twinscope.report.probe import tables as probe_tables
from twinscope.report.reading import RunData, read_run
from twinscope.report.scan import figures as scan_figures
from twinscope.report.scan import findings as scan_findings
from twinscope.report.scan import tables as scan_tables
from twinscope.report.swap import figures as swap_figures
from twinscope.report.swap import findings as swap_findings
from twinscope.report.swap import tables as swap_tables
from twinscope.report.tables import Table, provenance
from twinscope.report.train import figures as train_figures
from twinscope.report.train import findings as train_findings
from twinscope.report.train import tables as train_tables


@dataclass(frozen=True)
class Content:
    """What the runs of one verb show; ``noun`` is what several of them are called."""

    noun: str
    outcome: Callable[[RunData], str]
    warnings: Callable[[RunData], list[str]]
    facts: Callable[[RunData], list[str]]
    figures: Callable[[RunData], list[Plot]]
    tables: Callable[[RunData], list[Table]]
    comparison: Callable[[Mapping[str, RunData]], Table]
    label: Callable[[RunData], str] = lambda run: ""  # what must be seen beside the name
    remarks: Callable[[RunData], list[str]] = lambda run: []  # how far the instrument can be trusted
    snippet: Callable[[RunData], str] = lambda run: ""  # settings to copy


CONTENT = {
    "train": Content(
        noun="training runs",
        outcome=train_findings.outcome,
        warnings=train_findings.warnings,
        facts=train_findings.facts,
        figures=train_figures.figures,
        tables=train_tables.tables,
        comparison=train_tables.comparison,
    ),
    "leak": Content(
        noun="leak spectra",
        outcome=leak_findings.outcome,
        label=leak_findings.label,
        remarks=leak_findings.remarks,
        snippet=leak_findings.snippet,
        warnings=leak_findings.warnings,
        facts=leak_findings.facts,
        figures=leak_figures.figures,
        tables=leak_tables.tables,
        comparison=leak_tables.comparison,
    ),
    "collapse": Content(
        noun="collapses",
        outcome=collapse_findings.outcome,
        remarks=collapse_findings.remarks,
        warnings=collapse_findings.warnings,
        facts=collapse_findings.facts,
        figures=collapse_figures.figures,
        tables=collapse_tables.tables,
        comparison=collapse_tables.comparison,
        label=collapse_findings.label,
    ),
    "cost": Content(
        noun="cost measurements",
        outcome=cost_findings.outcome,
        label=cost_findings.label,
        remarks=cost_findings.remarks,
        warnings=cost_findings.warnings,
        facts=cost_findings.facts,
        figures=cost_figures.figures,
        tables=cost_tables.tables,
        comparison=cost_tables.comparison,
    ),
    "check": Content(
        noun="parity checks",
        outcome=check_findings.outcome,
        label=check_findings.label,
        remarks=check_findings.remarks,
        warnings=check_findings.warnings,
        facts=check_findings.facts,
        figures=check_figures.figures,
        tables=check_tables.tables,
        comparison=check_tables.comparison,
    ),
    "probe": Content(
        noun="probes",
        outcome=probe_findings.outcome,
        remarks=probe_findings.remarks,
        warnings=probe_findings.warnings,
        facts=probe_findings.facts,
        figures=probe_figures.figures,
        tables=probe_tables.tables,
        comparison=probe_tables.comparison,
    ),
    "plan": Content(
        noun="plans",
        outcome=plan_findings.outcome,
        label=plan_findings.label,
        remarks=plan_findings.remarks,
        warnings=plan_findings.warnings,
        facts=plan_findings.facts,
        figures=plan_figures.figures,
        tables=plan_tables.tables,
        comparison=plan_tables.comparison,
    ),
    "scan": Content(
        noun="scans",
        outcome=scan_findings.outcome,
        label=scan_findings.label,
        remarks=scan_findings.remarks,
        warnings=scan_findings.warnings,
        facts=scan_findings.facts,
        figures=scan_figures.figures,
        tables=scan_tables.tables,
        comparison=scan_tables.comparison,
    ),
    "swap": Content(
        noun="swaps",
        outcome=swap_findings.outcome,
        label=swap_findings.label,
        remarks=swap_findings.remarks,
        warnings=swap_findings.warnings,
        facts=swap_findings.facts,
        figures=swap_figures.figures,
        tables=swap_tables.tables,
        comparison=swap_tables.comparison,
    ),
    "neurons": Content(
        noun="searches for neurons",
        outcome=neurons_findings.outcome,
        label=neurons_findings.label,
        remarks=neurons_findings.remarks,
        warnings=neurons_findings.warnings,
        facts=neurons_findings.facts,
        figures=neurons_figures.figures,
        tables=neurons_tables.tables,
        comparison=neurons_tables.comparison,
    ),
}


@dataclass(frozen=True)
class FigureView:
    """One figure as the template takes it."""

    title: str
    reading: str
    words: tuple[str, ...]
    panels: tuple[Markup, ...]
    layout: str


@dataclass(frozen=True)
class RunView:
    """One run as the template takes it."""

    anchor: str
    name: str
    run: RunData
    outcome: str
    label: str
    remarks: list[str]
    facts: str
    warnings: list[str]
    figures: list[FigureView]
    files_note: str
    tables: list[Table]
    snippet: str
    provenance: Table


def render(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of one or more runs of any of :data:`CONTENT`; return the absolute path of the page.

    ``out`` is ``report.html`` in the first run's directory unless given. The figures of each run go to
    its ``figures`` folder as SVG, PNG and CSV; a run in a place that cannot be written keeps its page,
    which says so. Equal runs give equal bytes.

    Raises:
        ConfigError: no paths, no run at a path, a verb that is not shown, or ``out`` cannot be written.
        DataError: a record, config, provenance or journal is damaged.
        Stopped: no space is left.
    """
    if not paths:
        raise ConfigError("a report needs at least one run directory: `twinscope runs` lists them")
    runs = [read_run(path) for path in dict.fromkeys(Path(path).absolute() for path in paths)]
    for run in runs:
        if run.verb not in CONTENT:
            known = ", ".join(f"'{verb}'" for verb in CONTENT)
            raise ConfigError(f"{run.path} is a '{run.verb}' run: the report shows {known} runs")
    out = Path(out).absolute() if out is not None else runs[0].path / "report.html"
    names = _distinct_names(runs)
    drawn = [CONTENT[run.verb].figures(run) for run in runs]
    views = [
        _run_view(run, name, plots, index)
        for index, (run, name, plots) in enumerate(zip(runs, names, drawn, strict=True), 1)
    ]
    depths = sorted(
        {
            int(match[1])
            for plots in drawn
            for plot in plots
            for name in plot.variables.values()
            if (match := re.fullmatch(r"block-(\d+)-\d+", name))
        }
    )
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(_resource("page.html.j2")).render(
        title=_short(names[0], 80) if len(runs) == 1 else _title(runs),
        views=views,
        comparisons=_comparisons(dict(zip(names, runs, strict=True))),
        style=Markup(_colours(depths) + _resource("page.css")),
        script=Markup(_resource("page.js")),
        short=_short,
    )
    # A name from JSON may hold half a surrogate pair, which UTF-8 does not have.
    write_atomic(out, page.encode("utf-8", "replace"))
    return out


def _run_view(run: RunData, name: str, plots: Sequence[Plot], index: int) -> RunView:
    content = CONTENT[run.verb]
    return RunView(
        anchor=f"run-{index}",
        name=name,
        run=run,
        outcome=content.outcome(run),
        label=content.label(run),
        remarks=content.remarks(run),
        facts=_facts(run, content),
        warnings=content.warnings(run),
        figures=[
            FigureView(
                title=plot.title,
                reading=plot.reading,
                words=tuple(panel.words for panel in plot.panels),
                panels=tuple(
                    Markup(panel_svg(plot, number, f"r{index}-{plot.name}-{number + 1}"))
                    for number in range(len(plot.panels))
                ),
                layout=_layout(plot),
            )
            for plot in plots
        ],
        files_note=_save_figures(run, plots),
        tables=content.tables(run),
        snippet=content.snippet(run),
        provenance=provenance(run),
    )


def _save_figures(run: RunData, plots: Sequence[Plot]) -> str:
    folder = run.path / "figures"
    try:
        with writing(folder):
            folder.mkdir(exist_ok=True)
        for plot in plots:
            for name, data in plot_files(plot).items():
                write_atomic(folder / name, data)
    except ConfigError as error:
        return f"The figures were not saved as files: {error}."
    return "Each figure is in the run's folder figures/ as SVG, PNG and CSV." if plots else ""


def _distinct_names(runs: Sequence[RunData]) -> list[str]:
    """The runs' names; where several share one, with the time in the folder's name, then with a number."""
    names = [run.name for run in runs]
    times = [run.path.name.partition("-")[0] for run in runs]
    named = [
        f"{name}, {time}" if names.count(name) > 1 else name for name, time in zip(names, times, strict=True)
    ]
    return [
        f"{name} ({index})" if named.count(name) > 1 else name for index, name in enumerate(named, start=1)
    ]


def _title(runs: Sequence[RunData]) -> str:
    verbs = {run.verb for run in runs}
    noun = CONTENT[runs[0].verb].noun if len(verbs) == 1 else "runs"
    return f"{len(runs)} {noun} side by side"


def _comparisons(runs: Mapping[str, RunData]) -> list[Table]:
    """A table for each verb of which there are several runs."""
    alike = [{name: run for name, run in runs.items() if run.verb == verb} for verb in CONTENT]
    return [CONTENT[next(iter(part.values())).verb].comparison(part) for part in alike if len(part) > 1]


def _layout(plot: Plot) -> str:
    if len(plot.panels) == 1:
        return "single"
    return "small" if plot.size == SMALL_PANEL else "several"


def _facts(run: RunData, content: Content) -> str:
    parts = [run.status, *(_short(part, 80) for part in content.facts(run))]
    device = run.provenance.get("compute")
    if isinstance(device, dict) and isinstance(device.get("device"), str):
        parts.append(_short(device["device"], 40))
    if isinstance(run.provenance.get("started"), str):
        parts.append(f"begun {_short(run.provenance['started'], 24)}")
    return " · ".join(parts)


def _colours(depths: Sequence[int]) -> str:
    """The palette and the blocks' colours as CSS variables, for light paper, dark screen and print."""
    blocks = [colour for depth in depths for colour in block_colours(depth)]
    light = [(name, pair[0]) for name, pair in PALETTE.items()] + [(name, day) for name, day, _ in blocks]
    dark = [(name, pair[1]) for name, pair in PALETTE.items()] + [(name, night) for name, _, night in blocks]
    day, night = ("".join(f"--{name}:{value};" for name, value in part) for part in (light, dark))
    return f":root{{{day}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{night}}}}}\n"


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def _resource(name: str) -> str:
    return (files("twinscope.report") / name).read_text(encoding="utf-8")
