"""Losses of interpolated n-grams, which a trained language model has to beat.

The context of a target is a chain of tokens c_1, c_2, ...: for a language model the token before
the target, the one before that, and so on; for a masked one its visible neighbours, the nearest
first. Order k knows the first k - 1 of them, h, with the smoothing of Witten and Bell (1991, 'The
zero-frequency problem'):

    P_k(w | h) = (count(h, w) + types(h) P_{k-1}(w | h')) / (count(h) + types(h))

where types(h) is the number of different tokens that follow h, h' is h without its last token, and
P_0 = 1 / V. Where h was never seen, or a token of it is missing, P_k is P_{k-1}.

The visible neighbours of a masked target stand at offsets that depend on what is hidden around it,
so counts are those of the whole text at the same offsets. The offsets -1, +1, -2, +2, ... without
the hidden ones are a chain, and chains that begin alike share their counts: they form a tree, whose
nodes are visited from the root.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# The share of masked targets from which a chain of offsets is counted.
RARE = 0.0005
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
            at_N = at_N[known_N]
            counted = counted[known_N]
            at_N = at_N * vocab_size + contexts_KN[order - 1, counted]
            chains, at_N = np.unique(at_N, return_inverse=True)
            for number, (contexts_KM, _) in enumerate(evaluated):
                place_M = places[number]
                added_M = contexts_KM[order - 1]
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
            types_M = types_C[place_M]
            lower_M = probabilities[number]
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


def masked_losses(
    rows_RT: np.ndarray,
    evaluated: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
    order: int,
    vocab_size: int,
    rare: float = RARE,
) -> list[np.ndarray]:
    """Nats of masked targets by the 0 to `order` nearest visible neighbours of each.

    Counts the text rows_RT, ids in [0, vocab_size). A set in `evaluated` has shown_RT, ids or
    MISSING where the text is hidden, the text itself and hidden_RT, true at its M targets. Returns
    nats_OM, O = order + 1, for each set. A target whose chain of offsets, up to some depth, is that
    of fewer than `rare` of all targets has the probability of the depth before.
    """
    sets = [_Targets.read(*rows, order) for rows in evaluated]
    targets = _Targets(*(np.concatenate(parts, axis=-1) for parts in zip(*sets, strict=True)))
    reach = int(np.abs(targets.offsets_KM).max(initial=0))
    # Beyond a row there is nothing to see.
    padded_RT = np.pad(rows_RT, ((0, 0), (reach, reach)), constant_values=MISSING)
    number = len(targets.ids_M)
    nats_OM = np.empty((order + 1, number))
    root = _Node(
        depth=0,
        counted_N=np.flatnonzero(padded_RT != MISSING),
        context_N=np.zeros(rows_RT.size, np.int64),
        targets=np.arange(number),
        context_M=np.zeros(number, np.int64),
        lower_M=np.full(number, 1 / vocab_size),
    )
    nodes = [root]
    while nodes:
        node = nodes.pop()
        probability_M = node.probability(padded_RT.ravel(), targets, vocab_size)
        nats_OM[node.depth :, node.targets] = -np.log(probability_M)
        if node.depth < order:
            children = node.children(padded_RT.ravel(), targets, vocab_size, probability_M)
            nodes += [child for child in children if len(child.targets) >= rare * number]
    ends = np.cumsum([len(part.ids_M) for part in sets])
    return np.split(nats_OM, ends[:-1], axis=1)


class _Targets(NamedTuple):
    """M masked targets, with the offsets and tokens of their K nearest visible neighbours."""

    offsets_KM: np.ndarray  # 0 where the row has no more visible neighbours
    tokens_KM: np.ndarray
    ids_M: np.ndarray

    @classmethod
    def read(
        cls, shown_RT: np.ndarray, rows_RT: np.ndarray, hidden_RT: np.ndarray, order: int
    ) -> '_Targets':
        row_M, column_M = np.nonzero(hidden_RT)
        length = rows_RT.shape[1]
        number = len(row_M)
        offsets_KM = np.zeros((order, number), np.int64)
        tokens_KM = np.full((order, number), MISSING)
        visible_M = np.zeros(number, np.int64)  # neighbours found so far
        for distance in range(1, length):
            for offset in (-distance, distance):
                place_M = column_M + offset
                token_M = shown_RT[row_M, np.clip(place_M, 0, length - 1)]
                is_inside = (place_M >= 0) & (place_M < length)
                (added,) = np.nonzero(is_inside & (token_M != MISSING) & (visible_M < order))
                offsets_KM[visible_M[added], added] = offset
                tokens_KM[visible_M[added], added] = token_M[added]
                visible_M[added] += 1
            if np.all(visible_M == order):
                break
        return cls(offsets_KM, tokens_KM, rows_RT[row_M, column_M])


class _Node(NamedTuple):
    """The targets whose chains begin with the same offsets, and the text in their contexts.

    A context is the tokens at these offsets; those that a target has are numbered from 0.
    """

    depth: int  # the number of offsets
    counted_N: np.ndarray  # the positions in the text with the context of some target
    context_N: np.ndarray  # its number
    targets: np.ndarray  # the M targets, among all
    context_M: np.ndarray  # the number of its context
    lower_M: np.ndarray  # its probability by the offsets but the last

    def probability(self, text: np.ndarray, targets: _Targets, vocab_size: int) -> np.ndarray:
        """Of each target, by the equation of this module."""
        contexts = int(self.context_M.max(initial=0)) + 1
        pairs, counts = np.unique(
            self.context_N * vocab_size + text[self.counted_N], return_counts=True
        )
        totals_C = np.bincount(self.context_N, minlength=contexts)
        types_C = np.bincount(pairs // vocab_size, minlength=contexts)
        place_M = _find(pairs, self.context_M * vocab_size + targets.ids_M[self.targets])
        count_M = np.append(counts, 0)[place_M]
        total_M = totals_C[self.context_M]
        types_M = np.maximum(types_C[self.context_M], 1)  # never seen: the lower order
        return (count_M + types_M * self.lower_M) / (total_M + types_M)

    def children(
        self, text: np.ndarray, targets: _Targets, vocab_size: int, lower_M: np.ndarray
    ) -> Iterator['_Node']:
        """The nodes one offset deeper."""
        offset_M = targets.offsets_KM[self.depth, self.targets]
        for offset in np.unique(offset_M[offset_M != 0]):
            (chosen,) = np.nonzero(offset_M == offset)
            token_M = targets.tokens_KM[self.depth, self.targets[chosen]]
            longer_M = self.context_M[chosen] * vocab_size + token_M
            contexts, context_M = np.unique(longer_M, return_inverse=True)
            token_N = text[self.counted_N + offset]
            context_N = _find(contexts, self.context_N * vocab_size + token_N)
            (kept,) = np.nonzero((token_N != MISSING) & (context_N != MISSING))
            yield _Node(
                depth=self.depth + 1,
                counted_N=self.counted_N[kept],
                context_N=context_N[kept],
                targets=self.targets[chosen],
                context_M=context_M,
                lower_M=lower_M[chosen],
            )
