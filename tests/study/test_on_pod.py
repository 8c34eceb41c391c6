"""Dry runs of a study on a pod: a row for each model, and notes on what differs."""

import dataclasses

import pytest

from qkattn.config import ControlsConfig
from qkattn.model import cost
from qkattn.study import on_pod
from qkattn.study.arms import build_arms
from qkattn.train.dry_run import Description
from tests.study.test_plan import STUDY, study_with


@pytest.fixture
def described_configs(monkeypatch):
    """Replaces the dry run of a config on a pod, which would compile it, by made-up numbers.

    Returns the list of the configs that are described, empty at first.
    """
    configs = []

    def describe(config, topology):
        """Replaces `dry_run.describe`. `topology` is the name of the pod."""
        configs.append(config)
        parameters = cost.count(config.model)['total']
        notes = [topology, 'mesh data=8']
        if config.model.d_model == 64:
            notes.append('WARNING the program DOES NOT FIT')
        return Description(
            name=topology,
            compiler='XLA',
            mesh={'data': 8},
            notes=notes,
            trials=len(config.trials.trials()),
            parameters=parameters,
            tokens=1024,
            memory={
                'parameters': 4 * parameters,
                'optimizer state': 8 * parameters,
                'batch': 10**9,
            },
            capacity=2 * 10**9,
            flops=5e12,
            seconds=0.25,
        )

    monkeypatch.setattr(on_pod.dry_run, 'describe', describe)
    return configs


def test_each_model_of_a_study_is_described_once_with_its_most_trials(described_configs):
    """Each model of a study has a row in the table, which describes its largest run.

    The made-up dry run takes 4 + 8 bytes per parameter and 1 GB for a batch. A device has 2 GB.
    """
    study = study_with(
        variants=('qk/vo', 'shared_qk/vo'),
        sizes=('d_model=32', 'd_model=64'),
        controls=ControlsConfig(equal_shape=False),
    )
    arms = build_arms(study)

    text = on_pod.described_arms(study, arms, 'h100-1x8')

    # Two variants at two sizes are four models.
    assert [config.model for config in described_configs] == [arm.model for arm in arms]
    # A screening has 2 seeds at 3 learning rates. A verdict has only 3 trials.
    assert [len(config.trials.trials()) for config in described_configs] == [2 * 3] * 4

    # The columns are: trials, tokens, GB of parameters and optimizer, GB in all, the share of the
    # 2 GB, TFLOP and ms of a step.
    lines = [' '.join(line.split()) for line in text.splitlines()]
    state = 12 * cost.count(arms[0].model)['total'] / 1e9
    total = state + 1
    assert lines[3] == f'qk/vo d_model=32 6 1,024 {state:.3g} {total:.3g} {total / 2:.1%} 5 250'

    # A note that all models share is printed once. The warning is for d_model=64, which only qk/vo
    # has, because shared_qk/vo is widened to cost as much.
    assert lines[-3:] == [
        'h100-1x8',
        'mesh data=8',
        'qk/vo d_model=64: WARNING the program DOES NOT FIT',
    ]


def test_a_model_whose_initialization_is_tuned_is_described_once(described_configs):
    """Each factor of the initialization is a run of its own, but the model is the same."""
    tuning = dataclasses.replace(STUDY.tuning, init_qks=(0.5, 1.0, 2.0))
    study = study_with(variants=('qk/vo',), tuning=tuning)

    on_pod.described_arms(study, build_arms(study), 'h100-1x8')

    # The study has one variant at one size.
    assert len(described_configs) == 1
