"""What a stack of trials becomes in the program of a GPU, which is lowered without one."""

import collections
import re

import jax
import pytest

from qkattn.attention.kernels.call import Target
from qkattn.config import Config, ModelConfig, TrainConfig, TrialsConfig
from qkattn.train import program, sharding
from qkattn.train.step import train_steps
from tests.lanes import only

SIZES = {'num_layers': 2, 'd_model': 32, 'num_heads': 2, 'context': 16, 'vocab_size': 32}


def lowered(trials, lifting, **model):
    """Counts of loops, and of products with and without a batch, in a step for CUDA."""
    config = Config(
        model=ModelConfig(compute_dtype='bfloat16', **SIZES, **model),
        train=TrainConfig(batch_size=2, steps_per_dispatch=2, lifting=lifting),
        trials=TrialsConfig(seeds=tuple(range(trials)), learning_rates=(1e-3,)),
    )
    mesh = sharding.make_mesh(config.mesh)
    steps = jax.jit(train_steps(config, lifting, mesh))
    traced = steps.trace(*program.abstract_inputs(config, mesh))
    text = traced.lower(lowering_platforms=('cuda',)).as_text()
    found = collections.Counter(re.findall(r'stablehlo\.while|@__cudnn\S+?(?=\()', text))
    for line in re.findall('.*stablehlo.dot_general.*', text):
        found['batched' if 'batching_dims = ' in line else 'product'] += 1
    return found


@pytest.mark.parametrize('kernel', only(['einsum'], ['einsum', 'blockwise']))
def test_side_by_side_all_products_are_batched_and_no_loop_is_added(kernel):
    one, stack = lowered(1, 'vmap', kernel=kernel), lowered(8, 'vmap', kernel=kernel)
    assert one['product'] > 20 and stack['product'] == 0
    assert stack['batched'] == one['product'] + one['batched']
    assert stack['stablehlo.while'] == one['stablehlo.while']


def test_one_after_another_is_one_loop_around_the_products_of_one():
    one, stack = lowered(1, 'map'), lowered(8, 'map')
    assert stack.pop('stablehlo.while') == one.pop('stablehlo.while') + 1
    assert stack == one


def test_cudnn_computes_the_attention_of_all_trials_at_once(monkeypatch, cudnn):
    monkeypatch.setattr(Target, 'of', classmethod(lambda cls, mesh: cls('gpu', mesh, 9.0)))
    one, stack = lowered(1, 'vmap'), lowered(8, 'vmap')
    for name in ('@__cudnn$fmhaSoftmax', '@__cudnn$fmhaSoftmaxBackward'):
        assert stack[name] == one[name] > 0
    assert stack['product'] == 0 and stack['batched'] == one['product']
