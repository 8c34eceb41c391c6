"""Plain names of variants."""

import pytest

from qkattn.report.plain_names import SCORES, VALUES, plain_name
from qkattn.study import variant_tables


@pytest.mark.parametrize(('kind', 'names'), [('Score', SCORES), ('Value', VALUES)])
def test_every_circuit_of_the_catalogue_has_a_plain_name(kind, names):
    catalogue = variant_tables.stored()
    assert names.keys() == catalogue[kind].keys()


@pytest.mark.parametrize('names', [SCORES, VALUES], ids=['scores', 'values'])
def test_plain_names_differ(names):
    assert len(set(names.values())) == len(names)


@pytest.mark.parametrize(
    ('variant', 'plain'),
    [
        ('qk/vo', 'all of W_Q, W_K, W_V and W_O'),
        ('query_free/vo', 'no W_Q'),
        ('shared_qk(key_norm=True)/no_v', 'W_Q = W_K (key norm), no W_V'),
        ('low_rank(rank=8)/vo', 'W_Q W_K^T of low rank (rank 8)'),
        ('qk/vo?num_kv_heads=1&qk_norm=True', 'key/value heads: 1, qk norm: True'),
        ('qk(bilinear=True)/vo', 'qk (bilinear)'),
        ('my_module:Score/vo', None),  # not in the catalogue
        ('bad/vo', None),
        ('bad', None),
    ],
)
def test_a_plain_name_says_which_matrices_a_variant_has(variant, plain):
    assert plain_name(variant) == plain
