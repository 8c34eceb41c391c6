"""Attention layers, each the product of a Score (the QK circuit) and a Value (the OV circuit)."""

from qkattn.attention.attention import Attention
from qkattn.attention.kernels.choice import attend
from qkattn.attention.maps import Cache
from qkattn.attention.mask import Mask, visible
from qkattn.attention.normalizers import NORMALIZERS, Normalizer
from qkattn.attention.parameters import bias, grouped, homogeneous, project, rms_norm, weight
from qkattn.attention.registry import SCORES, VALUES, parse_variant
from qkattn.attention.scores.score import Score, TwoMaps
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
    'TwoMaps',
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
