"""Whether a run fits in the memory of its devices."""

import dataclasses

import pytest

from qkattn.config import Config, ModelConfig, TrainConfig, TrialsConfig
from qkattn.errors import ConfigError
from qkattn.model import cost
from qkattn.train import placement

CONFIG = Config(
    model=ModelConfig(d_model=16, num_layers=1, num_heads=2, context=16),
    train=TrainConfig(steps_per_dispatch=5, batch_size=4),
    trials=TrialsConfig(seeds=(0, 1, 2)),
)


def test_parameters_gradients_and_a_batch_have_to_fit(monkeypatch):
    # Float32 parameters and gradients; tokens, targets and loss weights of 5 steps of 4 rows.
    needed = 2 * 4 * 3 * cost.measured(CONFIG.model, 'total') + 5 * 3 * 4 * (3 * 16) * 4
    memory = {'SC_PAGE_SIZE': 1, 'SC_PHYS_PAGES': needed}
    monkeypatch.setattr(placement.os, 'sysconf', memory.__getitem__)
    placement.require_memory(CONFIG)
    memory['SC_PHYS_PAGES'] -= 1
    with pytest.raises(ConfigError, match='3 trials of 7,472 parameters'):
        placement.require_memory(CONFIG)


def test_sizes_that_no_machine_holds_are_refused_by_name():
    model = dataclasses.replace(CONFIG.model, vocab_size=2**31 - 1)
    with pytest.raises(ConfigError, match='model.vocab_size=2147483647.* 768.0 GiB, more than the'):
        placement.require_memory(dataclasses.replace(CONFIG, model=model))
