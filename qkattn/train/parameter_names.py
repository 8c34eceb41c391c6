"""What a parameter's name says about its training."""

import jax


def decayed(params: dict) -> dict:
    """True for matrices and embeddings (w_...) that train, False for biases, gains and frozen."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key.startswith('w_') and not is_frozen(path), params
    )


def is_frozen(path: tuple) -> bool:
    """Whether a parameter never trains (w_frozen_...): its gradient is 0 and it does not decay."""
    return path[-1].key.startswith('w_frozen_')
