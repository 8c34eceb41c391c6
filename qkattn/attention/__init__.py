"""Attention as a grid: a Score (which position to read) times a Value (what to move)."""

from qkattn.attention.attend import attend, visible
from qkattn.attention.attention import Attention
from qkattn.attention.registry import SCORES, VALUES, parse_variant
from qkattn.attention.scores.score import Cache, Score
from qkattn.attention.spec import AttentionSpec
from qkattn.attention.values.value import Value
from qkattn.errors import SpecError

__all__ = [
    'SCORES',
    'VALUES',
    'Attention',
    'AttentionSpec',
    'Cache',
    'Score',
    'SpecError',
    'Value',
    'attend',
    'parse_variant',
    'visible',
]
