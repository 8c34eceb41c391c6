"""Variants x destinations x sizes become arms of equal cost; a study breaks no rule."""

import ast
import dataclasses
import itertools
import re
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
    """The arms of GRID: 2 corpora x 2 sizes x 3 variants."""
    return build_arms(GRID)


def test_arms_are_the_grid_of_corpora_sizes_variants(grid_arms):
    keys = [(arm.key.corpus, arm.key.size, arm.key.variant) for arm in grid_arms]

    expected = itertools.product(GRID.corpora, GRID.sizes, GRID.variants)
    assert keys == list(expected)

    # The fifth arm is the second variant at the second size.
    assert grid_arms[4].model.num_layers == 3
    assert grid_arms[4].model.value == 'no_v'


def test_arms_are_matched_to_the_baseline(grid_arms):
    baseline, other = grid_arms[:2]
    assert baseline.destination is None
    assert other.destination == 'd_model'
    for arm in grid_arms:
        assert abs(arm.residual) <= 1e-3


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'variants': ('qk/vv',)}, "variant 'qk/vv': unknown value 'vv'; known: vo, no_v"),
        ({'variants': ('qk/vo?num_heads',)}, "'num_heads' must be a model field as in d_model=128"),
        ({'sizes': ('d_model=64&d_model=32',)}, "size 'd_model=64&d_model=32' sets d_model twice"),
        (
            # Four heads are the default.
            {'variants': ('qk/vo', 'qk/vo?num_heads=4')},
            "and 'qk/vo?num_heads=4' at 'd_model=64' on 'stdlib' are the same model",
        ),
        (
            # Hashes of runs leave out the kernel, so both arms would have the same run.
            {'variants': ('qk/vo', 'qk/vo?kernel=einsum')},
            "and 'qk/vo?kernel=einsum' at 'd_model=64' on 'stdlib' are the same model",
        ),
        (
            {'variants': ('qk/vo', 'qk/vo?d_model=8')},
            "variant 'qk/vo?d_model=8' and sizes both set d_model",
        ),
        (
            {'variants': ('qk/vo', 'qk/vo?num_heads=[4]')},
            'model.num_heads=[4] must be of type int',
        ),
        (
            # A list is no key of a dict, so this is not a literal but a text.
            {'variants': ('qk/vo', 'qk/vo?num_heads={[]:1}')},
            "model.num_heads='{[]:1}' must be of type int",
        ),
        (
            {'variants': ('qk/vo', 'qk/vo?positions=rope&head_size=7'), 'match': None},
            'qk with d_model=64 and head_size=7 rotates 7 channels of a head',
        ),
        (
            {'model': {'kind': 'encoder'}, 'match': 'cache'},
            "match='cache': a model of kind='encoder' has no cache",
        ),
        (
            {'corpora': ('stdlib', 'stdlub')},
            "corpora=('stdlib', 'stdlub'): unknown data.name 'stdlub'",
        ),
        (
            {'match': None, 'destinations': ('d_ff', 'd_model')},
            "destinations=('d_ff', 'd_model') have no effect with match=None",
        ),
        (
            {'expected': ('shared_qk/no_v is worse',)},
            "expected=('shared_qk/no_v is worse',) need tuning.seeds",
        ),
        (
            {'tuning': TuningConfig(seeds=(), score_scales=(1.0, 2.0))},
            'tuning.score_scales=(1.0, 2.0) need tuning.seeds',
        ),
    ],
)
def test_a_wrong_study_without_tuning_is_refused(fields, message):
    study = study_with(UNTUNED, **fields)
    with refused(re.escape(message)):
        build_arms(study)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'variants': ('shared_qk/vo',)}, "must contain the baseline 'qk/vo' for a verdict"),
        (
            {
                'variants': ('qk/vo', 'qk/vo?score_scale=2.0'),
                'tuning': TuningConfig(seeds=(5,), score_scales=(0.5, 1.0)),
            },
            "variant 'qk/vo?score_scale=2.0' sets score_scale, which tuning.score_scales tunes",
        ),
        (
            # Tuning replaces the value, so the name of the size would be wrong.
            {
                'sizes': ('d_model=64&score_scale=0.5',),
                'tuning': TuningConfig(seeds=(5,), score_scales=(1.0, 2.0)),
            },
            'sizes set score_scale=0.5, which tuning.score_scales tunes',
        ),
        # `expected` lists positive controls: arms with the decision that is expected of them.
        (
            {'expected': ('shared_qk/vo is bad',)},
            "expected='shared_qk/vo is bad' must be a variant and a decision",
        ),
        ({'expected': ('qk/vo is worse',)}, "'qk/vo' is not among the arms that are compared"),
        (
            {'match': None, 'expected': ('shared_qk/no_v is worse at equal shape',)},
            "'shared_qk/no_v' is not among the arms at the same shape (cheaper ones, with "
            "controls.equal_shape and a match) that are compared with 'qk/vo'; they are none",
        ),
        (
            # Only a cheaper variant has an arm at the same shape. A wider MLP costs more.
            {
                'variants': ('qk/vo', 'qk/vo?d_ff=600'),
                'tolerance': 1.0,
                'expected': ('qk/vo?d_ff=600 is better at equal shape',),
            },
            "'qk/vo?d_ff=600' is not among the arms at the same shape",
        ),
        # Seeds.
        ({'tuning': TuningConfig(seeds=(1, 2))}, 'trials.seeds share (1, 2, 3)'),
        (
            # With noisy losses, the tuning goes on to the seeds after 5, such as 7.
            {'tuning': TuningConfig(seeds=(5,)), 'trials': {'seeds': (0, 1, 7)}},
            'trials.seeds share (7,)',
        ),
        (
            # With noisy losses, the tuning goes on to the seeds after 11, such as 12.
            {'controls': ControlsConfig(longer_seeds=(8, 9, 12))},
            'controls.longer_seeds share (12,)',
        ),
        (
            {'controls': ControlsConfig(longer_seeds=(20, 21))},
            'controls.longer_seeds=(20, 21) must be at least 3 seeds',
        ),
        ({'trials': {'seeds': (0, 1)}}, 'trials.seeds=(0, 1) must be at least 3 seeds'),
        (
            {'tuning': TuningConfig(seeds=(5, 6), max_seeds=1)},
            'tuning.max_seeds=1 must be at least 2: tuning.seeds has 2',
        ),
        (
            {'tuning': TuningConfig(seeds=(5,), max_seeds=1)},
            'must be at least 2: tuning.seeds has 1, and one seed shows no best value',
        ),
        # Grids.
        (
            {'tuning': TuningConfig(seeds=(5,), max_points=2)},
            'tuning.max_points=2 must be at least 3',
        ),
        (
            {'tuning': TuningConfig(seeds=(5,), init_vos=(1.0, 0.5))},
            'tuning.init_vos=(1.0, 0.5) must ascend',
        ),
        (
            {'trials': {'learning_rates': (1e-3, 2e-3, 3e-3)}},
            'trials.learning_rates=(0.001, 0.002, 0.003) must ascend by a constant factor',
        ),
        (
            {'trials': {'weight_decays': (0.0, 0.1)}},
            'trials.weight_decays=(0.0, 0.1) must ascend by a constant factor',
        ),
        (
            {'trials': {'learning_rates': (1e-3,)}},
            'trials.learning_rates=(0.001,) must be a grid with tuning.seeds',
        ),
        # Training.
        (
            {'optimizer': {'schedule': 'constant'}},
            'optimizer.schedule=constant with final_fraction=0.0 does not anneal',
        ),
        (
            {'optimizer': {'final_fraction': 0.2}},
            'optimizer.schedule=linear with final_fraction=0.2 does not anneal',
        ),
        (
            {'mesh': {'trial': 2}, 'tuning': TuningConfig(seeds=(7, 8, 9))},
            'mesh.trial=2 must divide the numbers of tuning.seeds, tuning.max_seeds, trials.seeds '
            'and controls.longer_seeds, (3, 6, 4, 0)',
        ),
    ],
)
def test_a_wrong_study_with_tuning_is_refused(fields, message):
    study = study_with(TUNED, **fields)
    with refused(re.escape(message)):
        build_arms(study)


def test_a_variant_from_outside_that_cannot_be_built_is_refused(tmp_path, monkeypatch):
    """A variant is written 'score/value'. Here the score is the class Keyless of a module.

    Keyless.__init__ lacks the argument `key`, the key of JAX's random numbers.
    """
    source = """
from qkattn.attention.scores.qk import QK

class Keyless(QK):
    def __init__(self, spec):
        pass
"""
    (tmp_path / 'keyless.py').write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    study = study_with(UNTUNED, variants=('qk/vo', 'keyless:Keyless/vo'))

    with refused("variants='keyless:Keyless/vo' fails, TypeError in .* argument 'key'"):
        build_arms(study)


def lines_of_match_error(study):
    """Builds arms that cannot all be matched, and returns the lines of the error."""
    with pytest.raises(MatchError) as caught:
        build_arms(study)
    return str(caught.value).splitlines()


def test_each_variant_that_no_model_matches_is_named():
    """Arms are widened until they have as many parameters as the baseline, up to a tolerance.

    With fill=None, d_ff may not absorb what is left, so no d_model is near enough.
    """
    study = dataclasses.replace(
        UNTUNED,
        variants=('qk/vo', 'shared_qk/vo', 'qk/no_v'),
        sizes=('d_model=64',),
        tolerance=0.001,
        fill=None,
    )

    lines = lines_of_match_error(study)

    # Each of the two variants has a line with its nearest sizes and a remedy. A last line follows.
    assert len(lines) == 3
    assert lines[0].startswith("variant 'shared_qk/vo' reaches ")
    assert lines[1].startswith("variant 'qk/no_v' reaches ")
    for line in lines[:2]:
        assert 'd_ff=' in line
        assert line.endswith('; choose another size, or a tolerance above 0.001')


# Heads are slices of the stream, so d_model = 4 * head_size. Rotary positions need an even head
# size, so d_model moves in steps of 8.
ROTARY = study_with(
    UNTUNED,
    model={'num_heads': 4, 'context': 64, 'positions': 'rope', 'activation': 'swiglu'},
    variants=('qk/vo', 'shared_qk/vo', 'query_free/vo', 'qk/no_v'),
    sizes=('d_model=96',),
)


def values_of_flag(line, name):
    """The value of each `--config.NAME=VALUE` flag in a line, parsed as Python."""
    values = []
    for word in shlex.split(line):
        flag, _, text = word.partition('=')
        if flag == f'--config.{name}':
            values.append(ast.literal_eval(text))
    return values


def test_sizes_that_all_arms_fit_are_offered():
    """If a study has arms that cannot be matched, its error offers settings that fit all arms.

    ROTARY compares four variants at d_model=96, where d_model moves in steps of 8. For two of the
    variants, no such d_model gives nearly as many parameters as the baseline.
    """
    reason, offer = lines_of_match_error(ROTARY)

    assert reason == (
        "each of the variants 'query_free/vo', 'qk/no_v' is -7.49% from the target at d_model=96 "
        'and +7.57% at d_model=104, and no other d_model is nearer, so d_ff would absorb it all: '
        'd_model moves in steps of 8, as heads that are slices of the stream need '
        'num_heads * head_size = d_model, and rotary positions an even head_size'
    )
    assert offer.startswith('all arms match with ')

    # The offer ends with --config.sizes='("d_model=104",)' or --config.sizes='("d_model=112",)' or
    # --config.destinations=... Each value is a tuple.
    offered_sizes = values_of_flag(offer, 'sizes')
    assert offered_sizes == [('d_model=104',), ('d_model=112',)]
    for sizes in offered_sizes:
        arms = build_arms(dataclasses.replace(ROTARY, sizes=sizes))
        assert len(arms) == 4

    # A destination is the dimension that grows in place of d_model.
    (destinations,) = values_of_flag(offer, 'destinations')
    arms = build_arms(dataclasses.replace(ROTARY, destinations=destinations))
    assert len(arms) == 4


def test_a_size_that_fits_stays_among_the_offered_sizes():
    """Only the size that does not fit all variants is replaced in the offer.

    The variant merged/vo cannot be built with rotary positions, so no offer includes it.
    """
    study = study_with(
        ROTARY,
        variants=('qk/vo', 'shared_qk/vo', 'qk/no_v', 'merged/vo'),
        sizes=('d_model=104', 'd_model=96&num_layers=1'),
    )

    lines = lines_of_match_error(study)

    # At the second size, the steps of d_model are too large for qk/no_v.
    assert lines[0].startswith("variant 'merged/vo' at 'd_model=104' cannot be built: ")
    assert lines[1].startswith("variant 'qk/no_v' at 'd_model=96&num_layers=1' is -6.80")

    # The last line offers two sizes at a time, and no other destination.
    offer = lines[-1]
    assert offer.startswith("all arms but 'merged/vo' match with ")
    assert values_of_flag(offer, 'destinations') == []
    without_merged = dataclasses.replace(study, variants=study.variants[:-1])
    for sizes in values_of_flag(offer, 'sizes'):
        # The first size stays. The second size gets another d_model.
        assert sizes[0] == 'd_model=104'
        assert sizes[1].endswith('&num_layers=1')

        # Three variants at two sizes can be built.
        arms = build_arms(dataclasses.replace(without_merged, sizes=sizes))
        assert len(arms) == 3 * 2


def test_the_destination_d_ff_is_named_where_it_alone_matches_all_arms():
    """Heads are slices of the stream here, so head_size=24 fits only d_model = 4 * 24 = 96."""
    study = study_with(ROTARY, model={'head_size': 24}, variants=('qk/vo', 'qk/no_v'))

    lines = lines_of_match_error(study)

    assert lines[-1] == (
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
    """The arms of SAVING, among them controls with the shape of the baseline."""
    return build_arms(SAVING)


def arm_of(arms, variant, control=None):
    for arm in arms:
        if (arm.key.variant, arm.key.control) == (variant, control):
            return arm
    raise KeyError(variant)


def test_a_cheaper_variant_is_also_an_arm_at_the_same_shape(saving_arms):
    """A variant is resized to the baseline's parameters by d_model in one arm, by d_ff in another.

    A variant with fewer parameters than the baseline also has an arm with the baseline's widths.
    This arm is the control 'equal_shape'.
    """
    keys = [(arm.key.variant, arm.key.control) for arm in saving_arms]

    assert keys == [
        ('qk/vo', None),  # the baseline
        # qk/no_o lacks the output matrix, so it is cheaper.
        ('qk/no_o [d_model]', None),
        ('qk/no_o [d_ff]', None),
        ('qk/no_o', 'equal_shape'),
        # merged/vo has more parameters than the baseline.
        ('merged/vo [d_model]', None),
        ('merged/vo [d_ff]', None),
        # A single key/value head and a narrow MLP are cheaper.
        ('qk/vo?num_kv_heads=1&d_ff=200 [d_model]', None),
        ('qk/vo?num_kv_heads=1&d_ff=200 [d_ff]', None),
        ('qk/vo?num_kv_heads=1&d_ff=200', 'equal_shape'),
    ]


def test_a_control_at_the_same_shape_has_the_sizes_of_the_baseline(saving_arms):
    """The variant qk/no_o lacks the output matrix, and its control has the baseline's widths."""
    baseline = arm_of(saving_arms, 'qk/vo')
    control = arm_of(saving_arms, 'qk/no_o', control='equal_shape')

    for field in ('d_model', 'mlp_width', 'num_heads', 'num_layers'):
        assert getattr(control.model, field) == getattr(baseline.model, field)

    # No dimension is widened, so the control has fewer parameters than the baseline.
    assert control.destination is None
    parameters = cost.count(control.model)['total']
    target = cost.count(baseline.model)['total']
    residual = parameters / target - 1
    assert residual < -0.05
    assert control.residual == pytest.approx(residual)


def test_a_control_at_the_same_shape_keeps_its_own_d_ff(saving_arms):
    control = arm_of(saving_arms, 'qk/vo?num_kv_heads=1&d_ff=200', control='equal_shape')
    assert control.model.d_ff == 200


def test_the_table_of_arms_states_the_cost_that_is_equal(saving_arms):
    baseline = saving_arms[0]

    lines = arms_table(saving_arms, matched_cost='total').splitlines()

    # The cost 'total' is the number of all parameters.
    assert lines[0] == 'equal: parameters'

    # Line 3 is the row of the baseline. Its parameters are the target, so its residual is zero.
    words_of_baseline = lines[3].split()
    parameters = cost.count(baseline.model)['total']
    assert 'qk/vo' in words_of_baseline
    assert f'{parameters:,}' in words_of_baseline
    assert '+0.0000%' in words_of_baseline


def test_the_table_of_arms_names_sizes_and_corpora_that_differ(grid_arms):
    assert 'qk/vo d_model=64 stdlib ' in arms_table(grid_arms, None)


def test_the_table_of_arms_leaves_out_a_size_that_all_share(saving_arms):
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
    ids=['switched off', 'without tuning', 'without a match'],
)
def test_controls_at_the_same_shape_need_tuning_and_a_match(fields):
    arms = build_arms(dataclasses.replace(SAVING, **fields))
    for arm in arms:
        assert arm.key.control is None


# Configs of equal cost: what each destination changes, what it keeps, and what is refused.

SMALL = ModelConfig(d_model=96, num_layers=2, num_heads=4, context=64)
DEEP = ModelConfig(d_model=128, num_layers=4, num_heads=4)
FROZEN = 'examples.frozen:Frozen'  # costs as much as the baseline
HADAMARD = 'examples.hadamard:Hadamard'
# Variants that no d_model matches. Hadamard needs a d_model that is a power of two. The others save
# or cost less than half a step of d_model.
REFUSED = {'examples.collaborative:Collaborative/vo', 'nonlinear_query/vo', f'qk/{HADAMARD}'}
EVERY_VARIANT = [
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
OTHER_SHAPES = [
    (dataclasses.replace(SMALL, **shape), 'total', variant) for shape, variant in SHAPES
]
QUICK = OTHER_SHAPES[::2]
OTHERS = OTHER_SHAPES[1::2] + EVERY_VARIANT


def assert_only_widths_differ(matched, config, base):
    """Asserts that matching changed only d_model, d_ff and, if necessary, the head size.

    Args:
        matched: The matched config.
        config: The config of the variant before matching.
        base: The config of the baseline.
    """
    # Rotary positions need an even head size.
    head_step = 2 if base.positions == 'rope' else 1

    # If the number of heads does not divide d_model, the head size is rounded.
    d_model = matched.d_model
    head_size = config.head_size
    if head_size is None and d_model % (head_step * base.num_heads) != 0:
        head_size = head_step * round(d_model / base.num_heads / head_step)
    assert matched == dataclasses.replace(
        config, d_model=d_model, d_ff=matched.d_ff, head_size=head_size
    )

    # d_ff keeps its ratio to d_model. It also absorbs up to half a step of the head size.
    d_ff_at_ratio = base.mlp_width / base.d_model * d_model
    assert abs(matched.d_ff - d_ff_at_ratio) < 0.2 * head_step * d_model + 0.5


@pytest.mark.parametrize(('base', 'which', 'variant'), QUICK + mostly_slow(OTHERS, every=12))
def test_every_variant_is_matched_to_the_cost_of_its_baseline(base, which, variant):
    """A variant gets the d_model at which it costs as much as the baseline.

    Args:
        base: Config of the baseline.
        which: The cost that is equal: 'total' or 'non_embedding' parameters.
        variant: Fields of the config that differ in the variant, such as its score.
    """
    target = cost.measured(base, which)
    config = dataclasses.replace(base, **variant)
    # REFUSED lists the variants that no d_model matches.
    if f'{config.score}/{config.value}' in REFUSED:
        with pytest.raises(MatchError, match='so d_ff would absorb it all|power of two'):
            match(config, target, which=which)
        return

    matched = match(config, target, which=which)

    # The costs are equal up to the tolerance.
    tolerance = 1e-3
    assert abs(cost.measured(matched, which) / target - 1) <= tolerance

    # A cheaper variant becomes wider. A more costly variant becomes narrower.
    saved = target - cost.measured(config, which)
    if saved > 0:
        assert matched.d_model >= base.d_model
    if saved < 0:
        assert matched.d_model <= base.d_model

    assert_only_widths_differ(matched, config, base)


def match_to_baseline(baseline, variant, destination, which='total', **options):
    """Matches the baseline with the fields `variant` to the baseline's cost."""
    config = dataclasses.replace(baseline, **variant)
    target = options.pop('target', cost.measured(baseline, which))
    return match(config, target, which=which, destination=destination, **options)


SHARED_EVERYWHERE = {
    'score': 'shared_qk',
    'encoder_variant': 'shared_qk/vo',
    'cross_variant': 'shared_qk/vo',
}


@pytest.mark.parametrize(
    # `shape` changes SMALL, which has d_model=96, d_ff=384, two layers and four heads of size 24.
    # The model with these changes is the baseline. `which` is the cost that has to be equal.
    # `expected` lists the fields that matching changes in the variant.
    ('shape', 'variant', 'destination', 'which', 'expected'),
    [
        # With D = d_model, the variant saves D^2 parameters per layer. The MLP has 2 D d_ff
        # parameters, so d_ff grows by D / 2.
        pytest.param(
            {}, {'score': 'query_free'}, 'd_ff', 'total', {'d_ff': 384 + 96 // 2}, id='d_ff'
        ),
        # With a head size H, the variant saves D^2 = 4 D H. A fifth head costs 3 D H. The rest of
        # D H widens the MLP by H / 2.
        pytest.param(
            {},
            {'score': 'shared_qk'},
            'num_heads',
            'total',
            {'num_heads': 5, 'head_size': 24, 'd_ff': 384 + 24 // 2},
            id='a head keeps its size',
        ),
        pytest.param(
            {},
            {'score': 'shared_qk', 'head_size': 16},
            'num_heads',
            'total',
            {'num_heads': 8},
            id='a head keeps a given size',
        ),
        pytest.param(
            {},
            {'num_kv_heads': 2},
            'num_heads',
            'total',
            {'num_heads': 6, 'head_size': 24},
            id='query heads grow in steps of the key/value heads',
        ),
        # d_ff does not change the cache, so it cannot absorb a rest.
        pytest.param(
            {},
            {'value': 'k_is_v'},
            'd_model',
            'cache',
            {'d_model': 2 * 96, 'd_ff': 2 * 384},
            id='half the cache, twice the width',
        ),
        pytest.param(
            {},
            {'value': 'k_is_v'},
            'num_heads',
            'cache',
            {'num_heads': 2 * 4, 'head_size': 24},
            id='half the cache, twice the heads',
        ),
        pytest.param(
            {},
            {'num_kv_heads': 1},
            'num_layers',
            'cache',
            {'num_layers': 4 * 2},
            id='a quarter of the cache, four times the layers',
        ),
        pytest.param(
            {},
            {'score': 'merged'},
            'd_ff',
            'flops',
            {'d_ff': 192},
            id='equal FLOPs are not equal parameters',
        ),
        pytest.param(
            {}, {'score': FROZEN}, 'd_model', 'total', {}, id='what saves nothing keeps d_model'
        ),
        pytest.param(
            {},
            {'score': FROZEN},
            'num_heads',
            'total',
            {'head_size': 24},
            id='what saves nothing keeps num_heads',
        ),
        pytest.param(
            {},
            {'num_layers': 1},
            'num_layers',
            'total',
            {'num_layers': 2},
            id='where the search starts does not matter',
        ),
        pytest.param(
            {'num_layers': 12, 'kind': 'encoder_decoder'},
            SHARED_EVERYWHERE,
            'num_layers',
            'total',
            {'num_layers': 13, 'd_ff': 404},
            id='the encoder is as deep as the decoder',
        ),
        pytest.param(
            {'num_layers': 12, 'kind': 'encoder_decoder', 'num_encoder_layers': 5},
            SHARED_EVERYWHERE,
            'num_layers',
            'total',
            {'num_layers': 14, 'd_ff': 386},
            id='the encoder keeps a given depth',
        ),
    ],
)
def test_a_destination_grows_by_what_the_variant_saves(
    shape, variant, destination, which, expected
):
    baseline = dataclasses.replace(SMALL, **shape)

    matched = match_to_baseline(baseline, variant, destination, which)

    fields = variant | {'d_ff': 384} | expected
    assert matched == dataclasses.replace(baseline, **fields)


@pytest.mark.parametrize(
    # `shape` changes SMALL, and gives the baseline. `options` are keywords of `match`.
    ('shape', 'variant', 'destination', 'options', 'message'),
    [
        pytest.param(
            {'d_model': 128},
            {'score': 'shared_qk'},
            'd_model',
            {'fill': None},
            'reaches 434816 parameters only to -0.743%, at d_model=133 and d_ff=532; choose',
            id='d_model alone is too coarse',
        ),
        pytest.param(
            {},
            {'score': 'shared_qk'},
            'd_model',
            {'tolerance': 1e-7, 'target': 252385},
            '+0.0456%, at d_model=100 and d_ff=400, as each unit of d_ff is 0.16%; '
            'choose another size, or a tolerance above 1e-07',
            id='d_ff is too coarse',
        ),
        pytest.param(
            {},
            {'score': 'query_free', 'value': 'low_rank(rank=0)'},
            'd_model',
            {},
            'cannot be built: low_rank(rank=0) must be a whole number from 1 to d_model=96',
            id='no model at any size',
        ),
        pytest.param(
            {'num_heads': 32},
            {},
            'd_model',
            {'target': 500},
            'has more than 500 parameters at d_ff=1 and d_model=1',
            id='the smallest model is too large',
        ),
        pytest.param(
            {},
            {'value': HADAMARD},
            'd_model',
            {},
            'cannot be built: Hadamard needs a d_model that is a power of two, not 96',
            id='no model at the size of the baseline',
        ),
        pytest.param(
            {'d_model': 128, 'head_size': 32},
            {'score': 'query_free'},
            'd_model',
            {},
            'is -7.54% from the target at d_model=128, and no other d_model is nearer, so d_ff',
            id='no nearer d_model',
        ),
        pytest.param(
            # With fill=None, d_ff absorbs nothing.
            {'d_model': 128, 'head_size': 32},
            {'score': 'query_free'},
            'd_model',
            {'fill': None},
            'no other d_model is nearer: at d_model=129 it cannot be built',
            id='no nearer d_model without a fill',
        ),
        pytest.param(
            {},
            {'score': 'query_free'},
            'num_heads',
            {},
            'no other num_heads is nearer, so d_ff would absorb it all',
            id='no nearer num_heads',
        ),
        pytest.param(
            {},
            {'score': 'shared_qk'},
            'num_layers',
            {},
            'no other num_layers is nearer, so d_ff would absorb it all',
            id='no nearer num_layers',
        ),
        pytest.param(
            {'num_kv_heads': 2},
            {},
            'num_heads',
            {'which': 'cache'},
            'has the same cost at any num_heads',
            id='query heads are not cached',
        ),
        pytest.param(
            {},
            {},
            'd_ff',
            {'which': 'cache'},
            'has the same cost at any d_ff',
            id='the MLP is not cached',
        ),
        pytest.param(
            {'d_ff': 4},
            {'score': 'full_size'},
            'd_ff',
            {},
            'reaches 106464 parameters only to +103%, at d_ff=1; choose another size',
            id='the narrowest MLP is too large',
        ),
        pytest.param(
            {'d_ff': 4, 'num_layers': 1},
            {'score': 'full_size'},
            'num_layers',
            {},
            'has more than 68640 parameters at d_ff=1 and num_layers=1',
            id='one layer is too large',
        ),
    ],
)
def test_a_match_that_is_not_possible_names_the_constraint(
    shape, variant, destination, options, message
):
    baseline = dataclasses.replace(SMALL, **shape)
    with refused(re.escape(message), MatchError):
        match_to_baseline(baseline, variant, destination, **options)
