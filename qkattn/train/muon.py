"""The Muon optimizer, with the matrices that the names of parameters declare."""

import jax
import optax

from qkattn.config import OptimizerConfig
from qkattn.train.parameter_names import decayed, is_frozen

# Root mean square of the updates, that of Adam's (Liu et al. 2025, section 2.2).
UPDATE_RMS = 0.2


def muon(
    config: OptimizerConfig, learning_rate: jax.Array, weight_decay: jax.Array
) -> optax.GradientTransformation:
    """Muon for the matrices of the blocks (Jordan et al. 2024), Adam for all other parameters.

    Both with Nesterov momentum, as in optax. Updates of matrices are scaled to the root mean square
    of Adam's (Liu et al. 2025, 'Muon is scalable for LLM training'), so that learning rates
    compare. Each head is a matrix of its own.
    """
    return optax.chain(
        optax.contrib.muon(
            1.0,
            beta=config.momentum,
            eps=config.epsilon,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            muon_weight_dimension_numbers=matrix_axes,
            consistent_rms=UPDATE_RMS,
        ),
        optax.add_decayed_weights(-weight_decay, mask=decayed),
        optax.scale(learning_rate),
    )


def matrix_axes(params: dict) -> dict:
    """The two matrix axes of every parameter that Muon trains, None for the others.

    They are the matrices of the blocks. Axes of layers (L) and heads (N, K), with at least two
    letters besides, are batches of matrices: w_q_DNH is one [D, H] matrix a layer and head.
    """

    def axes(path: tuple, leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        name = path[-1].key
        letters = name.rpartition('_')[2]
        in_block = any(entry.key == 'blocks' for entry in path)
        if not (in_block and name.startswith('w_') and len(letters) > 1) or is_frozen(path):
            return None
        first = leaf.ndim - len(letters)
        kept = [i for i, letter in enumerate(letters) if letter not in 'NK']
        kept = kept if len(kept) == 2 else list(range(len(letters)))
        *rows, columns = (first + i for i in kept)
        return optax.contrib.MuonDimensionNumbers(tuple(rows), (columns,))

    return jax.tree_util.tree_map_with_path(axes, params)
