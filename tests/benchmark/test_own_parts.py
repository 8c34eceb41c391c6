"""Works that time parts of qkattn compute what the whole computes."""

import dataclasses

import numpy as np
import pytest

from qkattn.benchmark.peers import own, own_parts
from qkattn.benchmark.shape import TINY
from qkattn.config import Config, from_json
from qkattn.model import cost


def test_one_trial_without_the_axis_of_trials_computes_the_same():
    config = TINY.config(steps_per_dispatch=2, lifting='vmap')
    alone, whole = own_parts.one_trial(config), own.train(config)
    for calls in (1, 2):
        metrics_C, metrics_CX = alone.run(calls), whole.run(calls)
        assert metrics_C.keys() == metrics_CX.keys()
        for name, values_C in metrics_C.items():
            np.testing.assert_allclose(values_C, metrics_CX[name][:, 0], rtol=1e-5)
    assert alone.steps == whole.steps == 2
    same = ('tokens', 'flops', 'parameters')
    assert [alone.extra[name] for name in same] == [whole.extra[name] for name in same]


def test_a_step_of_a_stack_is_one_of_one_of_its_trials():
    config = TINY.config(steps_per_dispatch=2, seeds=3, lifting='map')
    stack, whole = own_parts.stack(config), own.costs(from_json(Config, config))
    assert stack.steps == 2 * 3 and stack.extra['compilations_per_trial'] == pytest.approx(1 / 3)
    assert stack.extra['tokens'] == whole['tokens'] / 3 == TINY.tokens
    assert stack.extra['flops'] == whole['flops'] / 3


def test_the_cache_holds_what_the_cost_of_a_variant_predicts():
    model = TINY.config(num_kv_heads=1)['model']
    work = own_parts.greedy(model, rows=2, prompt=2, tokens=3)
    floats = TINY.layers * 2 * (TINY.width // TINY.heads)
    assert work.extra['cache_bytes'] == 4 * floats * 2 * TINY.context
    assert work.extra['predicted_cache_bytes'] == work.extra['cache_bytes']
    assert (work.steps, work.extra['tokens']) == (3, 2)


@pytest.mark.slow
def test_memory_and_compilation_have_every_round_and_the_bytes_of_a_step():
    config = TINY.config(steps_per_dispatch=1, lifting='vmap')
    extra = own_parts.memory_and_compilation(config, compilations=1).extra
    assert len(extra['trace_rounds']) == len(extra['compile_rounds']) == 1
    parameters = 3 * 4 * cost.count(from_json(Config, config).model)['total']  # and two moments
    assert extra['argument_bytes'] > parameters and extra['temporary_bytes'] > 0
    assert extra['step_peak_bytes'] > extra['argument_bytes']


def test_batches_are_read_one_dispatch_a_call():
    config = dataclasses.replace(TINY, vocabulary=256).config(steps_per_dispatch=2, seeds=2)
    config['data'] = {'name': 'stdlib'}
    work = own_parts.batches(config)
    work.run(3)
    assert (work.steps, work.extra['tokens']) == (2, 2 * TINY.tokens)
