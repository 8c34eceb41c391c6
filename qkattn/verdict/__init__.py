"""Reads a study's files, checks its hygiene and decides: codes and numbers, no prose."""

from qkattn.verdict.arms import Arm
from qkattn.verdict.codes import (
    Decision,
    NotScaled,
    Reason,
    ReasonCode,
    Remark,
    RemarkCode,
    Verdict,
)
from qkattn.verdict.curves import Curve
from qkattn.verdict.findings import Findings, Scaling, find
from qkattn.verdict.load import Missing, PlannedRun, Study, load_study
from qkattn.verdict.trials import Trial

__all__ = [
    'Arm',
    'Curve',
    'Decision',
    'Findings',
    'Missing',
    'NotScaled',
    'PlannedRun',
    'Reason',
    'ReasonCode',
    'Remark',
    'RemarkCode',
    'Scaling',
    'Study',
    'Trial',
    'Verdict',
    'find',
    'load_study',
]
