"""Reads a study's files, and gives or withholds its verdicts: codes and numbers, no prose."""

from qkattn.stats.decision import Decision
from qkattn.verdict.codes import Reason, ReasonCode, Remark, RemarkCode
from qkattn.verdict.findings import Findings
from qkattn.verdict.study_findings import find, load_findings
from qkattn.verdict.trained_study import TrainedStudy, load_study

__all__ = ['Decision', 'Findings', 'Reason', 'ReasonCode', 'Remark', 'RemarkCode']
__all__ += ['TrainedStudy', 'find', 'load_findings', 'load_study']
