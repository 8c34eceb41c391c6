"""The parts of qkattn's training step as programs of their own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from qkattn.benchmark.work import Work
from qkattn.config import Config, from_json
from qkattn.model import Decoder, with_params
from qkattn.model.blocks import Block
from qkattn.model.stack import scan_layers
from qkattn.train import targets
from qkattn.train.optimizer import optimizer
from qkattn.train.step import init_trial

Function = Callable[[dict, jax.Array, jax.Array], jax.Array]


def attention(block: Block, x_BTD: jax.Array) -> jax.Array:
    return block.add(block.attention, block.attention_norm, x_BTD, None)


def mlp(block: Block, x_BTD: jax.Array) -> jax.Array:
    return block.add(block.mlp, block.mlp_norm, x_BTD, None)


# The parts that are branches of every layer, each with its norm and its sum.
BRANCHES = {'attention': attention, 'mlp': mlp}
PARTS = (*BRANCHES, 'logits', 'optimizer')


def part(config: dict[str, Any], name: str) -> Work:
    """One of PARTS, forward and backward.

    'attention' and 'mlp' are that branch of all layers; 'logits' is the embedding, the final norm,
    the output matrix and the loss; 'optimizer' clips and takes an AdamW step.

    Args:
      config: JSON of a run of one decoder.
    """
    of_run = from_json(Config, config)
    count = of_run.train.steps_per_dispatch
    take = _optimizer_step(of_run) if name == 'optimizer' else _gradient_step(of_run, name)

    def steps(carry: tuple) -> tuple:
        return jax.lax.scan(lambda c, _: (take(c), None), carry, length=count)[0]

    params = init_trial(of_run, jnp.uint32(0))
    B, T, D = of_run.train.batch_size, of_run.model.context, of_run.model.d_model
    x_BTD = jax.random.normal(jax.random.key(1), (B, T, D)).astype(of_run.model.compute_dtype)
    carry = (params['params'], params['opt_state'], x_BTD)
    compiled = jax.jit(steps, donate_argnums=0).lower(carry).compile()

    def run(calls: int) -> None:
        nonlocal carry
        for _ in range(calls):
            carry = compiled(carry)
        jax.block_until_ready(carry)

    return Work(run, count)


def _gradient_step(config: Config, name: str) -> Callable[[tuple], tuple]:
    """Gradients of a part, added to what they belong to so that no call can be left out."""
    shape = (config.train.batch_size, config.model.context)
    tokens_BT = jax.random.randint(jax.random.key(2), shape, 0, config.model.vocab_size)

    def model_of(params: dict) -> Decoder:
        dtype = jnp.dtype(config.model.compute_dtype)
        return with_params(config.model, jax.tree.map(lambda p: p.astype(dtype), params))

    def branch(params: dict, x_BTD: jax.Array) -> jax.Array:
        one = BRANCHES[name]
        blocks = model_of(params).blocks
        out_BTD = scan_layers(
            lambda x_BTD, block, *_: one(block, x_BTD), x_BTD, blocks, None, config=config.model
        )
        return jnp.vdot(out_BTD, out_BTD).astype(jnp.float32)

    def logits(params: dict, x_BTD: jax.Array) -> jax.Array:
        model = model_of(params)
        normed_BTD = model.normed(model.embed(tokens_BT) + x_BTD)
        found = targets.on_targets(
            model.logits,
            normed_BTD,
            tokens_BT,
            lambda logits_BTV, t_BT: {'nats_BT': targets.cross_entropy(logits_BTV, t_BT)},
            config.train.logits_chunk,
        )
        return found['nats_BT'].mean()

    def take(carry: tuple) -> tuple:
        params, opt_state, x_BTD = carry
        grads = jax.grad(branch if name in BRANCHES else logits, argnums=(0, 1))(params, x_BTD)
        params, x_BTD = jax.tree.map(
            lambda a, g: a - 1e-30 * g.astype(a.dtype), (params, x_BTD), grads
        )
        return params, opt_state, x_BTD

    return take


def _optimizer_step(config: Config) -> Callable[[tuple], tuple]:
    def take(carry: tuple) -> tuple:
        params, opt_state, x_BTD = carry
        grads = jax.tree.map(lambda p: 1e-3 * p, params)
        transform = optimizer(config.optimizer, jnp.float32(1e-3), jnp.float32(0.1))
        updates, opt_state = transform.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, x_BTD

    return take
