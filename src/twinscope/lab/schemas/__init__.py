"""What a record may hold, verb by verb: strict models of summaries and rows, one module for each verb.

A verb is added by adding its two models to :data:`SCHEMAS`. Reading, checking and writing are in record.py.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from twinscope.lab.schemas.check import CheckRow, CheckSummary
from twinscope.lab.schemas.collapse import CollapsePoint, CollapseSummary
from twinscope.lab.schemas.cost import CostRow, CostSummary
from twinscope.lab.schemas.leak import LeakRow, LeakSummary
from twinscope.lab.schemas.neurons import NeuronRow, NeuronsSummary
from twinscope.lab.schemas.plan import PlanRow, PlanSummary
from twinscope.lab.schemas.probe import ProbeRow, ProbeSummary
from twinscope.lab.schemas.ranks import RanksRow, RanksSummary
from twinscope.lab.schemas.scan import ScanRow, ScanSummary
from twinscope.lab.schemas.swap import SwapRecordRow, SwapSummary
from twinscope.lab.schemas.train import TrainRow, TrainSummary

#: Verb -> (model of the summary, type of one row).
SCHEMAS: dict[str, tuple[type[BaseModel], Any]] = {
    "check": (CheckSummary, CheckRow),
    "collapse": (CollapseSummary, CollapsePoint),
    "cost": (CostSummary, CostRow),
    "leak": (LeakSummary, LeakRow),
    "neurons": (NeuronsSummary, NeuronRow),
    "plan": (PlanSummary, PlanRow),
    "probe": (ProbeSummary, ProbeRow),
    "ranks": (RanksSummary, RanksRow),
    "scan": (ScanSummary, ScanRow),
    "swap": (SwapSummary, SwapRecordRow),
    "train": (TrainSummary, TrainRow),
}
