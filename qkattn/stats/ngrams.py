"""Losses of interpolated n-grams, which a trained language model has to beat.

The context of a target is a chain of tokens c_1, c_2, ...: for a language model the token before
the target, the one before that, and so on. Order k knows the first k - 1 of them, h, with the
smoothing of Witten and Bell (1991, 'The zero-frequency problem'):

    P_k(w | h) = (count(h, w) + types(h) P_{k-1}(w | h')) / (count(h) + types(h))

where types(h) is the number of different tokens that follow h, h' is h without its last token, and
P_0 = 1 / V. Where h was never seen, or a token of it is missing, P_k is P_{k-1}.
"""

from collections.abc import Sequence

import numpy as np

# In the place of a context token: it lies beyond the row, or is hidden.
MISSING = -1


def losses(
    contexts_KN: np.ndarray,
    targets_N: np.ndarray,
    evaluated: Sequence[tuple[np.ndarray, np.ndarray]],
    vocab_size: int,
) -> list[np.ndarray]:
    """Nats of every target by the n-grams of the orders 1 to K + 1.

    Counts contexts_KN and targets_N: ids in [0, vocab_size), contexts also MISSING. Returns
    nats_OM, O = K + 1, for the contexts_KM and targets_M of each set in `evaluated`.
    """
    at_N = np.zeros(len(targets_N), np.int64)
    counted = np.arange(len(targets_N))
    # The number of each evaluated target's context among those counted, or MISSING.
    places = [np.zeros(len(targets_M), np.int64) for _, targets_M in evaluated]
    probabilities = [np.full(len(targets_M), 1 / vocab_size) for _, targets_M in evaluated]
    nats: list[list[np.ndarray]] = [[] for _ in evaluated]
    for order in range(len(contexts_KN) + 1):
        if order:
            known_N = contexts_KN[order - 1, counted] != MISSING
            at_N, counted = at_N[known_N], counted[known_N]
            at_N = at_N * vocab_size + contexts_KN[order - 1, counted]
            chains, at_N = np.unique(at_N, return_inverse=True)
            for number, (contexts_KM, _) in enumerate(evaluated):
                place_M, added_M = places[number], contexts_KM[order - 1]
                there_M = (place_M != MISSING) & (added_M != MISSING)
                found_M = _find(chains, place_M * vocab_size + added_M)
                places[number] = np.where(there_M, found_M, MISSING)
        pairs, counts = np.unique(at_N * vocab_size + targets_N[counted], return_counts=True)
        # One more, which MISSING selects.
        totals_C = np.append(np.bincount(at_N), 0)
        types_C = np.append(np.bincount(pairs // vocab_size), 1)
        counts = np.append(counts, 0)
        for number, (_, targets_M) in enumerate(evaluated):
            place_M = places[number]
            count_M = counts[_find(pairs, place_M * vocab_size + targets_M)]
            types_M, lower_M = types_C[place_M], probabilities[number]
            probabilities[number] = (count_M + types_M * lower_M) / (totals_C[place_M] + types_M)
            nats[number].append(-np.log(probabilities[number]))
    return [np.stack(rows) for rows in nats]


def _find(ascending: np.ndarray, wanted_M: np.ndarray) -> np.ndarray:
    """The places of values in an ascending array, or MISSING."""
    place_M = np.searchsorted(ascending, wanted_M)
    same_M = np.append(ascending, MISSING)[place_M] == wanted_M
    return np.where(same_M, place_M, MISSING)


def preceding(rows_RL: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Contexts and targets of every token of a row but the first.

    Returns contexts_KN, the `number` tokens before a target, the nearest first, and targets_N, row
    by row.
    """
    padded_RL = np.pad(rows_RL, ((0, 0), (number, 0)), constant_values=MISSING)
    length = rows_RL.shape[1]
    chain = [padded_RL[:, number + 1 - k : number + length - k] for k in range(1, number + 1)]
    contexts_KRT = np.stack(chain) if chain else np.empty((0, len(rows_RL), length - 1), int)
    return contexts_KRT.reshape(number, -1), rows_RL[:, 1:].ravel()


def neighbours(rows_RT: np.ndarray) -> np.ndarray:
    """The token to the left of each token and the one to its right, contexts_KN with K = 2."""
    padded_RT = np.pad(rows_RT, ((0, 0), (1, 1)), constant_values=MISSING)
    return np.stack([padded_RT[:, :-2].ravel(), padded_RT[:, 2:].ravel()])
