"""Variants x destinations x sizes become arms of equal cost."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from flax import nnx

from qkattn.config import Config, MeshConfig, ModelConfig, Study, TuningConfig
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


def test_without_matching_the_shapes_are_equal():
    arms = build_arms(dataclasses.replace(STUDY, match=None))
    assert {a.model.d_model for a in arms[:3]} == {64}
    assert arms[1].match.residual < -0.05


def test_every_destination_is_an_arm_and_the_baseline_is_one():
    destinations = ('d_model', 'd_ff', 'num_heads', 'num_layers')
    study = dataclasses.replace(
        STUDY, variants=('qk/vo', 'qk/vo?num_kv_heads=1'), destinations=destinations
    )
    arms = build_arms(dataclasses.replace(study, sizes=('d_model=128&num_layers=12',)))
    assert [a.label for a in arms] == [
        'qk/vo',
        *(f'qk/vo?num_kv_heads=1 [{destination}]' for destination in destinations),
    ]
    widths = [
        (a.model.d_model, a.model.mlp_width, a.model.num_heads, a.model.num_layers) for a in arms
    ]
    base = widths[0]
    assert widths[1][0] > base[0]
    assert widths[2][1] > base[1] and widths[2][0] == base[0]
    assert widths[3][2] > base[2] and widths[3][0] == base[0]
    assert widths[4][3] > base[3] and widths[4][0] == base[0]


TUNED = dataclasses.replace(
    STUDY,
    base=Config(trials=Trials(seeds=(0, 1, 2, 3), learning_rates=(1e-3, 2e-3, 4e-3))),
    tuning=TuningConfig(seeds=(10, 11)),
)


def trials(**fields) -> dict:
    changed = dataclasses.replace(TUNED.base.trials, **fields)
    return {'base': dataclasses.replace(TUNED.base, trials=changed)}


def optimizer(**fields) -> dict:
    changed = dataclasses.replace(TUNED.base.optimizer, **fields)
    return {'base': dataclasses.replace(TUNED.base, optimizer=changed)}


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'variants': ('qk/vv',)}, "variant 'qk/vv': unknown value 'vv'"),
        ({'variants': ('qk',)}, 'must be written score/value'),
        ({'variants': ('qk/vo?heads=3',)}, "'heads=3' must be a model field"),
        ({'variants': ('qk/vo?num_heads',)}, "'num_heads' must be a model field"),
        ({'variants': ()}, 'must hold at least one entry'),
        ({'variants': ('qk/vo', 'qk/vo')}, 'none twice'),
        ({'variants': ('qk/vo', 'qk/vo?num_heads=4')}, 'are the same model'),
        ({'sizes': ('width=3',)}, "'width=3' must be a model field"),
        ({'sizes': ('d_model=66',)}, 'd_model=66 must be a multiple of num_heads=4'),
        ({'sizes': ('d_model=wide',)}, "model.d_model='wide' must be of type int"),
        ({'baseline': 'qk/no'}, "variant 'qk/no': unknown value 'no'"),
        ({'match': 'bytes'}, "match='bytes' must be total, non_embedding, flops, cache or None"),
        ({'fill': 'heads'}, "fill='heads' must be d_ff or None"),
        ({'destinations': ('width',)}, 'must be of d_model, d_ff, num_heads, num_layers'),
        (
            {'destinations': ('d_ff', 'd_model'), 'match': None},
            r"destinations=\('d_ff', 'd_model'\) have no",
        ),
        ({'tolerance': 0.0}, 'tolerance=0.0 must be above 0'),
        ({'margin': -1.0}, 'margin=-1.0 must be above 0 and finite'),
        ({'margin': math.inf}, 'margin=inf must be above 0 and finite'),
        ({'variants': ('qk/vo', 'qk/vo?d_model=8')}, 'and sizes both set d_model'),
        ({'sizes': ('score=merged',)}, 'and sizes both set score'),
        ({'variants': ('qk/vo', 'qk/vo?num_heads=[4]')}, r'num_heads=\[4\] must be of type int'),
        ({'variants': ('shared_qk/vo',), 'fill': None}, 'd_model alone is too coarse'),
        (
            {'tuning': TuningConfig(score_scales=(1.0, 2.0))},
            r'tuning.score_scales=\(1.0, 2.0\) need tuning.seeds',
        ),
    ],
    ids=str,
)
def test_a_wrong_study_is_one_sentence(fields, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build_arms(dataclasses.replace(STUDY, **fields))
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'variants': ('shared_qk/vo',)}, "must contain the baseline 'qk/vo'"),
        ({'tuning': TuningConfig(seeds=(1, 2))}, 'tuning.seeds and trials.seeds share 1:'),
        ({'tuning': TuningConfig(seeds=(5, 5))}, 'from 0 to 2.*31 - 1, none twice'),
        ({'tuning': TuningConfig(seeds=(-1,))}, 'from 0 to 2.*31 - 1, none twice'),
        ({'tuning': TuningConfig(seeds=(5,), max_points=2)}, 'must be at least 3'),
        ({'tuning': TuningConfig(seeds=(5,), score_scales=(1.0,))}, 'must be a grid, or empty'),
        (
            {
                'tuning': TuningConfig(seeds=(5,), score_scales=(0.5, 1.0)),
                'variants': ('qk/vo', 'qk/vo?score_scale=2.0'),
            },
            'sets score_scale, which tuning.score_scales',
        ),
        (trials(learning_rates=(1e-3,)), r'trials.learning_rates=\(0.001,\) must be a grid'),
        (trials(learning_rates=(1e-3, 2e-3, 3e-3)), 'must ascend by a constant factor'),
        (trials(learning_rates=(2e-3, 1e-3)), 'must ascend by a constant factor'),
        (trials(weight_decays=(0.0, 0.1)), r'trials.weight_decays=\(0.0, 0.1\) must ascend'),
        (trials(seeds=(0, 1)), r'trials.seeds=\(0, 1\) must be at least 3 for a verdict'),
        (optimizer(schedule='constant'), 'does not anneal'),
        (optimizer(final_fraction=0.2), 'does not anneal'),
    ],
    ids=str,
)
def test_a_study_that_cannot_be_tuned_is_one_sentence(fields, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build_arms(dataclasses.replace(TUNED, **fields))
    assert '\n' not in str(caught.value)


def test_the_mesh_divides_every_stack():
    base = dataclasses.replace(TUNED.base, mesh=MeshConfig(trial=2))
    study = dataclasses.replace(TUNED, base=base, tuning=TuningConfig(seeds=(10, 11, 12)))
    with pytest.raises(ConfigError, match='must divide the number of tuning.seeds, 3'):
        build_arms(study)


def test_arms_start_from_the_same_values_where_tensors_are_the_same():
    same_shapes = dataclasses.replace(STUDY, match=None, sizes=STUDY.sizes[:1])
    first, *others = (
        dict(jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model))))
        for model in (build(arm.model, key=jax.random.key(5)) for arm in build_arms(same_shapes))
    )
    for other in others:
        # The initialization of a matrix depends on its variant.
        shared = [path for path in first if 'attention' not in jax.tree_util.keystr(path)]
        assert len(shared) >= 5
        for path in shared:
            np.testing.assert_array_equal(first[path], other[path])
