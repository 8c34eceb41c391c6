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

Contexts of one order are numbered from 0 to C - 1. The pair of context c and token w is the integer
c V + w, which also names the context of the next order that w makes of c.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# The share of masked targets from which a chain of offsets is counted.
RARE = 0.0005
# In the place of a context token: it lies beyond the row, or is hidden. In the place of a context's
# number: it was never seen.
MISSING = -1


class _Counts(NamedTuple):
    """The counts of one order: how often each token follows, or stands in, each of C contexts."""

    pairs_P: np.ndarray  # the pairs of a context and a token that occur, ascending
    count_P: np.ndarray  # count(h, w) of each
    total_C: np.ndarray  # count(h) of each context
    types_C: np.ndarray  # types(h) of each context

    @classmethod
    def from_targets(
        cls, context_N: np.ndarray, target_N: np.ndarray, num_contexts: int, vocab_size: int
    ) -> '_Counts':
        """Counts N targets, each after the context of this number."""
        pairs_P, count_P = np.unique(context_N * vocab_size + target_N, return_counts=True)
        total_C = np.bincount(context_N, minlength=num_contexts)
        types_C = np.bincount(pairs_P // vocab_size, minlength=num_contexts)
        return cls(pairs_P, count_P, total_C, types_C)

    def probability(
        self, context_M: np.ndarray, target_M: np.ndarray, lower_M: np.ndarray, vocab_size: int
    ) -> np.ndarray:
        """P_k of M targets w after contexts h of these numbers; `lower_M` is their P_{k-1}.

            P_k = (count(h, w) + types(h) P_{k-1}) / (count(h) + types(h))

        Where the context is MISSING, or no token follows it, the counts are taken as 0 and types(h)
        as 1, which gives P_{k-1}.
        """
        index_M = _find(self.pairs_P, context_M * vocab_size + target_M)
        # The appended values are those that MISSING, which is -1, selects.
        count_M = np.append(self.count_P, 0)[index_M]
        total_M = np.append(self.total_C, 0)[context_M]
        types_M = np.maximum(np.append(self.types_C, 1)[context_M], 1)
        return (count_M + types_M * lower_M) / (total_M + types_M)


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
    # The sets share their counts, so they are evaluated as one.
    contexts_KM = np.concatenate([contexts for contexts, _ in evaluated], axis=1)
    targets_M = np.concatenate([targets for _, targets in evaluated])
    probability_M = np.full(len(targets_M), 1 / vocab_size)  # P_0
    # The numbers of the contexts of evaluated and of counted targets: order 1 has the empty one.
    context_M = np.zeros(len(targets_M), np.int64)
    context_N = np.zeros(len(targets_N), np.int64)
    num_contexts = 1
    # The counted targets whose context has no missing token: N shrinks from order to order.
    counted_N = np.arange(len(targets_N))
    nats = []
    for order in range(1, len(contexts_KN) + 2):
        if order > 1:
            # Each context gets one more token, the one at distance order - 1.
            added_N = contexts_KN[order - 2, counted_N]
            is_known_N = added_N != MISSING
            counted_N = counted_N[is_known_N]
            longer_N = context_N[is_known_N] * vocab_size + added_N[is_known_N]
            longer_C, context_N = np.unique(longer_N, return_inverse=True)
            num_contexts = len(longer_C)
            context_M = _extended(longer_C, context_M, contexts_KM[order - 2], vocab_size)
        counts = _Counts.from_targets(context_N, targets_N[counted_N], num_contexts, vocab_size)
        probability_M = counts.probability(context_M, targets_M, probability_M, vocab_size)
        nats.append(-np.log(probability_M))
    ends = np.cumsum([len(targets) for _, targets in evaluated])
    return np.split(np.stack(nats), ends[:-1], axis=1)


def _extended(
    longer_C: np.ndarray, context_M: np.ndarray, added_M: np.ndarray, vocab_size: int
) -> np.ndarray:
    """The numbers of the contexts that `added_M` makes of the contexts of the order before.

    `longer_C` has the pairs that make the contexts of this order. MISSING where the context or the
    token is, and where no counted target has the longer context.
    """
    number_M = _find(longer_C, context_M * vocab_size + added_M)
    is_complete_M = (context_M != MISSING) & (added_M != MISSING)
    return np.where(is_complete_M, number_M, MISSING)


def _find(ascending: np.ndarray, wanted_M: np.ndarray) -> np.ndarray:
    """The indices of values in an ascending array; MISSING where it does not have the value."""
    index_M = np.searchsorted(ascending, wanted_M)
    # The end of the array, where larger values would be, has an index of its own.
    is_there_M = np.append(ascending, MISSING)[index_M] == wanted_M
    return np.where(is_there_M, index_M, MISSING)


def preceding(rows_RL: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Contexts and targets of every token of a row but the first.

    Returns contexts_KN, the `number` tokens (1 or more) before a target, the nearest first, and
    targets_N, row by row; N = R (L - 1).
    """
    length = rows_RL.shape[1]
    padded_RL = np.pad(rows_RL, ((0, 0), (number, 0)), constant_values=MISSING)
    chain = []
    for distance in range(1, number + 1):
        # Column t of the rows is column t + number of the padded ones; targets are those from 1 on.
        first = number + 1 - distance
        chain.append(padded_RL[:, first : first + length - 1])
    contexts_KRT = np.stack(chain)
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
    targets_of_set = [_Targets.read(*rows, order) for rows in evaluated]
    # The sets share their counts, so they are evaluated as one.
    targets = _Targets(
        offsets_KM=np.concatenate([part.offsets_KM for part in targets_of_set], axis=1),
        tokens_KM=np.concatenate([part.tokens_KM for part in targets_of_set], axis=1),
        ids_M=np.concatenate([part.ids_M for part in targets_of_set]),
    )
    # A row is padded as far as offsets reach: beyond it there is nothing to see.
    reach = int(np.abs(targets.offsets_KM).max(initial=0))
    text = np.pad(rows_RT, ((0, 0), (reach, reach)), constant_values=MISSING).ravel()
    num_targets = len(targets.ids_M)
    nats_OM = np.empty((order + 1, num_targets))
    root = _Node(
        depth=0,
        position_N=np.flatnonzero(text != MISSING),
        context_N=np.zeros(rows_RT.size, np.int64),
        target_M=np.arange(num_targets),
        context_M=np.zeros(num_targets, np.int64),
        lower_M=np.full(num_targets, 1 / vocab_size),
    )
    nodes = [root]
    while nodes:
        node = nodes.pop()
        probability_M = node.probability(text, targets, vocab_size)
        # Also for the depths below, which the children replace.
        nats_OM[node.depth :, node.target_M] = -np.log(probability_M)
        if node.depth == order:
            continue
        for child in node.children(text, targets, vocab_size, probability_M):
            if len(child.target_M) >= rare * num_targets:
                nodes.append(child)
    ends = np.cumsum([len(part.ids_M) for part in targets_of_set])
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
        """The M masked tokens of R rows, each with its `order` nearest visible neighbours or fewer.

        rows_RT are the ids of the text; hidden_RT is true at the M targets; shown_RT has the ids
        that are visible, and MISSING where the text is hidden.
        """
        row_M, column_M = np.nonzero(hidden_RT)
        length = rows_RT.shape[1]
        num_targets = len(row_M)
        offsets_KM = np.zeros((order, num_targets), np.int64)
        tokens_KM = np.full((order, num_targets), MISSING)
        num_visible_M = np.zeros(num_targets, np.int64)  # neighbours so far
        # -1, +1, -2, +2, ...: the nearest first.
        offsets = [sign * distance for distance in range(1, length) for sign in (-1, 1)]
        for offset in offsets:
            neighbour_M = column_M + offset
            is_inside_M = (neighbour_M >= 0) & (neighbour_M < length)
            token_M = shown_RT[row_M, np.clip(neighbour_M, 0, length - 1)]
            is_added_M = is_inside_M & (token_M != MISSING) & (num_visible_M < order)
            added = np.flatnonzero(is_added_M)  # of the targets that see this neighbour
            offsets_KM[num_visible_M[added], added] = offset
            tokens_KM[num_visible_M[added], added] = token_M[added]
            num_visible_M[added] += 1
            if np.all(num_visible_M == order):
                break
        return cls(offsets_KM, tokens_KM, rows_RT[row_M, column_M])


class _Node(NamedTuple):
    """The targets whose chains begin with the same offsets, and the text in their contexts.

    A context is the tokens at these offsets; those that a target has are numbered from 0.
    """

    depth: int  # the number of offsets
    position_N: np.ndarray  # the N positions in the text with the context of some target
    context_N: np.ndarray  # the number of the context at each position
    target_M: np.ndarray  # the indices of the M targets among all
    context_M: np.ndarray  # the number of each target's context
    lower_M: np.ndarray  # the probability of each target by the offsets but the last

    def probability(self, text: np.ndarray, targets: _Targets, vocab_size: int) -> np.ndarray:
        """The probability of each of the M targets, by the equation of this module."""
        num_contexts = int(self.context_M.max(initial=0)) + 1
        counts = _Counts.from_targets(
            self.context_N, text[self.position_N], num_contexts, vocab_size
        )
        ids_M = targets.ids_M[self.target_M]
        return counts.probability(self.context_M, ids_M, self.lower_M, vocab_size)

    def children(
        self, text: np.ndarray, targets: _Targets, vocab_size: int, probability_M: np.ndarray
    ) -> Iterator['_Node']:
        """The nodes one offset deeper; `probability_M` is that of this node."""
        offset_M = targets.offsets_KM[self.depth, self.target_M]
        for offset in np.unique(offset_M[offset_M != 0]):
            chosen = np.flatnonzero(offset_M == offset)  # of the M targets
            added_M = targets.tokens_KM[self.depth, self.target_M[chosen]]
            longer_M = self.context_M[chosen] * vocab_size + added_M
            longer_C, context_M = np.unique(longer_M, return_inverse=True)
            added_N = text[self.position_N + offset]
            context_N = _extended(longer_C, self.context_N, added_N, vocab_size)
            is_context_N = context_N != MISSING
            yield _Node(
                depth=self.depth + 1,
                position_N=self.position_N[is_context_N],
                context_N=context_N[is_context_N],
                target_M=self.target_M[chosen],
                context_M=context_M,
                lower_M=probability_M[chosen],
            )
