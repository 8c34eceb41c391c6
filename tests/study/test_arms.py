"""Variants x destinations x sizes become arms of equal cost; a study breaks no rule."""

import ast
import dataclasses
import itertools
import shlex

import pytest

from qkattn.config import Config, ControlsConfig, ModelConfig, Study, TrialsConfig, TuningConfig
from qkattn.errors import MatchError
from qkattn.model import cost
from qkattn.study import variant_catalogue
from qkattn.study.arms import build_arms
from qkattn.study.arms import table as arms_table
from qkattn.study.matching import match
from tests.attention import examples
from tests.lanes import mostly_slow
from tests.refusals import refused
from tests.study.test_plan import study_with

UNTUNED = Study(
    base=Config(
        model=ModelConfig(num_layers=2),
        trials=TrialsConfig(seeds=(0, 1, 2, 3), learning_rates=(1e-3, 2e-3, 4e-3)),
    ),
    variants=('qk/vo', 'shared_qk/no_v', 'qk/vo?num_kv_heads=1'),
    sizes=('d_model=64', 'd_model=128&num_layers=3'),
)
TUNED = dataclasses.replace(UNTUNED, tuning=TuningConfig(seeds=(10, 11)))


GRID = dataclasses.replace(UNTUNED, corpora=('stdlib', 'tiny_shakespeare'))


@pytest.fixture(scope='module')
def grid_arms():
    return build_arms(GRID)


def test_arms_are_the_grid_of_corpora_sizes_variants(grid_arms):
    expected = itertools.product(GRID.corpora, GRID.sizes, GRID.variants)
    keys = [(arm.key.corpus, arm.key.size, arm.key.variant) for arm in grid_arms]
    assert keys == list(expected)
    assert grid_arms[4].model.num_layers == 3
    assert grid_arms[4].model.value == 'no_v'


def test_arms_are_matched_to_the_baseline(grid_arms):
    assert grid_arms[0].destination is None
    assert grid_arms[1].destination == 'd_model'
    assert all(abs(arm.residual) <= 1e-3 for arm in grid_arms)


def tuning(**fields):
    return {'tuning': TuningConfig(**{'seeds': (5,)} | fields)}


def longer_seeds(*seeds):
    return {'controls': ControlsConfig(longer_seeds=seeds)}


ODD = {'variants': ('qk/vo', 'qk/vo?positions=rope&head_size=7'), 'match': None}
AT_SHAPE = 'shared_qk/no_v is worse at equal shape'
LARGER = {
    'variants': ('qk/vo', 'qk/vo?d_ff=600'),
    'tolerance': 1.0,
    'expected': ('qk/vo?d_ff=600 is better at equal shape',),
}
FREE = {'match': None}
SEEDED = {'trials': {'seeds': (0, 1, 7)}}
SCALED = {'variants': ('qk/vo', 'qk/vo?score_scale=2.0')} | tuning(score_scales=(0.5, 1.0))


@pytest.mark.parametrize(
    ('study', 'fields', 'message'),
    [
        (UNTUNED, {'variants': ('qk/vv',)}, "variant 'qk/vv': unknown value 'vv'"),
        (UNTUNED, {'variants': ('qk/vo?num_heads',)}, "'num_heads' must be a model field"),
        (UNTUNED, {'sizes': ('d_model=64&d_model=32',)}, 'd_model=32.* sets d_model twice'),
        (UNTUNED, {'variants': ('qk/vo', 'qk/vo?num_heads=4')}, 'are the same model'),
        (UNTUNED, {'variants': ('qk/vo', 'qk/vo?d_model=8')}, 'and sizes both set d_model'),
        (UNTUNED, {'variants': ('qk/vo', 'qk/vo?num_heads=[4]')}, r'num_heads=\[4\] must be of'),
        (UNTUNED, ODD, 'head_size'),
        (UNTUNED, {'model': {'kind': 'encoder'}, 'match': 'cache'}, 'encoder. has no cache'),
        (TUNED, {'expected': ('shared_qk/vo is bad',)}, 'must be a variant and a decision'),
        (TUNED, {'corpora': ('stdlib', 'stdlub')}, r"corpora=\('stdlib', 'stdlub'\): .*'stdlub'"),
        (TUNED, SCALED, 'sets score_scale, which tuning.score_scales tunes'),
        # Rules of the protocol.
        (UNTUNED, FREE | {'destinations': ('d_ff', 'd_model')}, 'have no effect with match'),
        (UNTUNED, {'expected': ('shared_qk/no_v is worse',)}, 'expected=.* need tuning.seeds'),
        (UNTUNED, tuning(seeds=(), score_scales=(1.0, 2.0)), 'score_scales=.* need tuning'),
        (TUNED, {'variants': ('shared_qk/vo',)}, "must contain the baseline 'qk/vo'"),
        (TUNED, tuning(seeds=(1, 2)), r'trials.seeds share \(1, 2, 3\)'),
        (TUNED, tuning() | SEEDED, r'share \(7,\)'),  # may be drawn
        (TUNED, longer_seeds(8, 9, 12), 'controls.longer_seeds share'),
        (TUNED, longer_seeds(20, 21), 'longer_seeds=.* at least 3 seeds'),
        (TUNED, {'trials': {'seeds': (0, 1)}}, 'trials.seeds=.* at least 3 seeds'),
        (TUNED, tuning(seeds=(5, 6), max_seeds=1), 'max_seeds=1 must be at least 2'),
        (TUNED, tuning(max_seeds=1), 'must be at least 2: .* one seed shows'),
        (TUNED, tuning(max_points=2), 'max_points=2 must be at least 3'),
        (TUNED, {'expected': ('qk/vo is worse',)}, "'qk/vo' is not among the arms"),
        (TUNED, FREE | {'expected': (AT_SHAPE,)}, 'with controls.equal_shape and a match.*none'),
        (TUNED, LARGER, "'qk/vo.d_ff=600' is not among the arms at the same shape"),
        (TUNED, tuning(init_vos=(1.0, 0.5)), 'init_vos=.* must ascend'),
        (TUNED, {'trials': {'learning_rates': (1e-3, 2e-3, 3e-3)}}, 'rates=.* must ascend'),
        (TUNED, {'trials': {'weight_decays': (0.0, 0.1)}}, 'decays=.* must ascend'),
        (TUNED, {'trials': {'learning_rates': (1e-3,)}}, 'must be a grid with tuning.seeds'),
        (TUNED, {'optimizer': {'schedule': 'constant'}}, 'schedule=constant .* does not'),
        (TUNED, {'optimizer': {'final_fraction': 0.2}}, 'final_fraction=0.2 does not'),
        (TUNED, {'mesh': {'trial': 2}} | tuning(seeds=(7, 8, 9)), r'divide .* \(3, 6, 4, 0\)'),
    ],
)
def test_a_wrong_study_is_one_sentence(study, fields, message):
    with refused(message):
        build_arms(study_with(study, **fields))


def test_a_variant_from_outside_that_cannot_be_built_is_one_sentence(tmp_path, monkeypatch):
    source = 'from qkattn.attention.scores.qk import QK\nclass Keyless(QK):\n'
    (tmp_path / 'keyless.py').write_text(f'{source}    def __init__(self, spec): pass\n')
    monkeypatch.syspath_prepend(tmp_path)
    with refused("variants='keyless:Keyless/vo' fails, TypeError in .* argument 'key'"):
        build_arms(study_with(UNTUNED, variants=('qk/vo', 'keyless:Keyless/vo')))


def refused_arms(study):
    """The lines of the error on a study whose arms cannot all be matched."""
    with pytest.raises(MatchError) as caught:
        build_arms(study)
    return str(caught.value).splitlines()


def test_each_variant_that_no_model_matches_is_named():
    variants = ('qk/vo', 'shared_qk/vo', 'qk/no_v')
    study = dataclasses.replace(UNTUNED, variants=variants, sizes=UNTUNED.sizes[:1], fill=None)
    *lines, _ = refused_arms(study)
    for line, variant in zip(lines, variants[1:], strict=True):
        assert line.startswith(f'variant {variant!r} reaches ')
        assert 'd_ff=' in line
        assert line.endswith('; choose another size, or a tolerance above 0.001')


# Slices of the stream and rotary positions: d_model moves by twice the number of heads.
ROTARY = study_with(
    UNTUNED,
    model={'num_heads': 4, 'context': 64, 'positions': 'rope', 'activation': 'swiglu'},
    variants=('qk/vo', 'shared_qk/vo', 'query_free/vo', 'qk/no_v'),
    sizes=('d_model=96',),
)


def values_of_flags(line, name):
    """The values that a line gives a setting of a study, as a shell and --config read them."""
    flags = [word for word in shlex.split(line) if word.startswith(f'--config.{name}=')]
    return [ast.literal_eval(flag.partition('=')[2]) for flag in flags]


def test_a_size_that_some_arms_do_not_fit_names_sizes_that_all_fit():
    reason, last_line = refused_arms(ROTARY)
    assert reason == (
        "each of the variants 'query_free/vo', 'qk/no_v' is -7.49% from the target at d_model=96 "
        'and +7.57% at d_model=104, and no other d_model is nearer, so d_ff would absorb it all: '
        'd_model moves in steps of 8, as heads that are slices of the stream need '
        'num_heads * head_size = d_model, and rotary positions an even head_size'
    )

    # Each size, and the destinations, that the last line offers can be built.
    sizes = values_of_flags(last_line, 'sizes')
    assert sizes == [('d_model=104',), ('d_model=112',)]
    for value in sizes:
        assert len(build_arms(dataclasses.replace(ROTARY, sizes=value))) == 4
    (destinations,) = values_of_flags(last_line, 'destinations')
    assert len(build_arms(dataclasses.replace(ROTARY, destinations=destinations))) == 4
    assert last_line.startswith('all arms match with ')


def test_sizes_that_all_arms_fit_stay_and_arms_that_fit_no_size_are_named():
    study = study_with(
        ROTARY,
        variants=('qk/vo', 'shared_qk/vo', 'qk/no_v', 'merged/vo'),
        sizes=('d_model=104', 'd_model=96&num_layers=1'),
    )

    # merged/vo cannot be built with rotary positions; the second size is wrong for qk/no_v.
    lines = refused_arms(study)
    assert [line.partition(': ')[0][:55] for line in lines[:2]] == [
        "variant 'merged/vo' at 'd_model=104' cannot be built",
        "variant 'qk/no_v' at 'd_model=96&num_layers=1' is -6.80",
    ]

    # The last line offers sizes for the other arms, in which the first size is kept.
    assert lines[-1].startswith("all arms but 'merged/vo' match with ")
    assert not values_of_flags(lines[-1], 'destinations')
    for sizes in values_of_flags(lines[-1], 'sizes'):
        assert sizes[0] == 'd_model=104'
        assert sizes[1].endswith('&num_layers=1')
        kept = dataclasses.replace(study, sizes=sizes, variants=study.variants[:-1])
        assert len(build_arms(kept)) == 6


def test_the_destination_d_ff_is_named_where_it_alone_matches_all_arms():
    """Heads of a given size that are slices of the stream fit one d_model only."""
    study = study_with(ROTARY, model={'head_size': 24}, variants=('qk/vo', 'qk/no_v'))
    assert refused_arms(study)[-1] == (
        "all arms but 'qk/no_v' match at these sizes; "
        'all arms match with --config.destinations=\'("d_ff",)\''
    )


SAVING = dataclasses.replace(
    TUNED,
    variants=('qk/vo', 'qk/no_o', 'merged/vo', 'qk/vo?num_kv_heads=1&d_ff=200'),
    destinations=('d_model', 'd_ff'),
    sizes=('d_model=64',),
    tolerance=1.0,
)


@pytest.fixture(scope='module')
def saving_arms():
    return build_arms(SAVING)


def test_a_variant_that_saves_parameters_is_also_an_arm_at_the_baselines_shape(saving_arms):
    """Not merged/vo, which has more parameters than the baseline."""
    assert [(arm.key.variant, arm.key.control) for arm in saving_arms] == [
        ('qk/vo', None),
        ('qk/no_o [d_model]', None),
        ('qk/no_o [d_ff]', None),
        ('qk/no_o', 'equal_shape'),
        ('merged/vo [d_model]', None),
        ('merged/vo [d_ff]', None),
        ('qk/vo?num_kv_heads=1&d_ff=200 [d_model]', None),
        ('qk/vo?num_kv_heads=1&d_ff=200 [d_ff]', None),
        ('qk/vo?num_kv_heads=1&d_ff=200', 'equal_shape'),
    ]


def test_a_control_of_equal_shape_has_the_sizes_of_the_baseline(saving_arms):
    baseline = saving_arms[0]
    control = saving_arms[3]
    for name in ('d_model', 'mlp_width', 'num_heads', 'num_layers'):
        assert getattr(control.model, name) == getattr(baseline.model, name)
    # It has fewer parameters, as nothing grows by what the variant saves.
    saved = cost.count(control.model)['total'] / cost.count(baseline.model)['total'] - 1
    assert saved < -0.05
    assert control.destination is None
    assert control.residual == pytest.approx(saved)


def test_a_control_of_equal_shape_keeps_a_d_ff_of_its_own(saving_arms):
    assert saving_arms[-1].model.d_ff == 200


def test_the_table_of_arms_states_the_cost_that_is_equal(saving_arms):
    lines = arms_table(saving_arms, 'total').splitlines()
    total = f'{cost.count(saving_arms[0].model)["total"]:,}'
    assert lines[0] == 'equal: parameters'
    assert {'qk/vo', '+0.0000%', total} < set(lines[3].split())


def test_a_table_names_what_arms_differ_in(grid_arms, saving_arms):
    assert 'qk/vo d_model=64 stdlib ' in arms_table(grid_arms, None)
    lines = arms_table(saving_arms, None).splitlines()
    assert lines[2].startswith('qk/vo  ')
    assert lines[5].startswith('qk/no_o (same shape)  ')


@pytest.mark.parametrize(
    'fields',
    [
        {'controls': ControlsConfig(equal_shape=False)},
        {'tuning': TuningConfig()},
        {'match': None, 'destinations': ('d_model',)},
    ],
    ids=['off', 'untuned', 'unmatched'],
)
def test_a_study_without_tuning_or_match_has_no_controls_of_equal_shape(fields):
    arms = build_arms(dataclasses.replace(SAVING, **fields))
    assert not any(arm.key.control for arm in arms)


# Configs of equal cost: what each destination moves, what it leaves alone, and what is refused.

SMALL = ModelConfig(d_model=96, num_layers=2, num_heads=4, context=64)
DEEP = ModelConfig(d_model=128, num_layers=4, num_heads=4)
FROZEN = 'examples.frozen:Frozen'
HADAMARD = 'examples.hadamard:Hadamard'
# Variants that cannot be matched by d_model: they save or cost less than half a step of it, or need
# a power of two.
REFUSED = {'examples.collaborative:Collaborative/vo', 'nonlinear_query/vo', f'qk/{HADAMARD}'}
CASES = [
    (base, which, {'score': score, 'value': value})
    for base, which in ((SMALL, 'total'), (DEEP, 'non_embedding'))
    for score, value in variant_catalogue.documented_variants() + examples.FOLDER_VARIANTS
]
# Other shapes of SMALL, with a variant that saves parameters, or costs some.
SHAPES = [
    ({'d_model': 64, 'num_heads': 2}, {'score': 'query_free'}),
    ({'d_model': 111, 'num_heads': 3, 'd_ff': 300, 'vocab_size': 1000}, {'value': 'k_is_v'}),
    ({'d_model': 120, 'positions': 'rope'}, {'value': 'no_o'}),
    ({'d_model': 112, 'num_kv_heads': 2, 'norm': 'rmsnorm'}, {'score': 'shared_qk'}),
    ({'d_model': 120, 'head_size': 20}, {'value': 'merged_vo'}),
]
SHAPES = [(dataclasses.replace(SMALL, **shape), 'total', variant) for shape, variant in SHAPES]


@pytest.mark.parametrize(
    ('base', 'which', 'variant'), SHAPES[::2] + mostly_slow(SHAPES[1::2] + CASES, every=12)
)
def test_every_variant_is_matched_to_the_cost_of_its_baseline(base, which, variant):
    """d_model moves towards the target in whole heads, and d_ff keeps its ratio to d_model.

    tests/test_results.py compares the widths with those of trained studies.
    """
    target = cost.measured(base, which)
    config = dataclasses.replace(base, **variant)
    if '/'.join(variant.values()) in REFUSED:
        with pytest.raises(MatchError, match='so d_ff would absorb it all|power of two'):
            match(config, target, which=which)
        return
    matched = match(config, target, which=which)
    assert abs(cost.measured(matched, which) / target - 1) <= 1e-3

    # A variant that saves parameters becomes wider, one that costs some narrower.
    saved = target - cost.measured(config, which)
    d_model = matched.d_model
    assert (d_model - base.d_model) * saved >= 0

    # Nothing else changes; the head size is set where heads do not divide d_model.
    step = 2 if base.positions == 'rope' else 1
    head_size = config.head_size
    if head_size is None and d_model % (step * base.num_heads):
        head_size = step * round(d_model / base.num_heads / step)
    expected = {'d_model': d_model, 'd_ff': matched.d_ff, 'head_size': head_size}
    assert matched == dataclasses.replace(config, **expected)
    # d_ff keeps its ratio but for the rounding residual, at most half a step of the heads.
    d_ff_at_ratio = base.mlp_width / base.d_model * d_model
    assert abs(matched.d_ff - d_ff_at_ratio) < 0.2 * step * d_model + 0.5


CACHE = {'which': 'cache'}
SHARED_HEADS = {'num_heads': 5, 'head_size': 24, 'd_ff': 384 + 24 // 2}
ENCODER_DECODER = {'num_layers': 12, 'kind': 'encoder_decoder'}
FIVE_LAYERS = ENCODER_DECODER | {'num_encoder_layers': 5}
OTHERS = dict.fromkeys(('encoder_variant', 'cross_variant'), 'shared_qk/vo')
ALL_SHARED = {'score': 'shared_qk'} | OTHERS
SHARED = {'score': 'shared_qk'}
NO_QUERY = {'score': 'query_free'}
FULL = {'score': 'full_size'}
WIDE = {'d_model': 128, 'head_size': 32}


@pytest.mark.parametrize(
    # Changes of SMALL; those of the variant; where savings go; options of `match`; and changes of
    # the matched model, or a part of the refusal.
    ('base', 'fields', 'destination', 'kwargs', 'expected'),
    [
        # One matrix widens the MLP by half a width: 2 L D d_ff = L D^2.
        ({}, NO_QUERY, 'd_ff', {}, {'d_ff': 384 + 96 // 2}),
        # A head keeps its size: a fifth costs 3 D H, of which D^2 = 4 D H was saved.
        ({}, SHARED, 'num_heads', {}, SHARED_HEADS),
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
        ({}, {'score': FROZEN}, 'd_model', {}, {}),
        ({}, {'score': FROZEN}, 'num_heads', {}, {'head_size': 24}),
        # Where the search starts does not matter.
        ({}, {'num_layers': 1}, 'num_layers', {}, {'num_layers': 2}),
        # The encoder follows the decoder unless its depth is given.
        (ENCODER_DECODER, ALL_SHARED, 'num_layers', {}, {'num_layers': 13, 'd_ff': 404}),
        (FIVE_LAYERS, ALL_SHARED, 'num_layers', {}, {'num_layers': 14, 'd_ff': 386}),
        # A request that cannot be met names the constraint.
        ({'d_model': 128}, SHARED, 'd_model', {'fill': None}, 'only to .* d_model=13.'),
        (
            {},
            SHARED,
            'd_model',
            {'tolerance': 1e-7, 'target': 252385},
            '0.0456%, .*, as each unit of d_ff is 0.16%; .* above 1e-07',
        ),
        ({}, {'score': 'query_free', 'value': 'low_rank(rank=0)'}, 'd_model', {}, 'built: .*rank'),
        ({'num_heads': 32}, {}, 'd_model', {'target': 500}, 'more than 500 .* at d_ff=1'),
        ({}, {'value': HADAMARD}, 'd_model', {}, 'power of two'),
        (WIDE, NO_QUERY, 'd_model', {}, '-7.54% .* no other d_model is nearer, so'),
        ({}, NO_QUERY, 'num_heads', {}, 'no other num_heads is nearer, so d_ff'),
        ({'num_kv_heads': 2}, {}, 'num_heads', CACHE, 'has the same cost at any num_heads'),
        ({}, SHARED, 'num_layers', {}, 'no other num_layers is nearer, so'),
        ({'d_ff': 4}, FULL, 'd_ff', {}, 'only to .* at d_ff=1;'),
        ({'d_ff': 4, 'num_layers': 1}, FULL, 'num_layers', {}, 'at d_ff=1 and num_layers=1'),
        ({}, {}, 'd_ff', CACHE, 'has the same cost at any d_ff'),
    ],
    ids=str,
)
def test_a_destination_grows_by_what_the_variant_saves(base, fields, destination, kwargs, expected):
    base = dataclasses.replace(SMALL, **base)
    config = dataclasses.replace(base, **fields)
    costs = {'target': cost.measured(base, kwargs.get('which', 'total'))} | kwargs
    if isinstance(expected, str):
        with refused(expected, MatchError):
            match(config, destination=destination, **costs)
        return
    matched = match(config, destination=destination, **costs)
    assert matched == dataclasses.replace(config, **({'d_ff': 384} | expected))
