"""Function-preserving conversions between attention cells, each with its preconditions.

Every function takes a layer and returns another one of the target cell that computes the same, in
the same dtype; the arithmetic in between is float64. Where a precondition does not hold, it raises
`ConversionError` with the reason. Only `truncate` and `truncate_vo` change the function; they say
by how much.

| function | from | to | needs |
|---|---|---|---|
| to_standard | any linear cell | qk/vo | under RoPE, QK-norm: no wider values |
| merge | bilinear score | merged | abs |
| unmerge, truncate | bilinear score | qk, low_rank | abs; rank (truncate: none) |
| gauge_fix_qk | qk | gauge_fixed, qk | abs |
| to_symmetric, to_shared | symmetric A[n] | symmetric, shared_qk | abs; rank; signs |
| to_collaborative | qk | collaborative | abs |
| merge_vo | any value | merged_vo | |
| unmerge_vo, truncate_vo | any value | vo, low_rank | rank (truncate_vo: none) |
| gauge_fix_vo | vo | gauge_fixed | |
| fold_double | double | qk, vo | |
| gqa_to_mha | qk/vo | qk/vo | |
| gqa_to_latent | qk/vo | latent/latent | no RoPE; 2 K H <= D |
| fold_gains | qk/vo | qk/vo | |
| fold_biases | qk/vo | qk/vo | abs for b_K |
| queries_to_identity | a bare network | W_Q = I | no norm, no MLP skip; N H = D |

"abs": nothing acts between W_Q and W_K: no RoPE, no QK-norm; positions may be added to the stream
or to the logits.
"""

from qkattn.convert.basis import BareLayer, BareNetwork, queries_to_identity
from qkattn.convert.ov_circuit import gauge_fix_vo, merge_vo, truncate_vo, unmerge_vo
from qkattn.convert.parts import Factors, factors
from qkattn.convert.qk_circuit import (
    Truncation,
    gauge_fix_qk,
    merge,
    to_collaborative,
    truncate,
    unmerge,
)
from qkattn.convert.symmetrize import to_shared, to_symmetric
from qkattn.convert.whole_layer import (
    fold_biases,
    fold_double,
    fold_gains,
    gqa_to_latent,
    gqa_to_mha,
    to_standard,
)
from qkattn.errors import ConversionError

__all__ = [
    'BareLayer',
    'BareNetwork',
    'ConversionError',
    'Factors',
    'Truncation',
    'factors',
    'fold_biases',
    'fold_double',
    'fold_gains',
    'gauge_fix_qk',
    'gauge_fix_vo',
    'gqa_to_latent',
    'gqa_to_mha',
    'merge',
    'merge_vo',
    'queries_to_identity',
    'to_collaborative',
    'to_shared',
    'to_standard',
    'to_symmetric',
    'truncate',
    'truncate_vo',
    'unmerge',
    'unmerge_vo',
]
