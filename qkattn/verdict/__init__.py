"""Reads a study's files, checks its hygiene and decides: codes and numbers, no prose."""

from qkattn.stats.decision import Decision
from qkattn.verdict.codes import Reason, ReasonCode, Remark, RemarkCode
from qkattn.verdict.findings import Findings, find, load_findings
from qkattn.verdict.load import Study, load_study

__all__ = ['Decision', 'Findings', 'Reason', 'ReasonCode', 'Remark', 'RemarkCode']
__all__ += ['Study', 'find', 'load_findings', 'load_study']
