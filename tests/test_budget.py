"""Counts against formulas worked out by hand, and equal-weight solutions."""

import dataclasses

import jax
import pytest

from qkattn import budget, catalogue
from qkattn.attention import SCORES, VALUES
from qkattn.config import ModelConfig
from qkattn.model import Decoder

BASE = ModelConfig(d_model=64, num_layers=3, num_heads=4, context=32, vocab_size=100)


def test_weights_of_the_standard_model():
    D, L, V, T, F = 64, 3, 100, 32, 256
    assert budget.count(BASE) == {
        'embedding': V * D + T * D,
        'attention': L * 4 * D * D,
        'mlp': L * 2 * D * F,
        'norm': L * 2 * D + D,
        'total': V * D + T * D + L * (4 * D * D + 2 * D * F + 2 * D) + D,
    }


def test_options_add_what_they_should():
    def extra(**fields):
        return (
            budget.count(dataclasses.replace(BASE, **fields))['total'] - budget.count(BASE)['total']
        )

    assert extra(tied_embeddings=False) == 64 * 100
    assert extra(positions='none') == -32 * 64
    # 7 layer-norm biases; q, k, v, o and the MLP's two in each of 3 layers
    assert extra(biases=True) == 7 * 64 + 3 * (4 * 64 + 256 + 64)
    assert extra(biases=True) - extra(biases=True, norm='rmsnorm') == 7 * 64
    assert extra(context=64) == 32 * 64


def test_the_abstract_count_is_the_count_of_the_arrays():
    real = jax.tree.leaves(Decoder(BASE, key=jax.random.key(0)))
    assert sum(leaf.size for leaf in real) == budget.count(BASE)['total']


def test_a_parameter_of_no_group_is_refused():
    with pytest.raises(ValueError, match='w_extra_D belongs to no budget group'):
        budget.group_of('w_extra_D')


@pytest.mark.parametrize(
    ('fields', 'flops'),
    [
        ({}, 3 * (8 * 64 * 64 + 4 * 64 * 256 + 4 * 32 * 64) + 2 * 64 * 100),
        # one matrix less, though queries and keys come from the same product
        ({'score': 'shared_qk'}, 3 * (6 * 64 * 64 + 4 * 64 * 256 + 4 * 32 * 64) + 2 * 64 * 100),
        (
            {'score': 'merged'},
            3 * (2 * 4 * 64 * 64 + 4 * 64 * 64 + 4 * 64 * 256 + 2 * 32 * 4 * 64 + 2 * 32 * 64)
            + 2 * 64 * 100,
        ),
        ({'scan_unroll': 1}, 3 * (8 * 64 * 64 + 4 * 64 * 256 + 4 * 32 * 64) + 2 * 64 * 100),
    ],
    ids=['qk', 'shared_qk', 'merged', 'rolled'],
)
def test_flops(fields, flops):
    assert budget.flops_per_token(dataclasses.replace(BASE, **fields)) == flops


@pytest.mark.parametrize(
    ('fields', 'floats'),
    [
        ({}, 3 * 2 * 64),
        ({'num_kv_heads': 1}, 3 * 2 * 16),
        ({'score': 'key_free'}, 3 * 2 * 64),
        ({'score': 'key_free', 'value': 'no_v'}, 3 * 64),
        ({'score': 'merged', 'value': 'no_vo'}, 3 * 64),
    ],
)
def test_cache(fields, floats):
    assert budget.cache_floats_per_token(dataclasses.replace(BASE, **fields)) == floats


MEDIUM = ModelConfig(d_model=128, num_layers=2, num_heads=4)
TARGET = budget.count(MEDIUM)['total']


SHOWN = [catalogue.partner(n, c) for n, c in (*SCORES.items(), *VALUES.items())]


@pytest.mark.parametrize(('score', 'value'), SHOWN, ids='/'.join)
def test_every_circuit_is_matched(score, value):
    found = budget.match(dataclasses.replace(MEDIUM, score=score, value=value), TARGET)
    assert abs(found.residual) <= 1e-3
    assert found.weights == budget.count(found.config)
    assert found.residual == found.weights['total'] / TARGET - 1
    # the MLP about keeps its proportion: the second knob only takes up the rest
    assert abs(found.config.mlp_width / found.config.d_model - 4) < (
        0.4 if value != 'hadamard' else 2
    )


@pytest.mark.parametrize(
    ('fields', 'd_model'),
    [({'value': 'hadamard'}, 128), ({'score': 'query_free', 'head_size': 32}, 128)],
    ids=['powers of two', 'one width'],
)
def test_a_cell_of_few_widths_takes_the_rest_from_d_ff(fields, d_model):
    found = budget.match(dataclasses.replace(MEDIUM, **fields), TARGET)
    assert found.config.d_model == d_model
    assert abs(found.residual) <= 1e-3


@pytest.mark.parametrize(
    'fields',
    [
        {'num_heads': 3, 'd_model': 99},
        {'num_heads': 6, 'num_kv_heads': 2, 'd_model': 90},
        {'num_heads': 7, 'd_model': 70, 'score': 'shared_qk'},
        {'num_heads': 8, 'num_kv_heads': 1, 'd_model': 128},
        {'head_size': 24, 'score': 'merged'},
        {'biases': True, 'tied_embeddings': False, 'norm': 'rmsnorm'},
    ],
    ids=str,
)
def test_odd_shapes_are_matched(fields):
    found = budget.match(dataclasses.replace(MEDIUM, **fields), TARGET)
    assert abs(found.residual) <= 1e-3
    assert found.config.d_model % (found.config.num_heads if 'head_size' not in fields else 1) == 0


def test_a_neighbouring_width_is_taken_where_the_nearest_is_too_coarse():
    config = dataclasses.replace(MEDIUM, score='merged')
    nearest = budget.match(config, TARGET)
    finer = budget.match(config, TARGET, tolerance=1e-4)
    assert abs(nearest.residual) > 1e-4 >= abs(finer.residual)
    assert abs(finer.config.d_model - nearest.config.d_model) == 4


def test_non_embedding_weights_can_be_matched():
    target = budget.matched_weights(budget.count(MEDIUM), 'non_embedding')
    found = budget.match(
        dataclasses.replace(MEDIUM, score='shared_qk'), target, which='non_embedding'
    )
    weights = found.weights
    assert abs((weights['total'] - weights['embedding']) / target - 1) <= 1e-3
    assert weights['total'] > TARGET


def test_the_baseline_matches_itself():
    assert budget.match(MEDIUM, TARGET).config == dataclasses.replace(MEDIUM, d_ff=512)


@pytest.mark.parametrize(
    ('fields', 'target', 'kwargs', 'message'),
    [
        ({}, TARGET, {'fill': None, 'tolerance': 1e-9, 'multiple_of': 64}, None),
        ({'score': 'shared_qk'}, TARGET, {'fill': None}, 'd_model alone is too coarse'),
        ({'score': 'shared_qk'}, TARGET + 1, {'tolerance': 1e-7}, 'one step of d_ff is .* weights'),
        (
            {'score': 'query_free', 'value': 'low_rank(rank=0)'},
            TARGET,
            {},
            'cannot be built: .*rank',
        ),
        ({'num_heads': 64, 'd_model': 64}, 5000, {}, 'more than 5000 weights at d_ff=1'),
    ],
    ids=['coarse but exact', 'no fill', 'tolerance', 'no width', 'too small'],
)
def test_a_request_that_cannot_be_met_names_the_constraint(fields, target, kwargs, message):
    config = dataclasses.replace(MEDIUM, **fields)
    if message is None:
        assert budget.match(config, target, **kwargs).residual == 0
    else:
        with pytest.raises(budget.MatchError, match=message):
            budget.match(config, target, **kwargs)
