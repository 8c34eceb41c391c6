"""Configs of equal cost: what each destination moves, what it leaves alone, and what is refused."""

import dataclasses

import pytest

from qkattn.config import ModelConfig
from qkattn.errors import MatchError
from qkattn.model import cost
from qkattn.study import catalogue, matching

MEDIUM = ModelConfig(d_model=128, num_layers=2, num_heads=4)
TARGET = cost.count(MEDIUM)['total']


SMALL = ModelConfig(d_model=96, num_layers=2, num_heads=4, context=64)
DEEP = ModelConfig(d_model=128, num_layers=4, num_heads=4)

# d_model and d_ff of each variant made equal to qk/vo: SMALL by total parameters, by non-embedding
# parameters, DEEP by both. The hashes of finished runs depend on them.
SOLVED = """
qk/vo                    96 384     96 384    128 512    128 512
merged/vo                88 372     88 364    120 462    120 459
shared_qk/vo            100 400    100 403    132 545    132 547
symmetric/vo            100 399    100 402    132 545    132 546
pairwise/vo             100 387    100 390    132 529    132 530
symmetric_skew/vo        96 384     96 384    128 512    128 512
query_free/vo           100 400    100 403    132 545    132 547
key_free/vo             100 400    100 403    132 545    132 547
neither/vo              104 421    104 428    140 558    140 562
query_free_full/vo       88 372     88 364    120 462    120 459
neither_full/vo         104 421    104 428    140 558    140 562
low_rank/vo             100 402    100 405    132 547    132 549
full_size/vo             80 307     80 291    104 437    104 425
gauge_fixed/vo           96 396     96 396    128 528    128 528
frozen/vo                96 384     96 384    128 512    128 512
double/vo                88 372     88 364    120 462    120 459
collaborative/vo         96 382     96 382    128 510    128 510
nonlinear_query/vo       96 383     96 383    128 511    128 511
latent/vo                96 384     96 384    128 512    128 512
qk/no_v                 100 400    100 403    132 545    132 547
qk/no_o                 100 400    100 403    132 545    132 547
qk/no_vo                104 421    104 428    140 558    140 562
qk/merged_vo             88 372     88 364    120 462    120 459
qk/low_rank             100 402    100 405    132 547    132 549
qk/gauge_fixed           96 396     96 396    128 528    128 528
qk/double                92 375     92 371    124 484    124 483
qk/hadamard              64 808     64 768    128 576    128 576
qk/k_is_v               100 400    100 403    132 545    132 547
qk/q_is_v               100 400    100 403    132 545    132 547
qk/v_is_k_transposed    100 400    100 403    132 545    132 547
qk/o_is_v               100 400    100 403    132 545    132 547
qk/o_is_k               100 400    100 403    132 545    132 547
qk/o_is_q               100 400    100 403    132 545    132 547
shared_qk/subspace      108 449    112 438    148 584    148 590
latent/latent            96 408    100 378    132 512    132 514
"""

WIDTHS = {
    variant: [
        (int(d_model), int(d_ff)) for d_model, d_ff in zip(widths[::2], widths[1::2], strict=True)
    ]
    for variant, *widths in map(str.split, SOLVED.strip().splitlines())
}

SHOWN = catalogue.documented_variants()


@pytest.mark.parametrize(('score', 'value'), SHOWN, ids=map('/'.join, SHOWN))
def test_every_circuit_is_matched(score, value):
    solved = iter(WIDTHS.get(f'{score}/{value}', ()))
    for base in (SMALL, DEEP):
        for which in ('total', 'non_embedding'):
            target = cost.measured(base, which)
            config = dataclasses.replace(base, score=score, value=value)
            found = matching.match(config, target, which=which)
            assert abs(found.residual) <= 1e-3
            assert found.residual == cost.measured(found.config, which) / target - 1
            assert found.parameters == cost.count(found.config)
            d_model, d_ff = next(solved, (found.config.d_model, found.config.d_ff))
            assert found.config == dataclasses.replace(config, d_model=d_model, d_ff=d_ff)
            # d_ff about keeps its ratio: it absorbs only the rounding residual
            assert value == 'hadamard' or abs(d_ff / d_model - 4) < 0.4


@pytest.mark.parametrize(
    ('fields', 'd_model'),
    [
        ({'value': 'hadamard'}, 128),  # powers of two
        ({'score': 'query_free', 'head_size': 32}, 128),  # one width
        ({'num_heads': 3, 'd_model': 99}, None),
        ({'num_heads': 6, 'num_kv_heads': 2, 'd_model': 90}, None),
        ({'num_heads': 7, 'd_model': 70, 'score': 'shared_qk'}, None),
        ({'num_heads': 8, 'num_kv_heads': 1, 'd_model': 128}, None),
        ({'head_size': 24, 'score': 'merged'}, None),
        ({'biases': True, 'tied_embeddings': False, 'norm': 'rmsnorm'}, None),
    ],
    ids=str,
)
def test_odd_shapes_are_matched(fields, d_model):
    found = matching.match(dataclasses.replace(MEDIUM, **fields), TARGET)
    assert abs(found.residual) <= 1e-3
    assert d_model in (None, found.config.d_model)
    assert found.config.d_model % (found.config.num_heads if 'head_size' not in fields else 1) == 0


def test_a_neighbouring_width_is_taken_where_the_nearest_is_too_coarse():
    config = dataclasses.replace(MEDIUM, score='merged')
    nearest = matching.match(config, TARGET)
    finer = matching.match(config, TARGET, tolerance=1e-4)
    assert abs(nearest.residual) > 1e-4 >= abs(finer.residual)
    assert abs(finer.config.d_model - nearest.config.d_model) == 4


@pytest.mark.parametrize(
    ('fields', 'target', 'kwargs', 'message'),
    [
        ({}, TARGET, {'fill': None, 'tolerance': 1e-9, 'multiple_of': 64}, None),
        (
            {'score': 'shared_qk'},
            TARGET,
            {'fill': None},
            'in steps of 4.*d_model alone is too coarse',
        ),
        (
            {'score': 'shared_qk'},
            TARGET + 1,
            {'tolerance': 1e-7},
            'one step of d_ff is .* parameters',
        ),
        (
            {'score': 'query_free', 'value': 'low_rank(rank=0)'},
            TARGET,
            {},
            'cannot be built: .*rank',
        ),
        ({'num_heads': 64, 'd_model': 64}, 5000, {}, 'more than 5000 parameters at d_ff=1'),
    ],
    ids=['coarse but exact', 'no fill', 'tolerance', 'no width', 'too small'],
)
def test_a_request_that_cannot_be_met_names_the_constraint(fields, target, kwargs, message):
    config = dataclasses.replace(MEDIUM, **fields)
    if message is None:
        assert matching.match(config, target, **kwargs).residual == 0
    else:
        with pytest.raises(MatchError, match=message):
            matching.match(config, target, **kwargs)


TWELVE = dataclasses.replace(SMALL, num_layers=12)


@pytest.mark.parametrize('which', ['total', 'flops'])
@pytest.mark.parametrize(
    ('destination', 'moved'),
    [
        ('d_model', {'d_model', 'd_ff'}),
        ('d_ff', {'d_ff'}),
        ('num_heads', {'num_heads', 'head_size', 'd_ff'}),
        ('num_layers', {'num_layers', 'd_ff'}),
    ],
)
@pytest.mark.parametrize('variant', ['shared_qk/vo', 'merged/vo'])
def test_a_destination_moves_and_every_other_size_stays(variant, destination, moved, which):
    score, value = variant.split('/')
    target = cost.measured(TWELVE, which)
    config = dataclasses.replace(TWELVE, score=score, value=value)
    found = matching.match(config, target, which=which, destination=destination)
    fields = [field.name for field in dataclasses.fields(config)]
    changed = {name for name in fields if getattr(found.config, name) != getattr(config, name)}
    assert changed <= moved
    assert destination in changed
    grows = getattr(found.config, destination) > (getattr(config, destination) or config.mlp_width)
    assert grows == (cost.measured(config, which) < target)
    assert abs(found.residual) <= 1e-3
    assert found.residual == cost.measured(found.config, which) / target - 1
    assert found.target == target
    assert found.parameters == cost.count(found.config)


def solve(fields, destination, base=SMALL, **kwargs):
    target = cost.measured(base, kwargs.get('which', 'total'))
    config = dataclasses.replace(base, **fields)
    return matching.match(config, target, destination=destination, **kwargs).config


def test_parameters_saved_by_one_matrix_widen_the_mlp_by_half_a_width():
    # 2 L D d_ff = L D^2
    assert solve({'score': 'query_free'}, 'd_ff').d_ff == 384 + 96 // 2


def test_a_head_keeps_its_size():
    found = solve({'score': 'shared_qk'}, 'num_heads')
    # a fifth head costs 3 D H, of which D^2 = 4 D H was saved
    assert (found.num_heads, found.head_size, found.d_ff) == (5, 24, 384 + 24 // 2)
    own = solve({'score': 'shared_qk', 'head_size': 16}, 'num_heads')
    assert own.head_size == 16 and own.num_heads > 5


def test_query_heads_grow_in_steps_of_the_kv_heads():
    found = solve({'num_kv_heads': 2}, 'num_heads')
    assert (found.num_heads, found.num_kv_heads, found.head_size) == (6, 2, 24)
    with pytest.raises(MatchError, match='num_heads=6 in steps of 2'):
        solve({'score': 'shared_qk', 'num_kv_heads': 2}, 'num_heads', fill=None)


@pytest.mark.parametrize(
    ('fields', 'destination', 'expected'),
    [
        ({'value': 'k_is_v'}, 'd_model', {'d_model': 192, 'd_ff': 768}),
        ({'value': 'k_is_v'}, 'num_heads', {'num_heads': 8, 'head_size': 24, 'd_ff': 384}),
        ({'value': 'k_is_v'}, 'num_layers', {'num_layers': 4, 'd_ff': 384}),
        ({'num_kv_heads': 1}, 'num_layers', {'num_layers': 8, 'd_ff': 384}),
    ],
    ids=str,
)
def test_a_cache_is_made_equal_without_d_ff(fields, destination, expected):
    found = solve(fields, destination, which='cache')
    assert found == dataclasses.replace(SMALL, **fields, **expected)
    assert cost.cache_floats_per_token(found) == cost.cache_floats_per_token(SMALL)


def test_equal_flops_are_not_equal_parameters():
    found = solve({'score': 'merged'}, 'd_ff', which='flops')
    assert cost.flops_per_token(found) == cost.flops_per_token(SMALL)
    assert abs(cost.count(found)['total'] / cost.count(SMALL)['total'] - 1) > 0.1


def test_a_variant_that_saves_nothing_stays_as_it_is():
    for destination in matching.DESTINATIONS:
        found = solve({'score': 'frozen'}, destination)
        fields = {'head_size': 24} if destination == 'num_heads' else {}
        assert found == dataclasses.replace(SMALL, score='frozen', d_ff=384, **fields)


@pytest.mark.parametrize(('given', 'depth', 'encoder_depth'), [(None, 13, 13), (5, 14, 5)])
def test_the_encoder_follows_the_decoder_unless_its_depth_is_given(given, depth, encoder_depth):
    base = dataclasses.replace(TWELVE, kind='encoder_decoder', num_encoder_layers=given)
    fields = {
        'score': 'shared_qk',
        'encoder_variant': 'shared_qk/vo',
        'cross_variant': 'shared_qk/vo',
    }
    found = solve(fields, 'num_layers', base)
    assert found.num_layers == depth
    assert found.num_encoder_layers == given
    assert found.encoder.num_layers == encoder_depth


@pytest.mark.parametrize('start', [1, 2, 12])
def test_where_the_search_starts_does_not_matter(start):
    found = solve({'num_layers': start}, 'num_layers')
    assert found == dataclasses.replace(SMALL, d_ff=384, head_size=found.head_size)


def test_a_step_of_the_destination_can_be_given():
    assert solve({'score': 'query_free'}, 'd_ff', multiple_of=16).d_ff == 432
    with pytest.raises(MatchError, match='one step of d_ff is 38400 parameters, 15.21% of'):
        solve({'score': 'query_free'}, 'd_ff', multiple_of=100)


@pytest.mark.parametrize(
    ('fields', 'destination', 'kwargs', 'message'),
    [
        (
            {'score': 'query_free'},
            'num_heads',
            {},
            r'query_free/vo takes no other num_heads than 4: .* slices .* not 5 \* 24',
        ),
        ({}, 'num_heads', {'which': 'cache', 'base': {'num_kv_heads': 2}}, 'changes nothing in'),
        (
            {'score': 'shared_qk'},
            'num_layers',
            {},
            r'is -7.30% .* one step of num_layers 40.24%, so num_layers would stay at 2 and d_ff',
        ),
        (
            {'score': 'full_size', 'd_ff': 4},
            'd_ff',
            {'base': {'d_ff': 4}},
            'd_ff would have to fall below 1',
        ),
        (
            {'score': 'full_size'},
            'num_layers',
            {'base': {'d_ff': 4, 'num_layers': 1}},
            'more than .* parameters at d_ff=1 and num_layers=1',
        ),
        ({'score': 'shared_qk'}, 'num_heads', {'fill': None}, 'num_heads alone is too coarse'),
        ({'value': 'latent'}, 'd_ff', {}, 'qk/latent cannot be built: .*latent'),
        ({}, 'd_ff', {'which': 'cache'}, "'d_ff' changes nothing in the cache"),
        ({'score': 'full_size'}, 'num_layers', {'which': 'cache'}, 'too coarse, and d_ff changes'),
        (
            {},
            'd_model',
            {'which': 'cache', 'target': 1, 'base': {'kind': 'encoder'}},
            'an encoder keeps no cache',
        ),
        (
            {},
            'width',
            {},
            "destination='width' must be one of d_model, d_ff, num_heads, num_layers",
        ),
        ({}, 'd_ff', {'which': 'memory', 'target': 1}, "which='memory' must be one of total, "),
        ({}, 'd_ff', {'fill': 'd_model'}, "fill='d_model' must be one of d_ff, None"),
        ({}, 'd_ff', {'target': 0}, 'target=0 must be above 0'),
        ({'num_heads': 0}, 'num_heads', {}, 'num_heads=0 must be an integer of at least 1'),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_destination_that_cannot_take_it_says_why(fields, destination, kwargs, message):
    kwargs = dict(kwargs)
    base = dataclasses.replace(SMALL, **kwargs.pop('base', {}))
    target = kwargs.pop('target', None)
    if target is None:
        target = cost.measured(base, kwargs.get('which', 'total'))
    with pytest.raises(MatchError, match=message) as refusal:
        matching.match(
            dataclasses.replace(base, **fields), target, destination=destination, **kwargs
        )
    assert '\n' not in str(refusal.value)


def test_the_table_shows_the_shape_and_what_is_equal():
    found = matching.match(SMALL, cost.measured(SMALL, 'flops'), which='flops')
    plain = matching.table({'qk/vo': found})
    assert matching.table({'qk/vo': found}, 'flops') == f'equal: FLOP per token\n{plain}'
    header, row = (line.split() for line in plain.splitlines())
    shown = dict(zip(header, row, strict=True))
    shape = [shown[name] for name in ('d_model', 'd_ff', 'heads', 'layers')]
    assert shape == ['96', '384', '4', '2']
    assert shown['FLOP/token'] == '540,672'
    assert shown['cache/token'] == '384'
    assert shown['total'] == '252,384'
