"""Configs of equal cost: what each destination moves, what it leaves alone, and what is refused."""

import dataclasses

import pytest

from qkattn.config import ModelConfig
from qkattn.errors import MatchError
from qkattn.model import cost
from qkattn.study import arms, catalogue
from tests.lanes import thinned

SMALL = ModelConfig(d_model=96, num_layers=2, num_heads=4, context=64)
DEEP = ModelConfig(d_model=128, num_layers=4, num_heads=4)
# d_model and d_ff of each variant made equal to qk/vo: SMALL by total parameters, DEEP by
# non-embedding ones. The hashes of finished runs depend on them. Refused is what saves or costs
# less than half a step of d_model.
SOLVED = """
qk/vo                    96 384    128 512
merged/vo                89 362    118 477
shared_qk/vo            100 400    134 530
symmetric/vo            100 399    134 529
pairwise/vo              99 393    132 530
symmetric_skew/vo        96 384    128 512
query_free/vo           100 400    132 547
key_free/vo             100 400    132 547
neither/vo              104 421    140 562
query_free_full/vo       89 362    118 477
neither_full/vo         105 416    140 562
low_rank/vo             100 402    134 530
full_size/vo             79 321    105 412
gauge_fixed/vo           97 389    130 516
frozen/vo                96 384    128 512
double/vo                90 354    118 475
collaborative/vo        refused -  refused -
nonlinear_query/vo      refused -  refused -
latent/vo                96 384    128 512
qk/no_v                 100 400    132 547
qk/no_o                 100 400    132 547
qk/no_vo                104 421    140 562
qk/merged_vo             89 362    118 477
qk/low_rank             100 402    134 530
qk/gauge_fixed           97 389    130 516
qk/double                93 367    123 490
qk/hadamard             refused -  refused -
qk/k_is_v               100 400    134 530
qk/q_is_v               100 400    134 530
qk/v_is_k_transposed    100 400    132 547
qk/o_is_v               100 400    134 530
qk/o_is_k               100 400    134 530
qk/o_is_q               100 400    134 530
shared_qk/subspace      110 436    148 590
latent/latent            98 394    131 520
"""
ROWS = map(str.split, SOLVED.strip().splitlines())
WIDTHS = {tuple(variant.split('/')): widths for variant, *widths in ROWS}
CASES = [
    (base, which, {'score': score, 'value': value}, WIDTHS.get((score, value), [])[first:][:2])
    for first, base, which in ((0, SMALL, 'total'), (2, DEEP, 'non_embedding'))
    for score, value in catalogue.documented_variants()
]
# Other shapes, with a variant that saves parameters, or costs some.
SHAPES = [
    ({'d_model': 64, 'num_heads': 2}, {'score': 'query_free'}),
    ({'d_model': 111, 'num_heads': 3, 'd_ff': 300, 'vocab_size': 1000}, {'value': 'k_is_v'}),
    ({'d_model': 120, 'positions': 'rope'}, {'value': 'no_o'}),
    ({'d_model': 112, 'num_kv_heads': 2, 'norm': 'rmsnorm'}, {'score': 'shared_qk'}),
    ({'d_model': 120, 'head_size': 20}, {'value': 'merged_vo'}),
]
SHAPES = [(dataclasses.replace(SMALL, **shape), 'total', variant, []) for shape, variant in SHAPES]


@pytest.mark.parametrize(('base', 'which', 'variant', 'widths'), SHAPES + thinned(CASES, every=4))
def test_every_circuit_is_matched(base, which, variant, widths):
    target = cost.measured(base, which)
    config = dataclasses.replace(base, **variant)
    if 'refused' in widths:
        with pytest.raises(MatchError, match='so d_model would .* absorb it all'):
            arms.match(config, target, which=which)
        return
    match = arms.match(config, target, which=which)
    assert abs(match.residual) <= 1e-3
    assert match.residual == cost.measured(match.config, which) / target - 1
    assert match.widened * (target - cost.measured(config, which)) >= 0
    d_model, d_ff = match.config.d_model, match.config.d_ff
    assert [d_model, d_ff] == (list(map(int, widths)) or [d_model, d_ff])
    # The heads follow d_model; the head size is set where d_model is not a multiple of them.
    whole = 2 if base.positions == 'rope' else 1
    size = config.head_size
    if size is None and d_model % (whole * base.num_heads):
        size = whole * round(d_model / base.num_heads / whole)
    assert match.config == dataclasses.replace(config, d_model=d_model, d_ff=d_ff, head_size=size)
    # d_ff keeps its ratio but for the rounding residual.
    assert match.fill == d_ff - round(base.mlp_width / base.d_model * d_model)
    assert abs(match.fill) < 0.2 * d_model


CACHE = {'which': 'cache'}
SHARED_HEADS = {'num_heads': 5, 'head_size': 24, 'd_ff': 384 + 24 // 2}
ENCODER_DECODER = {'num_layers': 12, 'kind': 'encoder_decoder'}
FIVE_LAYERS = ENCODER_DECODER | {'num_encoder_layers': 5}
OTHERS = dict.fromkeys(('encoder_variant', 'cross_variant'), 'shared_qk/vo')
ALL_SHARED = {'score': 'shared_qk'} | OTHERS


@pytest.mark.parametrize(
    ('base', 'fields', 'destination', 'kwargs', 'expected'),
    [
        # One matrix widens the MLP by half a width: 2 L D d_ff = L D^2.
        ({}, {'score': 'query_free'}, 'd_ff', {}, {'d_ff': 384 + 96 // 2}),
        # A head keeps its size: a fifth costs 3 D H, of which D^2 = 4 D H was saved.
        ({}, {'score': 'shared_qk'}, 'num_heads', {}, SHARED_HEADS),
        ({}, {'score': 'shared_qk', 'head_size': 16}, 'num_heads', {}, {'num_heads': 8}),
        # Query heads grow in steps of the key/value heads.
        ({}, {'num_kv_heads': 2}, 'num_heads', {}, {'num_heads': 6, 'head_size': 24}),
        # Caches are made equal without d_ff.
        ({}, {'value': 'k_is_v'}, 'd_model', CACHE, {'d_model': 192, 'd_ff': 768}),
        ({}, {'value': 'k_is_v'}, 'num_heads', CACHE, {'num_heads': 8, 'head_size': 24}),
        ({}, {'num_kv_heads': 1}, 'num_layers', CACHE, {'num_layers': 8}),
        # Equal FLOPs are not equal parameters.
        ({}, {'score': 'merged'}, 'd_ff', {'which': 'flops'}, {'d_ff': 192}),
        # What saves nothing stays as it is.
        ({}, {'score': 'frozen'}, 'd_model', {}, {}),
        ({}, {'score': 'frozen'}, 'd_ff', {}, {}),
        ({}, {'score': 'frozen'}, 'num_heads', {}, {'head_size': 24}),
        ({}, {'score': 'frozen'}, 'num_layers', {}, {}),
        # Where the search starts does not matter.
        ({}, {'num_layers': 1}, 'num_layers', {}, {'num_layers': 2}),
        ({}, {'num_layers': 12}, 'num_layers', {}, {'num_layers': 2}),
        # The encoder follows the decoder unless its depth is given.
        (ENCODER_DECODER, ALL_SHARED, 'num_layers', {}, {'num_layers': 13, 'd_ff': 404}),
        (FIVE_LAYERS, ALL_SHARED, 'num_layers', {}, {'num_layers': 14, 'd_ff': 386}),
    ],
    ids=str,
)
def test_a_destination_takes_exactly_what_is_saved(base, fields, destination, kwargs, expected):
    base = dataclasses.replace(SMALL, **base)
    target = cost.measured(base, kwargs.get('which', 'total'))
    config = dataclasses.replace(base, **fields)
    found = arms.match(config, target, destination=destination, **kwargs)
    assert found.config == dataclasses.replace(config, **({'d_ff': 384} | expected))


FULL, NO_QUERY = {'score': 'full_size'}, {'score': 'query_free'}
WIDE = {'d_model': 128, 'head_size': 32}
SHARED = {'score': 'shared_qk'}


@pytest.mark.parametrize(
    ('base', 'fields', 'destination', 'kwargs', 'message'),
    [
        ({'d_model': 128}, SHARED, 'd_model', {'fill': None}, 'd_model alone is too coarse'),
        ({}, SHARED, 'd_model', {'tolerance': 1e-7, 'target': 252385}, 'one step of d_ff, at'),
        ({}, {'score': 'query_free', 'value': 'low_rank(rank=0)'}, 'd_model', {}, 'built: .*rank'),
        ({'num_heads': 64}, {}, 'd_model', {'target': 500}, 'more than 500 .* at d_ff=1'),
        ({}, {'value': 'hadamard'}, 'd_model', {}, 'd_model would become 64 .the next .* 128. and'),
        (WIDE, NO_QUERY, 'd_model', {}, 'is -7.54% .* stay at 128 .the next .* 128 is None. and'),
        ({}, NO_QUERY, 'num_heads', {}, 'num_heads would stay at 4 .the next above 4 is None. and'),
        ({'num_kv_heads': 2}, {}, 'num_heads', CACHE, 'changes nothing in'),
        ({}, SHARED, 'num_layers', {}, 'so num_layers would stay at 2 .the next above 2 is 3. and'),
        ({'d_ff': 4}, FULL, 'd_ff', {}, 'only to .* at d_ff=1 '),
        ({'d_ff': 4, 'num_layers': 1}, FULL, 'num_layers', {}, 'at d_ff=1 and num_layers=1'),
        ({}, {**SHARED, 'num_kv_heads': 2}, 'num_heads', {'fill': None}, 'num_heads=6 .steps of 2'),
        ({'kind': 'encoder'}, {}, 'd_model', {'which': 'cache', 'target': 1}, 'no cache'),
        ({}, {}, 'd_ff', CACHE, 'no cache depends on d_ff'),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_met_names_the_constraint(
    base, fields, destination, kwargs, message
):
    base = dataclasses.replace(SMALL, **base)
    config = dataclasses.replace(base, **fields)
    if 'target' not in kwargs:
        kwargs = kwargs | {'target': cost.measured(base, kwargs.get('which', 'total'))}
    with pytest.raises(MatchError, match=message) as refusal:
        arms.match(config, destination=destination, **kwargs)
    assert '\n' not in str(refusal.value)
