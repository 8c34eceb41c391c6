"""Attention as a grid: a Score (which position to read) times a Value (what to move)."""

from qkattn.attention.attend import attend, visible
from qkattn.attention.attention import Attention
from qkattn.attention.registry import SCORES, VALUES, parse_cell
from qkattn.attention.score import Score
from qkattn.attention.spec import AttentionSpec, SpecError
from qkattn.attention.value import Value

__all__ = [
    'SCORES',
    'VALUES',
    'Attention',
    'AttentionSpec',
    'Score',
    'SpecError',
    'Value',
    'attend',
    'parse_cell',
    'visible',
]
