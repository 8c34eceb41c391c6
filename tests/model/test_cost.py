"""Counts against formulas worked out by hand."""

import dataclasses

import pytest

from qkattn.config import ModelConfig
from qkattn.model import cost
from qkattn.study import variant_catalogue
from tests.attention import examples
from tests.lanes import mostly_slow

D = 64
L = 3  # layers
V = 100  # tokens of the vocabulary
T = 32  # context
F = 256  # hidden features of an MLP
S = 48  # source context
BASE = ModelConfig(d_model=D, num_layers=L, num_heads=4, context=T, vocab_size=V)
BOTH = {'kind': 'encoder_decoder', 'num_encoder_layers': 1, 'source_context': S}
VARIANTS = {'encoder_variant': 'merged/no_vo', 'cross_variant': 'key_free/no_v'}
UNSHARED = {'shared_embeddings': False, 'positions': 'rope', 'norm_position': 'post'}
UNTIED = {'tied_embeddings': False, 'positions': 'none', 'biases': True}
# FLOPs per token.
PROJECTION = 2 * D * D
MLP = 4 * D * F
READ = 2 * T * D  # logits, or the sum of values
UNEMBED = 2 * D * V
LAYER = 4 * PROJECTION + MLP + 2 * READ
ENCODER = S * (4 * PROJECTION + MLP + 4 * S * D)
# Queries and output of the cross-attention are per target token, keys and values per source token.
DECODER = T * (LAYER + 2 * PROJECTION + 4 * S * D) + S * 2 * PROJECTION

# Numbers of parameters: the matrices of attention or an MLP, without biases and with them.
ATTENTION = 4 * D * D
BIASED_ATTENTION = 4 * (D * D + D)
MLP_MATRICES = 2 * D * F
BIASED_MLP = 2 * D * F + F + D


@pytest.mark.parametrize(
    ('fields', 'attention', 'mlp', 'embedding', 'norm'),
    [
        # Two norms in each of 3 layers and a final norm: 7 D gains.
        pytest.param({}, 3 * ATTENTION, 3 * MLP_MATRICES, V * D + T * D, 7 * D, id='default'),
        # The 3 decoder layers have 4 matrices each, and 2 more in cross-attention. The merged
        # matrix of the encoder layer is D x D for each of 4 heads.
        pytest.param(
            BOTH | VARIANTS,
            (3 * 4 + 4 + 3 * 2) * D * D,
            4 * MLP_MATRICES,
            (V + T + S) * D,
            13 * D,
            id='variants by site',
        ),
        pytest.param(
            BOTH | UNSHARED, 7 * ATTENTION, 4 * MLP_MATRICES, 2 * V * D, 11 * D, id='unshared'
        ),
        pytest.param(
            BOTH | UNTIED, 7 * BIASED_ATTENTION, 4 * BIASED_MLP, 2 * V * D, 26 * D, id='untied'
        ),
        # A gated MLP has three matrices. By default, it has 8/3 D = 171 hidden features.
        pytest.param(
            {'activation': 'geglu'},
            3 * ATTENTION,
            3 * 3 * D * 171,
            V * D + T * D,
            7 * D,
            id='gated',
        ),
        pytest.param(
            {'attention_gain': False},
            3 * ATTENTION,
            3 * MLP_MATRICES,
            V * D + T * D,
            4 * D,
            id='no gain before attention',
        ),
        # An RMSNorm has gains and no biases, so 7 D as by default.
        pytest.param(
            UNTIED | {'norm': 'rmsnorm'},
            3 * BIASED_ATTENTION,
            3 * BIASED_MLP,
            2 * V * D,
            7 * D,
            id='rmsnorm',
        ),
    ],
)
def test_parameter_counts_are_those_worked_out_by_hand(fields, attention, mlp, embedding, norm):
    counts = cost.count(dataclasses.replace(BASE, **fields))
    assert counts == {
        'attention': attention,
        'mlp': mlp,
        'embedding': embedding,
        'norm': norm,
        'total': attention + mlp + embedding + norm,
    }


def test_a_parameter_of_no_group_is_refused():
    with pytest.raises(ValueError, match='w_extra_D belongs to no budget group'):
        cost.group_of('w_extra_D')


@pytest.mark.parametrize(
    ('fields', 'flops'),
    [
        ({}, L * LAYER + UNEMBED),
        # Queries and keys come from the same product, so there is one product less.
        ({'score': 'shared_qk'}, L * (LAYER - PROJECTION) + UNEMBED),
        # One D x D product for each of 4 heads, whose logits each use all D channels.
        ({'score': 'merged'}, L * (LAYER + 2 * PROJECTION + 3 * READ) + UNEMBED),
        # There is no W_Q and no W_K, and all heads have the same logits.
        ({'score': 'neither_full'}, L * (LAYER - 2 * PROJECTION) + UNEMBED),
        # Latents of 4 channels, and 4 rotated channels, take the place of 16 channels of a key. The
        # queries of 4 heads of 16 channels are multiplied by W_K. No keys are computed.
        (
            {'score': 'latent(size=4, rope_size=4)', 'positions': 'rope'},
            L * (LAYER - PROJECTION - READ // 2 + 2 * (16 + 8 + 4) * D) + UNEMBED,
        ),
        # The gate is a third matrix of the MLP.
        ({'activation': 'swiglu', 'd_ff': F}, L * (LAYER + MLP // 2) + UNEMBED),
        ({'scan_unroll': 1}, L * LAYER + UNEMBED),
        (BOTH, (ENCODER + L * DECODER) / T + UNEMBED),
    ],
    ids=str,
)
def test_flops_are_those_worked_out_by_hand(fields, flops):
    assert cost.flops_per_token(dataclasses.replace(BASE, **fields)) == flops


@pytest.mark.parametrize(
    ('score', 'value'),
    mostly_slow(variant_catalogue.documented_variants() + examples.FOLDER_VARIANTS, every=8),
)
def test_a_training_step_costs_three_forward_passes(score, value):
    """The backward pass has two products for each product of the forward pass."""
    config = dataclasses.replace(BASE, num_layers=1, score=score, value=value)
    without_gradient = 0
    if 'Frozen' in score:  # W_Q and W_K are fixed
        without_gradient = 2 * PROJECTION
    if 'Hadamard' in value:  # W_O is two fixed factors of 8 x 8
        without_gradient = 2 * 2 * 64 * 8
    want = 3 * cost.flops_per_token(config) - without_gradient
    assert cost.training_flops_per_token(config) == want


def test_rematerialization_costs_another_forward_pass():
    config = dataclasses.replace(BASE, remat='full', scan_unroll=1)
    layers = cost.flops_per_token(config) - UNEMBED
    # No gradient needs the last product of an MLP, so it is not computed again.
    last_products = L * 2 * F * D
    recomputed = layers - last_products
    assert cost.training_flops_per_token(config) == 3 * (layers + UNEMBED) + recomputed


KEYS_AND_VALUES = 2 * D
ONE_HEAD = 16  # channels


@pytest.mark.parametrize(
    ('fields', 'floats'),
    [
        ({}, L * KEYS_AND_VALUES),
        ({'num_kv_heads': 1}, L * 2 * ONE_HEAD),
        ({'score': 'key_free'}, L * KEYS_AND_VALUES),
        # Keys and values are both the input x, so only x is cached.
        ({'score': 'key_free', 'value': 'no_v'}, L * D),
        ({'score': 'merged', 'value': 'no_vo'}, L * D),
        # Cross-attention caches as much as self-attention.
        (BOTH, L * 2 * KEYS_AND_VALUES),
        (BOTH | {'num_kv_heads': 1}, L * 4 * ONE_HEAD),
        (BOTH | {'cross_variant': 'merged/no_v'}, L * (KEYS_AND_VALUES + D)),
        (BOTH | {'encoder_variant': 'merged/no_v'}, L * 2 * KEYS_AND_VALUES),
    ],
    ids=str,
)
def test_cache_sizes_are_those_worked_out_by_hand(fields, floats):
    config = dataclasses.replace(BASE, **fields)
    assert cost.cache_floats_per_token(config) == floats
