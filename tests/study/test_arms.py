"""Variants x destinations x sizes become arms of equal cost."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from flax import nnx

from qkattn.config import Config, ControlsConfig, ModelConfig, Study, TuningConfig
from qkattn.config import TrialsConfig as Trials
from qkattn.errors import ConfigError
from qkattn.model import build
from qkattn.study.arms import build_arms

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
    baseline, *arms = build_arms(
        dataclasses.replace(
            STUDY,
            variants=('qk/vo', 'qk/vo?num_kv_heads=1'),
            destinations=tuple(moved),
            sizes=('d_model=128&num_layers=12',),
        )
    )
    assert baseline.label == 'qk/vo'
    assert [arm.label for arm in arms] == [f'qk/vo?num_kv_heads=1 [{name}]' for name in moved]
    for arm, (destination, size) in zip(arms, moved.items(), strict=True):
        assert getattr(arm.model, size) > getattr(baseline.model, size)
        assert destination == 'd_model' or arm.model.d_model == baseline.model.d_model


TUNED = dataclasses.replace(
    STUDY,
    base=Config(trials=Trials(seeds=(0, 1, 2, 3), learning_rates=(1e-3, 2e-3, 4e-3))),
    tuning=TuningConfig(seeds=(10, 11)),
)


def changed(section, **fields) -> dict:
    changed = dataclasses.replace(getattr(TUNED.base, section), **fields)
    return {'base': dataclasses.replace(TUNED.base, **{section: changed})}


def tuning(**fields) -> dict:
    return {'tuning': TuningConfig(**{'seeds': (5,)} | fields)}


SCALED = tuning(score_scales=(0.5, 1.0))


@pytest.mark.parametrize(
    ('study', 'fields', 'message'),
    [
        (STUDY, {'variants': ('qk/vv',)}, "variant 'qk/vv': unknown value 'vv'"),
        (STUDY, {'variants': ('qk',)}, 'must be written score/value'),
        (STUDY, {'variants': ('qk/vo?heads=3',)}, "'heads=3' must be a model field"),
        (STUDY, {'variants': ('qk/vo?num_heads',)}, "'num_heads' must be a model field"),
        (STUDY, {'variants': ()}, 'must hold at least one value'),
        (STUDY, {'variants': ('qk/vo', 'qk/vo')}, 'must hold no value twice'),
        (STUDY, {'variants': ('qk/vo', 'qk/vo?num_heads=4')}, 'are the same model'),
        (STUDY, {'variants': ('qk/vo', 'qk/vo?d_model=8')}, 'and sizes both set d_model'),
        (STUDY, {'variants': ('qk/vo', 'qk/vo?num_heads=[4]')}, r'num_heads=\[4\] must be of type'),
        (STUDY, {'variants': ('shared_qk/vo',), 'fill': None}, 'd_model alone is too coarse'),
        (STUDY, {'sizes': ('width=3',)}, "'width=3' must be a model field"),
        (STUDY, {'sizes': ('d_model=66',)}, 'd_model=66 must be a multiple of num_heads=4'),
        (STUDY, {'sizes': ('d_model=wide',)}, "model.d_model='wide' must be of type int"),
        (STUDY, {'sizes': ('score=merged',)}, 'and sizes both set score'),
        (STUDY, {'baseline': 'qk/no'}, "variant 'qk/no': unknown value 'no'"),
        (
            STUDY,
            {'match': 'bytes'},
            "='bytes' must be one of total, non_embedding, flops, cache, or None",
        ),
        (STUDY, {'fill': 'heads'}, "fill='heads' must be one of d_ff, or None"),
        (STUDY, {'destinations': ('width',)}, 'must hold d_model, d_ff, num_heads, num_layers'),
        (STUDY, {'destinations': ('d_ff', 'd_model'), 'match': None}, r"ff', 'd_model'\) have no"),
        (STUDY, {'tolerance': 0.0}, 'tolerance=0.0 must be above 0'),
        (STUDY, {'margin': -1.0}, 'margin=-1.0 must be above 0 and finite'),
        (STUDY, {'margin': math.inf}, 'margin=inf must be above 0 and finite'),
        (
            STUDY,
            tuning(seeds=(), score_scales=(1.0, 2.0)),
            r'scales=\(1.0, 2.0\) need tuning.seeds',
        ),
        # A study that is tuned.
        (TUNED, {'variants': ('shared_qk/vo',)}, "must contain the baseline 'qk/vo'"),
        (TUNED, tuning(seeds=(1, 2)), 'tuning.seeds and trials.seeds share 1:'),
        (
            TUNED,
            tuning(seeds=(5, 6), max_seeds=1),
            'max_seeds=1 must be at least 2, the numb',
        ),
        (
            TUNED,
            tuning(seeds=(5,)) | changed('trials', seeds=(0, 1, 7)),
            'up to 10 of tuning and',
        ),
        (
            TUNED,
            {'controls': ControlsConfig(longer=1)},
            r'longer=1 must be at least 2 and below 2\*\*31, or None',
        ),
        (
            TUNED,
            {'controls': ControlsConfig(longer_seeds=(20, 21))},
            'must be at least 3, or em',
        ),
        (
            TUNED,
            {'controls': ControlsConfig(longer_seeds=(7, 7, 8))},
            'longer_seeds=.* hold no value twice',
        ),
        (
            TUNED,
            {'controls': ControlsConfig(longer_seeds=(8, 9, 10))},
            'tuning.seeds and contr',
        ),
        (
            TUNED,
            {'controls': ControlsConfig(longer_seeds=(8, 9, 12))},
            'to 15 of tuning and co',
        ),
        (
            TUNED,
            {'looks': (2, 3)},
            r'looks=\(2, 3\) must ascend from at least 1 to 4',
        ),
        (TUNED, {'looks': (3, 2, 4)}, 'must ascend from at least 1 to 4'),
        (TUNED, {'looks': (0, 4)}, 'must hold values that are at least 1'),
        (STUDY, {'looks': (1,)}, r'looks=\(1,\) need tuning.seeds: others have no verdict'),
        (STUDY, {'expected': ('shared_qk/no_v is worse',)}, 'is worse. needs tuning.seeds: others'),
        (TUNED, {'expected': ('shared_qk/vo is bad',)}, 'must be a variant and a word, better, '),
        (TUNED, {'expected': ('qk/vo is worse',)}, "'qk/vo' is none of the arms that are comp"),
        (
            TUNED,
            {'expected': ('shared_qk/no_v is worse at equal shape',), 'match': None},
            'needs controls.equal_shape and a match',
        ),
        (TUNED, {'corpora': ('stdlib', 'stdlib')}, 'must hold no value twice'),
        (TUNED, {'corpora': ('stdlib', 'stdlub')}, r"corpora=\('stdlib', 'stdlub'\): .*'stdlub'"),
        (TUNED, tuning(seeds=(5, 5)), 'must hold no value twice'),
        (TUNED, tuning(seeds=(-1,)), 'must hold values that are at least 0'),
        (TUNED, tuning(max_points=2), r'max_points=2 must be at least 3: a verdict needs a best'),
        (TUNED, tuning(max_seeds=1), r'max_seeds=1 must be at least 2: a verdict needs a best'),
        (TUNED, tuning(score_scales=(1.0,)), 'must be a grid, or empty'),
        (TUNED, tuning(init_qks=(2.0,)), 'must be a grid, .* single value as base.model.init_qk$'),
        (TUNED, tuning(init_vos=(1.0, 0.5)), r'tuning.init_vos=\(1.0, 0.5\) must ascend by a con'),
        (TUNED, {**SCALED, 'variants': ('qk/vo', 'qk/vo?score_scale=2.0')}, 'sets score_scale, wh'),
        (TUNED, changed('trials', learning_rates=(1e-3,)), r'_rates=\(0.001,\) must be a grid'),
        (TUNED, changed('trials', learning_rates=(1e-3, 2e-3, 3e-3)), 'must ascend by a constant'),
        (TUNED, changed('trials', learning_rates=(2e-3, 1e-3)), 'must ascend by a constant factor'),
        (TUNED, changed('trials', weight_decays=(0.0, 0.1)), r'decays=\(0.0, 0.1\) must ascend'),
        (TUNED, changed('trials', seeds=(0, 1)), r's=\(0, 1\) must be at least 3 for a verdict'),
        (TUNED, changed('optimizer', schedule='constant'), 'does not anneal'),
        (TUNED, changed('optimizer', final_fraction=0.2), 'does not anneal'),
        (
            TUNED,
            changed('mesh', trial=2) | tuning(seeds=(10, 11, 12)),
            'must divide the number of tuning.seeds, 3',
        ),
        (TUNED, changed('mesh', trial=2) | {'looks': (3, 4)}, 'must divide look 1 of looks, 3'),
    ],
)
def test_a_wrong_study_is_one_sentence(study, fields, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build_arms(dataclasses.replace(study, **fields))
    assert '\n' not in str(caught.value)


def test_a_variant_that_saves_parameters_is_also_an_arm_at_the_baselines_shape():
    variants = ('qk/vo', 'qk/no_o', 'merged/vo', 'qk/vo?num_kv_heads=1&d_ff=200')
    study = dataclasses.replace(TUNED, variants=variants, destinations=('d_model', 'd_ff'))
    study = dataclasses.replace(study, sizes=('d_model=64',), tolerance=1.0)
    baseline, *arms = build_arms(study)
    assert [arm.place[::3] for arm in arms] == [
        ('qk/no_o [d_model]', None),
        ('qk/no_o [d_ff]', None),
        ('qk/no_o', 'equal_shape'),
        ('merged/vo [d_model]', None),
        ('merged/vo [d_ff]', None),
        ('qk/vo?num_kv_heads=1&d_ff=200 [d_model]', None),
        ('qk/vo?num_kv_heads=1&d_ff=200 [d_ff]', None),
        ('qk/vo?num_kv_heads=1&d_ff=200', 'equal_shape'),
    ]
    control = arms[2]
    shape = ('d_model', 'mlp_width', 'num_heads', 'num_layers')
    for name in shape:
        assert getattr(control.model, name) == getattr(baseline.model, name)
    saved = control.match.parameters['total'] / baseline.match.parameters['total'] - 1
    assert control.destination is None and control.match.residual == pytest.approx(saved)
    assert saved < -0.05 and arms[-1].model.d_ff == 200
    for without in (
        {'controls': ControlsConfig(equal_shape=False)},
        {'tuning': TuningConfig()},
        {'match': None, 'destinations': ('d_model',)},
    ):
        assert not any(a.place.control for a in build_arms(dataclasses.replace(study, **without)))


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
