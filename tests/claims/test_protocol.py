"""Every study of the claims can be built at every scale, within its tolerance."""

import dataclasses
import runpy
from pathlib import Path

import pytest

from qkattn.claims import protocol
from qkattn.config import from_config_dict
from qkattn.errors import ConfigError
from qkattn.study.arms import build_arms
from qkattn.study.tuning import screening_seeds

CONFIGS = sorted((Path(__file__).parents[2] / 'configs/claims').glob('*.py'))
UNTUNED = ('nonlinear_untuned',)


def study(path, scale):
    return from_config_dict(runpy.run_path(str(path))['get_config'](scale))


@pytest.mark.parametrize(
    'scale',
    ['smoke', *(pytest.param(scale, marks=pytest.mark.slow) for scale in ('cpu', 'gpu'))],
)
@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_studies_are_matched_at_every_scale(path, scale):
    of = study(path, scale)
    arms = build_arms(of)
    assert of.name == path.stem
    assert bool(of.tuning.seeds) == (scale != 'smoke' and of.name not in UNTUNED)
    matched = [arm for arm in arms if arm.key.control is None and of.match]
    assert all(abs(arm.match.residual) <= of.tolerance for arm in matched)


def test_longer_training_is_asked_for_by_name():
    assert protocol.protocol('cpu')['controls'].longer is None
    assert protocol.protocol('cpu', longer=True)['controls'].longer == 4


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_screening_seeds_are_none_of_the_verdict(path):
    for scale in protocol.SCALES:
        of = study(path, scale)
        if of.tuning.seeds:
            assert not {*of.base.trials.seeds} & {*screening_seeds(of.tuning)}


def test_fields_of_the_model_replace_those_of_the_scale():
    config = protocol.translator('cpu', num_heads=4)
    assert config.model == dataclasses.replace(protocol.translator('cpu').model, num_heads=4)


def test_an_unknown_scale_names_those_that_exist():
    with pytest.raises(ConfigError, match="scale='huge' must be one of smoke, cpu, gpu"):
        protocol.language_model('huge')
