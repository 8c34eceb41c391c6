"""Counts against formulas worked out by hand."""

import dataclasses

import pytest

from qkattn.config import ModelConfig
from qkattn.model import cost
from qkattn.study import variant_catalogue
from tests.attention import examples
from tests.lanes import mostly_slow

D, L, V, T, F, S = 64, 3, 100, 32, 256, 48
BASE = ModelConfig(d_model=D, num_layers=L, num_heads=4, context=T, vocab_size=V)
BOTH = {'kind': 'encoder_decoder', 'num_encoder_layers': 1, 'source_context': S}
VARIANTS = {'encoder_variant': 'merged/no_vo', 'cross_variant': 'key_free/no_v'}
UNSHARED = {'shared_embeddings': False, 'positions': 'rope', 'norm_position': 'post'}
UNTIED = {'tied_embeddings': False, 'positions': 'none', 'biases': True}
PROJECTION = 2 * D * D
MLP = 4 * D * F
READ = 2 * T * D
UNEMBED = 2 * D * V
LAYER = 4 * PROJECTION + MLP + 2 * READ
ENCODER = S * (4 * PROJECTION + MLP + 4 * S * D)
# Queries and output of the cross-attention are per target token, keys and values per source token.
DECODER = T * (LAYER + 2 * PROJECTION + 4 * S * D) + S * 2 * PROJECTION


BIASED = 3 * 4 * (D * D + D), 3 * (2 * D * F + F + D)


def test_parameter_counts_are_those_worked_out_by_hand():
    for fields, attention, mlp, embedding, norm in (
        ({}, 3 * 4 * D * D, 3 * 2 * D * F, V * D + T * D, 7 * D),
        (BOTH | VARIANTS, (3 * 4 + 4 + 3 * 2) * D * D, 4 * 2 * D * F, (V + T + S) * D, 13 * D),
        (BOTH | UNSHARED, 7 * 4 * D * D, 4 * 2 * D * F, 2 * V * D, 11 * D),
        # q, k, v and o add a vector each; both directions of the MLP as well.
        (BOTH | UNTIED, 7 * 4 * (D * D + D), 4 * (2 * D * F + F + D), 2 * V * D, 26 * D),
        # A gate: three matrices, by default of 8/3 D in place of 4 D. No gain before attention.
        ({'activation': 'geglu'}, 3 * 4 * D * D, 3 * 3 * D * 171, V * D + T * D, 7 * D),
        ({'attention_gain': False}, 3 * 4 * D * D, 3 * 2 * D * F, V * D + T * D, 4 * D),
        # RMSNorm has no biases.
        (UNTIED | {'norm': 'rmsnorm'}, *BIASED, 2 * V * D, 7 * D),
    ):
        parts = {'attention': attention, 'mlp': mlp, 'embedding': embedding, 'norm': norm}
        counts = cost.count(dataclasses.replace(BASE, **fields))
        assert counts == parts | {'total': sum(parts.values())}, fields


def test_a_parameter_of_no_group_is_refused():
    with pytest.raises(ValueError, match='w_extra_D belongs to no budget group'):
        cost.group_of('w_extra_D')


def test_flops_are_those_worked_out_by_hand():
    for fields, flops in (
        ({}, 3 * LAYER + UNEMBED),
        # one matrix less, though queries and keys come from the same product
        ({'score': 'shared_qk'}, 3 * (LAYER - PROJECTION) + UNEMBED),
        # four heads of D x D, each of which scores whole vectors
        ({'score': 'merged'}, 3 * (LAYER + 2 * PROJECTION + 3 * READ) + UNEMBED),
        # one pattern of attention for all heads
        ({'score': 'neither_full'}, 3 * (LAYER - 2 * PROJECTION) + UNEMBED),
        ({'activation': 'swiglu', 'd_ff': F}, 3 * (LAYER + MLP // 2) + UNEMBED),
        ({'scan_unroll': 1}, 3 * LAYER + UNEMBED),
        (BOTH, (ENCODER + 3 * DECODER) / T + UNEMBED),
    ):
        assert cost.flops_per_token(dataclasses.replace(BASE, **fields)) == flops, fields


@pytest.mark.parametrize(
    ('score', 'value'),
    mostly_slow(variant_catalogue.documented_variants() + examples.FOLDER_VARIANTS, every=8),
)
def test_a_training_step_costs_three_forward_passes(score, value):
    """The backward pass has two products for each of the forward pass."""
    config = dataclasses.replace(BASE, num_layers=1, score=score, value=value)
    fixed = 0
    if 'Frozen' in score:  # no gradients of W_Q and W_K
        fixed = 2 * PROJECTION
    if 'Hadamard' in value:  # nor of the two factors of W_O, 8 x 8
        fixed = 2 * 2 * 64 * 8
    want = 3 * cost.flops_per_token(config) - fixed
    assert cost.training_flops_per_token(config) == want


def test_rematerialization_costs_another_forward_pass():
    config = dataclasses.replace(BASE, remat='full', scan_unroll=1)
    layers = cost.flops_per_token(config) - UNEMBED
    # without the last product of each layer, which no gradient needs
    again = layers - 3 * 2 * 64 * 256
    assert cost.training_flops_per_token(config) == 3 * (layers + UNEMBED) + again


def test_cache_sizes_are_those_worked_out_by_hand():
    # The model, and the floats it caches for a token: 3 layers, keys and values (2;
    # 4 with cross-attention), and the features of each.
    for fields, floats in (
        ({}, 3 * 2 * D),
        ({'num_kv_heads': 1}, 3 * 2 * 16),
        ({'score': 'key_free'}, 3 * 2 * D),
        ({'score': 'key_free', 'value': 'no_v'}, 3 * D),
        ({'score': 'merged', 'value': 'no_vo'}, 3 * D),
        (BOTH, 3 * 4 * D),
        (BOTH | {'num_kv_heads': 1}, 3 * 4 * 16),
        (BOTH | {'cross_variant': 'merged/no_v'}, 3 * 3 * D),
        (BOTH | {'encoder_variant': 'merged/no_v'}, 3 * 4 * D),
    ):
        config = dataclasses.replace(BASE, **fields)
        assert cost.cache_floats_per_token(config) == floats, fields
