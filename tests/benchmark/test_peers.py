"""The peers compute what qkattn computes: loss, gradients and a step, on the same parameters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qkattn.benchmark.peers import jax_gpt
from qkattn.benchmark.shape import TINY
from qkattn.config import Config, from_json
from qkattn.model import cost
from qkattn.train import step

SHAPE = dataclasses.replace(TINY, layers=2, context=12)
CONFIG = from_json(Config, SHAPE.config())


@pytest.fixture(scope='module')
def own():
    """Parameters and gradients of qkattn as `jax_gpt` names them, its loss, tokens [B, T + 1]."""
    tokens = np.random.default_rng(0).integers(SHAPE.vocabulary, size=(SHAPE.batch, 13))
    batch = {'tokens_BT': tokens[:, :-1], 'targets_BT': tokens[:, 1:]}
    batch['loss_weights_BT'] = np.ones(batch['tokens_BT'].shape, np.float32)
    params = step.init_trial(CONFIG, 0)['params']
    # Gains differ from 1, so that one that is left out, or is another's, shows.
    names, definition = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(names))
    params = definition.unflatten(
        [a + 0.1 * jax.random.normal(key, a.shape) for a, key in zip(names, keys, strict=True)]
    )
    loss, grads = step.gradients(CONFIG, params, jax.tree.map(lambda a: a[None], batch))
    return renamed(params), renamed(grads), loss, tokens, params


def renamed(params):
    blocks = params['blocks']
    names = {
        'q': blocks['attention']['score']['w_q_DNH'],
        'k': blocks['attention']['score']['w_k_DKH'],
        'v': blocks['attention']['value']['w_v_DKH'],
        'o': blocks['attention']['value']['w_o_NHD'],
        'in': blocks['mlp']['w_in_DF'],
        'out': blocks['mlp']['w_out_FD'],
        'attention_gain': blocks['attention_norm']['g_D'],
        'mlp_gain': blocks['mlp_norm']['g_D'],
    }
    return {
        'embedding': params['w_embedding_VD'],
        'position': params['w_position_TD'],
        'layers': [{n: a[layer] for n, a in names.items()} for layer in range(SHAPE.layers)],
        'gain': params['final_norm']['g_D'],
    }


def agree(found, expected):
    largest = max(np.abs(e).max() for e in jax.tree.leaves(expected))
    jax.tree.map(
        lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-5 * largest),
        found,
        expected,
    )


@pytest.mark.parametrize('attention', jax_gpt.ATTENTIONS)
def test_functional_jax_is_the_same_function(own, attention):
    params, grads, loss, tokens, _ = own
    fresh = jax_gpt.init(SHAPE, jax.random.key(0))
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, params)
    found = jax.value_and_grad(functools.partial(jax_gpt.loss, SHAPE, attention))(params, tokens)
    agree(found, (loss, grads))


@pytest.mark.slow
def test_functional_jax_takes_the_same_step(own):
    params, grads, _, _, own_params = own
    updates, _ = jax_gpt.optimizer().update(grads, jax_gpt.optimizer().init(params), params)
    trial = {'params': own_params, 'opt_state': None, 'alive': True}
    trial['opt_state'] = step.init_trial(CONFIG, 0)['opt_state']
    tokens = own[3]
    batch = {'tokens_BT': tokens[:, :-1], 'targets_BT': tokens[:, 1:]}
    batch['loss_weights_BT'] = np.ones(batch['tokens_BT'].shape, np.float32)
    hyper = {'seed': 0, 'learning_rate': 1e-3, 'weight_decay': 0.1}
    # Behind the warm-up, at the beginning of the decay, the learning rate is the peak.
    after, _ = step.train_trial(
        CONFIG,
        CONFIG.optimizer.warmup_steps,
        trial,
        hyper,
        jax.tree.map(lambda a: a[None], batch),
    )
    agree(optax.apply_updates(params, updates), renamed(after['params']))


def test_torch_is_the_same_function(own):
    torch = pytest.importorskip('torch', exc_type=ImportError)
    from qkattn.benchmark.peers import torch_gpt

    params, grads, loss, tokens, _ = own
    model = torch_gpt.GPT(SHAPE)
    assert sum(p.numel() for p in model.parameters()) == cost.count(CONFIG.model)['total']
    model.load_state_dict({n: torch.tensor(np.asarray(a)) for n, a in of_torch(params).items()})
    found = model(torch.tensor(tokens))
    found.backward()
    assert found.item() == pytest.approx(float(loss), rel=1e-5)
    agree({n: p.grad.numpy() for n, p in model.named_parameters()}, of_torch(grads))


def of_torch(params):
    """The arrays as torch_gpt names and transposes them: a linear layer has [out, in]."""
    D = SHAPE.width
    arrays = {
        'embedding.weight': params['embedding'],
        'position.weight': params['position'],
        'norm.weight': params['gain'],
    }
    for number, layer in enumerate(params['layers']):
        qkv = [layer[name].reshape(D, D).T for name in 'qkv']
        own = {
            'attention_norm': layer['attention_gain'],
            'qkv': np.concatenate(qkv),
            'out': layer['o'].reshape(D, D).T,
            'mlp_norm': layer['mlp_gain'],
            'mlp_in': layer['in'].T,
            'mlp_out': layer['out'].T,
        }
        arrays |= {f'blocks.{number}.{name}.weight': array for name, array in own.items()}
    return {name: np.asarray(array) for name, array in arrays.items()}
