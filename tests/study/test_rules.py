"""A change of a study and the code of the rule that it breaks, before anything compiles."""

import dataclasses

import pytest

from qkattn.config import Config, ControlsConfig, ModelConfig, Study, TrialsConfig, TuningConfig
from qkattn.errors import ConfigError
from qkattn.study import rules

UNTUNED = Study(
    base=Config(
        model=ModelConfig(num_layers=2),
        trials=TrialsConfig(seeds=(0, 1, 2, 3), learning_rates=(1e-3, 2e-3, 4e-3)),
    ),
    variants=('qk/vo', 'shared_qk/no_v', 'qk/vo?num_kv_heads=1'),
)
TUNED = dataclasses.replace(UNTUNED, tuning=TuningConfig(seeds=(10, 11)))


def base(section, **fields):
    changed = dataclasses.replace(getattr(TUNED.base, section), **fields)
    return {'base': dataclasses.replace(TUNED.base, **{section: changed})}


def tuning(**fields):
    return {'tuning': TuningConfig(**{'seeds': (5,)} | fields)}


def longer(*seeds):
    return {'controls': ControlsConfig(longer_seeds=seeds)}


@pytest.mark.parametrize(
    ('study', 'fields', 'codes'),
    [
        (UNTUNED, {}, set()),
        (UNTUNED, {'destinations': ('d_ff', 'd_model'), 'match': None}, {'NO_EFFECT'}),
        (UNTUNED, {'looks': (1,)}, {'NEEDS_TUNING'}),
        (UNTUNED, {'expected': ('shared_qk/no_v is worse',)}, {'NEEDS_TUNING'}),
        (UNTUNED, tuning(seeds=(), score_scales=(1.0, 2.0)), {'NEEDS_TUNING'}),
        (TUNED, {}, set()),
        (TUNED, {'variants': ('shared_qk/vo',)}, {'NO_BASELINE'}),
        (TUNED, tuning(seeds=(1, 2)), {'SHARED_SEEDS'}),
        (TUNED, tuning() | base('trials', seeds=(0, 1, 7)), {'SHARED_SEEDS'}),  # may be drawn
        (TUNED, longer(8, 9, 10), {'SHARED_SEEDS'}),
        (TUNED, longer(8, 9, 12), {'SHARED_SEEDS'}),
        (TUNED, longer(20, 21), {'TOO_FEW'}),
        (TUNED, base('trials', seeds=(0, 1)), {'TOO_FEW'}),
        (TUNED, tuning(seeds=(5, 6), max_seeds=1), {'TOO_FEW'}),
        (TUNED, tuning(max_seeds=1), {'TOO_FEW'}),
        (TUNED, tuning(max_points=2), {'TOO_FEW'}),
        (TUNED, {'looks': (2, 3)}, {'LOOKS'}),
        (TUNED, {'looks': (3, 2, 4)}, {'LOOKS'}),
        (TUNED, {'looks': (2, 4)}, set()),
        (TUNED, {'expected': ('qk/vo is worse',)}, {'UNKNOWN_CONTROL'}),
        (TUNED, {'expected': ('x/vo is worse',)}, {'UNKNOWN_CONTROL'}),
        (
            TUNED,
            {'expected': ('shared_qk/no_v is worse at equal shape',), 'match': None},
            {'NO_EQUAL_SHAPE'},
        ),
        (TUNED, tuning(score_scales=(1.0,)), {'SINGLE_VALUE'}),
        (TUNED, tuning(init_vos=(1.0, 0.5)), {'GRID'}),
        (TUNED, base('trials', learning_rates=(1e-3, 2e-3, 3e-3)), {'GRID'}),
        (TUNED, base('trials', weight_decays=(0.0, 0.1)), {'GRID'}),
        (TUNED, base('trials', learning_rates=(1e-3,)), {'LEARNING_RATE_NOT_TUNED'}),
        (TUNED, base('optimizer', schedule='constant'), {'NOT_ANNEALED'}),
        (TUNED, base('optimizer', final_fraction=0.2), {'NOT_ANNEALED'}),
        (TUNED, base('mesh', trial=2) | tuning(seeds=(10, 11, 12)), {'NOT_DIVISIBLE'}),
        (TUNED, base('mesh', trial=2) | {'looks': (3, 4)}, {'NOT_DIVISIBLE'}),
    ],
)
def test_a_change_breaks_a_rule_which_is_one_sentence(study, fields, codes):
    study = dataclasses.replace(study, **fields)
    broken = list(rules.broken(study))
    assert {rule.name for rule, _ in broken} == codes
    assert all('\n' not in rules.sentence(*one) for one in broken)
    if broken:
        with pytest.raises(ConfigError) as refusal:
            rules.validate(study)
        assert str(refusal.value) == rules.sentence(*broken[0])
