"""Variants x destinations x sizes become arms of equal cost; a study breaks no rule."""

import dataclasses

import pytest

from qkattn.config import (
    Config,
    ControlsConfig,
    ModelConfig,
    Study,
    TrialsConfig,
    TuningConfig,
)
from qkattn.errors import ConfigError, MatchError
from qkattn.model import cost
from qkattn.study import rules
from qkattn.study.arms import build_arms, table

UNTUNED = Study(
    base=Config(
        model=ModelConfig(num_layers=2),
        trials=TrialsConfig(seeds=(0, 1, 2, 3), learning_rates=(1e-3, 2e-3, 4e-3)),
    ),
    variants=('qk/vo', 'shared_qk/no_v', 'qk/vo?num_kv_heads=1'),
    sizes=('d_model=64', 'd_model=128&num_layers=3'),
)
TUNED = dataclasses.replace(UNTUNED, tuning=TuningConfig(seeds=(10, 11)))


def test_the_grid_is_expanded_and_matched():
    study = dataclasses.replace(UNTUNED, corpora=('stdlib', 'packages'))
    arms = build_arms(study)
    assert [(a.key.corpus, a.label, a.size) for a in arms] == [
        (corpus, v, s) for corpus in study.corpora for s in study.sizes for v in study.variants
    ]
    targets = {arm.size: arm.match.target for arm in arms}
    for arm in arms[:6]:
        assert abs(cost.count(arm.model)['total'] / targets[arm.size] - 1) <= 1e-3
    assert arms[0].model.d_model == 64 and arms[0].match.residual == 0
    assert arms[0].destination is None and arms[1].destination == 'd_model'
    assert arms[2].model.num_kv_heads == 1
    assert arms[4].model.num_layers == 3 and arms[4].model.value == 'no_v'


def test_every_destination_is_an_arm_and_the_baseline_is_one():
    moved = {'d_model': 'd_model', 'd_ff': 'mlp_width'}
    moved |= {name: name for name in ('num_heads', 'num_layers')}
    variants, sizes = ('qk/vo', 'qk/vo?num_kv_heads=1'), ('d_model=128&num_layers=12',)
    study = dataclasses.replace(UNTUNED, variants=variants, sizes=sizes)
    baseline, *arms = build_arms(dataclasses.replace(study, destinations=tuple(moved)))
    assert baseline.label == 'qk/vo'
    assert [arm.label for arm in arms] == [f'qk/vo?num_kv_heads=1 [{name}]' for name in moved]
    for arm, (destination, size) in zip(arms, moved.items(), strict=True):
        assert getattr(arm.model, size) > getattr(baseline.model, size)
        assert destination == 'd_model' or arm.model.d_model == baseline.model.d_model


def base(section, **fields):
    changed = dataclasses.replace(getattr(TUNED.base, section), **fields)
    return {'base': dataclasses.replace(TUNED.base, **{section: changed})}


def tuning(**fields):
    return {'tuning': TuningConfig(**{'seeds': (5,)} | fields)}


def longer(*seeds):
    return {'controls': ControlsConfig(longer_seeds=seeds)}


ODD = {'variants': ('qk/vo', 'qk/vo?positions=rope&head_size=7'), 'match': None}
AT_SHAPE = 'shared_qk/no_v is worse at equal shape'
SCALED = {'variants': ('qk/vo', 'qk/vo?score_scale=2.0')} | tuning(score_scales=(0.5, 1.0))


@pytest.mark.parametrize(
    ('study', 'fields', 'message'),
    [
        (UNTUNED, {'variants': ('qk/vv',)}, "variant 'qk/vv': unknown value 'vv'"),
        (UNTUNED, {'variants': ('qk',)}, 'must be written score/value'),
        (UNTUNED, {'variants': ('qk/vo?heads=3',)}, "'heads=3' must be a model field"),
        (UNTUNED, {'variants': ('qk/vo?num_heads',)}, "'num_heads' must be a model field"),
        (UNTUNED, {'variants': ('qk/vo', 'qk/vo?num_heads=4')}, 'are the same model'),
        (UNTUNED, {'variants': ('qk/vo', 'qk/vo?d_model=8')}, 'and sizes both set d_model'),
        (UNTUNED, {'variants': ('qk/vo', 'qk/vo?num_heads=[4]')}, r'num_heads=\[4\] must be of'),
        (UNTUNED, ODD, 'head_size'),
        (UNTUNED, {'sizes': ('d_model=66',)}, 'd_model=66 must be a multiple of num_heads=4'),
        (UNTUNED, {'sizes': ('d_model=wide',)}, "model.d_model='wide' must be of type int"),
        (TUNED, {'expected': ('shared_qk/vo is bad',)}, 'must be a variant and a decision'),
        (TUNED, {'corpora': ('stdlib', 'stdlub')}, r"corpora=\('stdlib', 'stdlub'\): .*'stdlub'"),
        (TUNED, SCALED, 'sets score_scale, which tuning.score_scales tunes'),
    ],
)
def test_a_wrong_study_is_one_sentence(study, fields, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build_arms(dataclasses.replace(study, **fields))
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
    ('study', 'fields', 'code'),
    [
        (UNTUNED, {}, None),
        (UNTUNED, {'destinations': ('d_ff', 'd_model'), 'match': None}, 'NO_EFFECT'),
        (UNTUNED, {'expected': ('shared_qk/no_v is worse',)}, 'NEEDS_TUNING'),
        (UNTUNED, tuning(seeds=(), score_scales=(1.0, 2.0)), 'NEEDS_TUNING'),
        (TUNED, {}, None),
        (TUNED, {'variants': ('shared_qk/vo',)}, 'NO_BASELINE'),
        (TUNED, tuning(seeds=(1, 2)), 'SHARED_SEEDS'),
        (TUNED, tuning() | base('trials', seeds=(0, 1, 7)), 'SHARED_SEEDS'),  # may be drawn
        (TUNED, longer(8, 9, 12), 'SHARED_SEEDS'),
        (TUNED, longer(20, 21), 'TOO_FEW'),
        (TUNED, base('trials', seeds=(0, 1)), 'TOO_FEW'),
        (TUNED, tuning(seeds=(5, 6), max_seeds=1), 'TOO_FEW'),
        (TUNED, tuning(max_seeds=1), 'TOO_FEW'),
        (TUNED, tuning(max_points=2), 'TOO_FEW'),
        (TUNED, {'expected': ('qk/vo is worse',)}, 'UNKNOWN_CONTROL'),
        (TUNED, {'expected': ('x/vo is worse',)}, 'UNKNOWN_CONTROL'),
        (TUNED, {'expected': (AT_SHAPE,), 'match': None}, 'NO_EQUAL_SHAPE'),
        (TUNED, tuning(score_scales=(1.0,)), 'SINGLE_VALUE'),
        (TUNED, tuning(init_vos=(1.0, 0.5)), 'GRID'),
        (TUNED, base('trials', learning_rates=(1e-3, 2e-3, 3e-3)), 'GRID'),
        (TUNED, base('trials', weight_decays=(0.0, 0.1)), 'GRID'),
        (TUNED, base('trials', learning_rates=(1e-3,)), 'LEARNING_RATE_NOT_TUNED'),
        (TUNED, base('optimizer', schedule='constant'), 'NOT_ANNEALED'),
        (TUNED, base('optimizer', final_fraction=0.2), 'NOT_ANNEALED'),
        (TUNED, base('mesh', trial=2) | tuning(seeds=(10, 11, 12)), 'NOT_DIVISIBLE'),
    ],
)
def test_a_change_breaks_a_rule_which_is_one_sentence(study, fields, code):
    study = dataclasses.replace(study, **fields)
    broken = list(rules.broken(study))
    assert {rule.name for rule, _ in broken} == ({code} if code else set())
    if broken:
        with pytest.raises(ConfigError) as refusal:
            rules.validate(study)
        assert str(refusal.value) == rules.sentence(*broken[0])
        assert '\n' not in str(refusal.value)


def test_each_variant_that_no_model_matches_is_named():
    variants = ('qk/vo', 'shared_qk/vo', 'qk/no_v')
    study = dataclasses.replace(UNTUNED, variants=variants, sizes=UNTUNED.sizes[:1], fill=None)
    with pytest.raises(MatchError) as caught:
        build_arms(study)
    for line, variant in zip(str(caught.value).splitlines(), variants[1:], strict=True):
        assert line.startswith(f'variant {variant!r}: {variant} reaches ')
        assert line.endswith('d_model alone is too coarse, and d_ff is fixed')


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
    saved = cost.count(control.model)['total'] / cost.count(baseline.model)['total'] - 1
    assert control.destination is None and control.match.residual == pytest.approx(saved)
    assert saved < -0.05 and arms[-1].model.d_ff == 200
    equal, header, row, *_ = table([baseline, *arms], 'total').splitlines()
    shown = dict(zip(header.split(), row.split(), strict=True))
    names = ('variant', 'd_model', 'widened', 'd_ff', 'fill', 'heads', 'head_size', 'residual')
    values = ['qk/vo', '64', '+0', '256', '+0', '4', '16', '+0.0000%']
    assert equal == 'equal: parameters' and [shown[name] for name in names] == values
    assert shown['total'] == f'{cost.count(baseline.model)["total"]:,}'
    for without in (
        {'controls': ControlsConfig(equal_shape=False)},
        {'tuning': TuningConfig()},
        {'match': None, 'destinations': ('d_model',)},
    ):
        assert not any(a.key.control for a in build_arms(dataclasses.replace(study, **without)))
