"""Losses of targets, with the logits of all positions at once or of a few at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

# (logits_BTV, targets_BT) -> values of every target, [B, T] each.
OnTargets = Callable[[jax.Array, jax.Array], dict[str, jax.Array]]


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """-log softmax(logits)[target], nats_BT.

    The target's logit is selected by a mask: selected by index, as in optax, its gradient is a
    scatter, for which XLA copies all logits to every device where V is split (fsdp).
    """
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1])
    target_logits_BT = jnp.where(is_target_BTV, logits_BTV, 0).sum(-1)
    return jax.nn.logsumexp(logits_BTV, -1) - target_logits_BT


def smoothed(logits_BTV: jax.Array, targets_BT: jax.Array, epsilon: float) -> jax.Array:
    """(1 - epsilon) times the cross-entropy plus epsilon times its mean over V tokens, nats_BT."""
    nats_BT = cross_entropy(logits_BTV, targets_BT)
    if not epsilon:
        return nats_BT
    uniform_BT = jax.nn.logsumexp(logits_BTV, -1) - logits_BTV.mean(-1)
    return (1 - epsilon) * nats_BT + epsilon * uniform_BT


def on_targets(
    logits: Callable[[jax.Array], jax.Array],
    x_BTD: jax.Array,
    targets_BT: jax.Array,
    measure: OnTargets,
    chunk: int | None,
) -> dict[str, jax.Array]:
    """`measure(logits(x_BTD), targets_BT)`, with the logits of `chunk` positions at a time.

    The backward pass computes the logits of a chunk again, so that B * chunk * V of them are held
    at any time instead of B * T * V. None is all positions at once.
    """

    def measured(x_BCD: jax.Array, targets_BC: jax.Array) -> dict[str, jax.Array]:
        return measure(logits(x_BCD), targets_BC)

    B, T = targets_BT.shape
    if chunk is None or chunk >= T:
        return measured(x_BTD, targets_BT)
    chunks = -(-T // chunk)

    def cut(a_BT: jax.Array) -> jax.Array:
        """[chunks, B, chunk, ...]; the last chunk is padded."""
        padding = [(0, 0), (0, chunks * chunk - T)] + [(0, 0)] * (a_BT.ndim - 2)
        whole = jnp.pad(a_BT, padding)
        return jnp.moveaxis(whole.reshape(B, chunks, chunk, *a_BT.shape[2:]), 1, 0)

    one = jax.checkpoint(lambda inputs: measured(*inputs), prevent_cse=False)
    found = jax.lax.map(one, (cut(x_BTD), cut(targets_BT)))
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(B, -1)[:, :T], found)
