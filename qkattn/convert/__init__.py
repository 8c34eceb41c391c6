"""Conversions between attention variants: function-preserving rewrites of trained parameters.

A conversion takes a layer and returns a layer of another variant that computes the same function
in the same dtype; the arithmetic in between is float64. Where a precondition does not hold, it
raises `ConversionError` with the reason. Only `truncate` and `truncate_vo` change the function;
they return the error.

| conversion | from | to | requires |
|---|---|---|---|
| to_standard | any linear variant | qk/vo | under RoPE, QK-norm: no wider values |
| merge | bilinear Score | merged | free logits |
| unmerge, truncate | bilinear Score | qk, low_rank | free logits; rank (truncate: none) |
| gauge_fix_qk | qk | gauge_fixed | free logits; no nearly singular block |
| to_symmetric, to_shared | symmetric A[n] | symmetric, shared_qk | free logits; rank; signs |
| to_collaborative | qk | collaborative | free logits |
| merge_vo | any Value | merged_vo | |
| unmerge_vo, truncate_vo | any Value | vo, low_rank | rank (truncate_vo: none) |
| gauge_fix_vo | vo | gauge_fixed | no nearly singular block |
| fold_double | double | qk, vo | |
| gqa_to_mha | qk/vo | qk/vo | |
| gqa_to_latent | qk/vo | latent/latent | no RoPE; 2 K H <= D |
| fold_gains | qk/vo | qk/vo | pre-norm |
| fold_biases | qk/vo | qk/vo | free logits for b_K |
| queries_to_identity | a BareNetwork | W_Q = I | no norm, no MLP skip; N H = D |

Free logits: nothing acts between W_Q and W_K, that is, no RoPE and no QK-norm; positions may be
added to the stream or to the logits.
"""

from qkattn.convert.change_of_basis import BareLayer, BareNetwork, queries_to_identity
from qkattn.convert.conversions import CONVERSIONS, Conversion, parse_conversion
from qkattn.convert.factors import Factors, extract_factors
from qkattn.convert.folding import fold_biases, fold_double, fold_gains
from qkattn.convert.gauge import gauge_fix_qk, gauge_fix_vo
from qkattn.convert.kv_heads import gqa_to_latent, gqa_to_mha
from qkattn.convert.model_conversion import (
    convert_model,
    converted,
    logit_error,
    require_exact,
)
from qkattn.convert.ov_circuit import merge_vo, truncate_vo, unmerge_vo
from qkattn.convert.qk_circuit import merge, to_collaborative, truncate, unmerge
from qkattn.convert.standard_form import to_standard
from qkattn.convert.symmetric_qk import to_shared, to_symmetric
from qkattn.convert.truncation import Truncation

__all__ = [
    'CONVERSIONS',
    'BareLayer',
    'BareNetwork',
    'Conversion',
    'Factors',
    'Truncation',
    'convert_model',
    'converted',
    'extract_factors',
    'fold_biases',
    'fold_double',
    'fold_gains',
    'gauge_fix_qk',
    'gauge_fix_vo',
    'gqa_to_latent',
    'gqa_to_mha',
    'logit_error',
    'merge',
    'merge_vo',
    'parse_conversion',
    'queries_to_identity',
    'require_exact',
    'to_collaborative',
    'to_shared',
    'to_standard',
    'to_symmetric',
    'truncate',
    'truncate_vo',
    'unmerge',
    'unmerge_vo',
]
