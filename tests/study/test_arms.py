"""Variants x destinations x sizes become arms of equal cost."""

import ast
import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from qkattn.config import Config, ControlsConfig, ModelConfig, Study, TuningConfig
from qkattn.errors import ConfigError, MatchError
from qkattn.model import build
from qkattn.study.arms import build_arms
from tests.study.test_rules import TUNED

STUDY = Study(
    base=Config(model=ModelConfig(num_layers=2)),
    variants=('qk/vo', 'shared_qk/no_v', 'qk/vo?num_kv_heads=1'),
    sizes=('d_model=64', 'd_model=128&num_layers=3'),
)


def test_the_grid_is_expanded_and_matched():
    arms = build_arms(STUDY)
    assert [(a.label, a.size) for a in arms] == [
        (v, s) for s in STUDY.sizes for v in STUDY.variants
    ]
    targets = {a.size: a.match.target for a in arms}
    for arm in arms:
        assert abs(arm.match.parameters['total'] / targets[arm.size] - 1) <= 1e-3
    assert arms[0].model.d_model == 64 and arms[0].match.residual == 0
    assert arms[0].destination is None and arms[1].destination == 'd_model'
    assert arms[2].model.num_kv_heads == 1
    assert arms[4].model.num_layers == 3 and arms[4].model.value == 'no_v'


def test_every_destination_is_an_arm_and_the_baseline_is_one():
    moved = {'d_model': 'd_model', 'd_ff': 'mlp_width'}
    moved |= {name: name for name in ('num_heads', 'num_layers')}
    variants, sizes = ('qk/vo', 'qk/vo?num_kv_heads=1'), ('d_model=128&num_layers=12',)
    study = dataclasses.replace(STUDY, variants=variants, sizes=sizes)
    baseline, *arms = build_arms(dataclasses.replace(study, destinations=tuple(moved)))
    assert baseline.label == 'qk/vo'
    assert [arm.label for arm in arms] == [f'qk/vo?num_kv_heads=1 [{name}]' for name in moved]
    for arm, (destination, size) in zip(arms, moved.items(), strict=True):
        assert getattr(arm.model, size) > getattr(baseline.model, size)
        assert destination == 'd_model' or arm.model.d_model == baseline.model.d_model


SCALED = {'variants': ('qk/vo', 'qk/vo?score_scale=2.0')}
SCALED['tuning'] = TuningConfig(seeds=(10, 11), score_scales=(0.5, 1.0))


@pytest.mark.parametrize(
    ('study', 'fields', 'message'),
    [
        (STUDY, {'variants': ('qk/vv',)}, "variant 'qk/vv': unknown value 'vv'"),
        (STUDY, {'variants': ('qk',)}, 'must be written score/value'),
        (STUDY, {'variants': ('qk/vo?heads=3',)}, "'heads=3' must be a model field"),
        (STUDY, {'variants': ('qk/vo?num_heads',)}, "'num_heads' must be a model field"),
        (STUDY, {'variants': ('qk/vo', 'qk/vo?num_heads=4')}, 'are the same model'),
        (STUDY, {'variants': ('qk/vo', 'qk/vo?d_model=8')}, 'and sizes both set d_model'),
        (STUDY, {'variants': ('qk/vo', 'qk/vo?num_heads=[4]')}, r'num_heads=\[4\] must be of type'),
        (STUDY, {'sizes': ('d_model=66',)}, 'd_model=66 must be a multiple of num_heads=4'),
        (STUDY, {'sizes': ('d_model=wide',)}, "model.d_model='wide' must be of type int"),
        (TUNED, {'expected': ('shared_qk/vo is bad',)}, 'must be a variant and a decision'),
        (TUNED, {'corpora': ('stdlib', 'stdlub')}, r"corpora=\('stdlib', 'stdlub'\): .*'stdlub'"),
        (TUNED, SCALED, 'sets score_scale, which tuning.score_scales tunes'),
    ],
)
def test_a_wrong_study_is_one_sentence(study, fields, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build_arms(dataclasses.replace(study, **fields))
    assert '\n' not in str(caught.value)


def test_variants_that_no_model_matches_are_named_beside_the_other_arms():
    variants = ('qk/vo', 'shared_qk/vo', 'qk/no_v')
    study = dataclasses.replace(STUDY, variants=variants, sizes=STUDY.sizes[:1], fill=None)
    with pytest.raises(MatchError) as caught:
        build_arms(study)
    *lines, _ = str(caught.value).splitlines()
    for line, variant in zip(lines, variants[1:], strict=True):
        assert line.startswith(f'variant {variant!r}: {variant} reaches ')
        assert line.endswith('d_model alone is too coarse, and d_ff is fixed')
    assert [arm.label for arm in caught.value.matched if not arm.key.control] == ['qk/vo']


@pytest.mark.parametrize(
    ('variants', 'sizes', 'remedy'),
    [
        # Between 96 and 128, the power of two that it needs is above what its savings reach.
        (('qk/hadamard', 'qk/no_v'), ('d_model=96',), '("d_model=100",)'),
        (
            ('qk/hadamard',),
            ('d_model=64&num_layers=3', 'd_model=112'),
            '("d_model=60&num_layers=3", "d_model=112",)',
        ),
        # Where the first matches, the second, which matches here, does not.
        (('nonlinear_query/vo', 'qk/hadamard'), ('d_model=112',), None),
        (('qk/hadamard', 'query_free/low_rank(rank=0)'), ('d_model=96',), ''),
    ],
    ids=['one', 'two sizes', 'none near', 'not to be built'],
)
def test_the_nearest_widths_that_match_all_arms_are_named(variants, sizes, remedy):
    study = dataclasses.replace(STUDY, variants=('qk/vo', *variants), sizes=sizes)
    with pytest.raises(MatchError) as caught:
        build_arms(study)
    flag = f"all arms match at the nearest widths: --config.sizes='{remedy}'"
    none = f'none of the next 16 widths below and above {sizes[0]!r} matches all arms'
    assert str(caught.value).endswith(flag if remedy else none) == (remedy != '')
    if remedy:
        build_arms(dataclasses.replace(study, sizes=ast.literal_eval(remedy)))


def test_a_variant_that_saves_parameters_is_also_an_arm_at_the_baselines_shape():
    variants = ('qk/vo', 'qk/no_o', 'merged/vo', 'qk/vo?num_kv_heads=1&d_ff=200')
    study = dataclasses.replace(TUNED, variants=variants, destinations=('d_model', 'd_ff'))
    study = dataclasses.replace(study, sizes=('d_model=64',), tolerance=1.0)
    baseline, *arms = build_arms(study)
    moved = [(f'{v} [{name}]', None) for v in variants[1:] for name in ('d_model', 'd_ff')]
    controls = [(variants[1], 'equal_shape'), (variants[3], 'equal_shape')]
    expected = [*moved[:2], controls[0], *moved[2:], controls[1]]
    assert [arm.key[::3] for arm in arms] == expected
    control = arms[2]
    for name in ('d_model', 'mlp_width', 'num_heads', 'num_layers'):
        assert getattr(control.model, name) == getattr(baseline.model, name)
    saved = control.match.parameters['total'] / baseline.match.parameters['total'] - 1
    assert control.destination is None and control.match.residual == pytest.approx(saved)
    assert saved < -0.05 and arms[-1].model.d_ff == 200
    for without in (
        {'controls': ControlsConfig(equal_shape=False)},
        {'tuning': TuningConfig()},
        {'match': None, 'destinations': ('d_model',)},
    ):
        assert not any(a.key.control for a in build_arms(dataclasses.replace(study, **without)))


def test_arms_start_from_the_same_values_where_tensors_are_the_same():
    same_shapes = dataclasses.replace(STUDY, match=None, sizes=STUDY.sizes[:1])
    arms = build_arms(same_shapes)
    assert {arm.model.d_model for arm in arms} == {64} and arms[1].match.residual < -0.05
    first, *others = (
        dict(jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model))))
        for model in (build(arm.model, key=jax.random.key(5)) for arm in arms)
    )
    for other in others:
        # The initialization of a matrix depends on its variant.
        shared = [path for path in first if 'attention' not in jax.tree_util.keystr(path)]
        assert len(shared) >= 5
        for path in shared:
            np.testing.assert_array_equal(first[path], other[path])


def test_a_model_that_cannot_be_built_is_refused_where_nothing_is_matched():
    variants = ('qk/vo', 'qk/vo?positions=rope&head_size=7')
    with pytest.raises(ConfigError, match='head_size'):
        build_arms(dataclasses.replace(STUDY, variants=variants, match=None))
