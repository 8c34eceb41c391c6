"""Losses of targets with the logits of a few positions at a time."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.config import MeshConfig
from qkattn.train import evaluation, program, sharding, step
from tests.lanes import only

B, T, V = 4, 16, 8192


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    return {
        'tokens_BT': rng.integers(0, V, (B, T)).astype(np.int32),
        'targets_BT': rng.integers(0, V, (B, T)).astype(np.int32),
        'loss_weights_BT': (rng.random((B, T)) > 0.2).astype(np.float32),
    }


@pytest.fixture
def large(tiny):
    """A model whose logits are most of what it computes."""

    def make(chunk, **train):
        model = {'d_model': 8, 'num_layers': 1, 'vocab_size': V}
        return tiny(model=model, train={'logits_chunk': chunk} | train)

    return make


def params_of(config):
    return step.init_trial(config, jnp.uint32(0))['params']


@pytest.mark.parametrize('chunk', only([5], [1, 5, 8]))
def test_chunks_change_no_loss_no_gradient_and_no_evaluation(large, chunk):
    found = []
    for config in (large(None, label_smoothing=0.1), large(chunk, label_smoothing=0.1)):
        loss = functools.partial(step.loss_sum, config)
        found.append(
            jax.jit(lambda p, c=config, f=loss: (jax.value_and_grad(f)(p, batch()), sums(c, p)))(
                params_of(config)
            )
        )
    for want, got in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def sums(config, params):
    return evaluation.measure(config, params, batch())


def test_memory_of_training_and_evaluation_is_that_of_a_chunk(large):
    def temporary(chunk, compute):
        config = large(chunk)
        params = jax.eval_shape(lambda: params_of(config))
        compiled = jax.jit(functools.partial(compute, config)).lower(params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def gradient(config, params):
        return jax.grad(functools.partial(step.loss_sum, config))(params, batch())

    logits = 4 * B * T * V
    for compute in (gradient, sums):
        assert temporary(None, compute) > logits
        # A chunk of one position has a sixteenth of the logits, and their gradient.
        assert temporary(1, compute) < logits / 2


def test_no_device_holds_the_whole_vocabulary(large):
    """The embedding splits V over fsdp and tensor, logits over tensor, and rows over fsdp."""
    config = large(None, steps_per_dispatch=1, accumulation=1)
    config = dataclasses.replace(config, mesh=MeshConfig(fsdp=2, tensor=2))
    mesh = sharding.make_mesh(config.mesh)
    inputs = program.abstract_inputs(config, mesh)
    shardings = jax.tree.map(lambda a: a.sharding, inputs[0])
    steps = jax.jit(step.train_steps(config, 'vmap', mesh), out_shardings=(shardings, None))
    text = steps.lower(*inputs).compile().as_text()
    sizes = {
        int(size) for shape in re.findall(r'f32\[([\d,]+)\]', text) for size in shape.split(',')
    }
    assert V not in sizes and {V // 2, V // 4} < sizes
    rows = config.train.batch_size // 2
    assert f'f32[2,{rows},{T},{V // 2}]' in text and f'{2 * rows},{T},{V // 2}]' not in text
