"""Attention layers, each the product of a Score (the QK circuit) and a Value (the OV circuit)."""

from qkattn.attention.attend import attend
from qkattn.attention.attention import Attention
from qkattn.attention.mask import Mask, visible
from qkattn.attention.norm import rms_norm
from qkattn.attention.normalizers import NORMALIZERS, Normalizer
from qkattn.attention.parameters import bias, grouped, homogeneous, project, weight
from qkattn.attention.registry import SCORES, VALUES, parse_variant
from qkattn.attention.scores.score import Cache, Score
from qkattn.attention.spec import AttentionSpec
from qkattn.attention.values.value import Factored, Value
from qkattn.errors import SpecError

__all__ = [
    'NORMALIZERS',
    'SCORES',
    'VALUES',
    'Attention',
    'AttentionSpec',
    'Cache',
    'Factored',
    'Mask',
    'Normalizer',
    'Score',
    'SpecError',
    'Value',
    'attend',
    'bias',
    'grouped',
    'homogeneous',
    'parse_variant',
    'project',
    'rms_norm',
    'visible',
    'weight',
]
