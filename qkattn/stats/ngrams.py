"""Losses of interpolated n-grams, which a trained language model has to beat.

The context of a target is a chain of tokens c_1, c_2, .... For a language model, these are the
token before the target, the one before that, and so on. For a masked model, they are the visible
neighbours of the target, nearest first. The n-gram of order k sees the first k - 1 tokens of the
chain, h. Orders are interpolated as in Witten and Bell (1991, 'The zero-frequency problem'):

    P_k(w | h) = (count(h, w) + types(h) P_{k-1}(w | h')) / (count(h) + types(h))

types(h) is the number of different tokens that follow h, h' is h without its last token, and P_0 is
1 / V. If h never occurs in the counted text, or if a token of h is missing, P_k is P_{k-1}.

The offsets at which a masked target has its visible neighbours depend on what is hidden around it.
Its chain of offsets is -1, +1, -2, +2, ... without the hidden ones, and the counts are those of the
whole text at these offsets. Chains that begin alike share counts, so they form a tree, which is
visited from the root.

Contexts of one order are numbered from 0 to C - 1. The pair of context c and token w has the number
c V + w. Extending context c by token w gives a context of the next order with the same number.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# A chain of offsets that fewer than this share of the masked targets have is not counted.
RARE = 0.0005
# Stands for a context token that is hidden or lies beyond the row, and for the number of a context
# that never occurs in the counted text.
MISSING = -1


class _Counts(NamedTuple):
    """The counts of one order: how often each token occurs as the target of each of C contexts."""

    pairs_P: np.ndarray  # the numbers of the pairs of context and token that occur, ascending
    count_P: np.ndarray  # count(h, w) of each pair
    total_C: np.ndarray  # count(h) of each context
    types_C: np.ndarray  # types(h) of each context

    @classmethod
    def from_targets(
        cls, context_N: np.ndarray, target_N: np.ndarray, num_contexts: int, vocab_size: int
    ) -> '_Counts':
        """Counts the tokens target_N, each as the target of the context with number context_N."""
        pairs_P, count_P = np.unique(context_N * vocab_size + target_N, return_counts=True)
        total_C = np.bincount(context_N, minlength=num_contexts)
        # A pair has the number c V + w. Each different pair adds one type to its context c.
        types_C = np.bincount(pairs_P // vocab_size, minlength=num_contexts)
        return cls(pairs_P, count_P, total_C, types_C)

    def probability(
        self, context_M: np.ndarray, target_M: np.ndarray, lower_M: np.ndarray, vocab_size: int
    ) -> np.ndarray:
        """Returns the probability P_k of M targets, each a token w after a context h.

            P_k = (count(h, w) + types(h) P_{k-1}) / (count(h) + types(h))

        `lower_M` is P_{k-1}. If the context is MISSING or has no counts, the counts are taken as 0
        and types(h) as 1, so that P_k is P_{k-1}.
        """
        pair_M = _find(self.pairs_P, context_M * vocab_size + target_M)
        # A pair or context that was not counted has the index MISSING = -1, which selects the last
        # entry of an array. So each array gets an entry for it at its end.
        count_M = np.append(self.count_P, 0)[pair_M]
        total_M = np.append(self.total_C, 0)[context_M]
        types_M = np.append(self.types_C, 1)[context_M]
        types_M = np.maximum(types_M, 1)
        return (count_M + types_M * lower_M) / (total_M + types_M)


def losses(
    contexts_KN: np.ndarray,
    targets_N: np.ndarray,
    evaluated: Sequence[tuple[np.ndarray, np.ndarray]],
    vocab_size: int,
) -> list[np.ndarray]:
    """Counts n-grams of the orders 1 to K + 1 and returns the losses of evaluated targets by them.

    Args:
        contexts_KN: The K nearest context tokens of each of the N counted targets, nearest first;
            ids in [0, vocab_size) or MISSING.
        targets_N: The ids of the counted targets.
        evaluated: The contexts_KM and targets_M of each evaluated set.
        vocab_size: The number of ids.

    Returns:
        nats_OM of each evaluated set, with a row for each of the O = K + 1 orders.
    """
    # The sets share their counts, so they are evaluated as one.
    contexts_KM = np.concatenate([contexts for contexts, _ in evaluated], axis=1)
    targets_M = np.concatenate([targets for _, targets in evaluated])
    probability_M = np.full(len(targets_M), 1 / vocab_size)  # P_0
    # At order 1, all targets have the empty context, which has the number 0.
    context_M = np.zeros(len(targets_M), np.int64)
    context_N = np.zeros(len(targets_N), np.int64)
    num_contexts = 1
    # The indices of the counted targets. Those whose context has a missing token drop out, so N
    # shrinks from order to order.
    counted_N = np.arange(len(targets_N))
    max_order = len(contexts_KN) + 1
    nats = []
    for order in range(1, max_order + 1):
        if order > 1:
            # Extend all contexts by the token at distance order - 1, which is in row order - 2.
            row = order - 2
            added_N = contexts_KN[row, counted_N]
            is_known_N = added_N != MISSING
            counted_N = counted_N[is_known_N]
            # Number the longer contexts of the counted targets. The evaluated targets get the same
            # numbers.
            longer_N = context_N[is_known_N] * vocab_size + added_N[is_known_N]
            longer_C, context_N = np.unique(longer_N, return_inverse=True)
            num_contexts = len(longer_C)
            context_M = _extended(longer_C, context_M, contexts_KM[row], vocab_size)
        counts = _Counts.from_targets(context_N, targets_N[counted_N], num_contexts, vocab_size)
        probability_M = counts.probability(context_M, targets_M, probability_M, vocab_size)
        nats.append(-np.log(probability_M))

    # Cut the targets into the evaluated sets again.
    ends = np.cumsum([len(targets) for _, targets in evaluated])
    return np.split(np.stack(nats), ends[:-1], axis=1)


def _extended(
    longer_C: np.ndarray, context_M: np.ndarray, added_M: np.ndarray, vocab_size: int
) -> np.ndarray:
    """Extends contexts by one token each; returns the numbers of the longer contexts.

    Contexts are numbered. With V = 100 tokens, context number 3 extended by token 7 is the integer
    3 V + 7 = 307. If longer_C is [205, 307, 412], its new number is 1, the index of 307.

    Args:
        longer_C: The integers of the longer contexts that occur, in ascending order.
        context_M: The numbers of the contexts to extend.
        added_M: The token that each context is extended by.
        vocab_size: V.

    Returns:
        The numbers of the longer contexts. A number is MISSING if the context or the token is
        MISSING, or if the longer context does not occur.
    """
    number_M = _find(longer_C, context_M * vocab_size + added_M)
    is_complete_M = (context_M != MISSING) & (added_M != MISSING)
    return np.where(is_complete_M, number_M, MISSING)


def _find(ascending: np.ndarray, wanted_M: np.ndarray) -> np.ndarray:
    """Returns the index of each wanted value in an ascending array, or MISSING if it has none.

    For example, the array [205, 307] and the wanted values [307, 206] give [1, MISSING].
    """
    index_M = np.searchsorted(ascending, wanted_M)
    # For a value above the last one, searchsorted returns the length of the array. The appended
    # entry makes that a valid index.
    is_found_M = np.append(ascending, MISSING)[index_M] == wanted_M
    return np.where(is_found_M, index_M, MISSING)


def preceding(rows_RL: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the contexts and targets of a language model.

    Every token of a row but the first is a target, and the tokens before it are its context:
    row [5, 6, 7] and K = 2 give the contexts [5, MISSING] and [6, 5] of the targets 6 and 7.

    Args:
        rows_RL: R rows of L token ids.
        number: K, the number of tokens in a context, 1 or more.

    Returns:
        contexts_KN, with the nearest token first and MISSING before the start of the row, and
        targets_N. The N = R (L - 1) targets are in the order of the rows.
    """
    num_targets = rows_RL.shape[1] - 1  # of each row
    # In the example, the padded row is [MISSING, MISSING, 5, 6, 7], and its first target 6 is in
    # column 3. The tokens at distance 1 before the targets are [5, 6]: two columns from column 2.
    # Those at distance 2 are [MISSING, 5], two columns from column 1.
    padded_RL = np.pad(rows_RL, ((0, 0), (number, 0)), constant_values=MISSING)
    first_target = number + 1
    tokens_by_distance = []
    for distance in range(1, number + 1):
        start = first_target - distance
        tokens_by_distance.append(padded_RL[:, start : start + num_targets])
    contexts_KRT = np.stack(tokens_by_distance)
    return contexts_KRT.reshape(number, -1), rows_RL[:, 1:].ravel()


def masked_losses(
    rows_RT: np.ndarray,
    evaluated: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
    order: int,
    vocab_size: int,
    rare: float = RARE,
) -> list[np.ndarray]:
    """Counts n-grams of a text at all offsets that targets need; returns the targets' losses.

    A masked target is predicted from its 0, 1, ... `order` nearest visible neighbours.

    Args:
        rows_RT: The text to count, ids in [0, vocab_size).
        evaluated: For each evaluated set its shown_RT (ids, or MISSING where the text is hidden),
            its text rows_RT, and hidden_RT, which is true at its M targets.
        order: The largest number of neighbours.
        vocab_size: The number of ids.
        rare: If fewer than this share of all targets have the same chain of offsets up to some
            depth, the chain is not counted to that depth. These targets keep the probability of the
            depth before.

    Returns:
        nats_OM of each set, with a row for each of the O = order + 1 numbers of neighbours.
    """
    targets_of_set = [
        _Targets.from_rows(shown_RT, text_RT, hidden_RT, order)
        for shown_RT, text_RT, hidden_RT in evaluated
    ]
    # The sets share their counts, so they are evaluated as one.
    targets = _Targets(
        offsets_KM=np.concatenate([part.offsets_KM for part in targets_of_set], axis=1),
        tokens_KM=np.concatenate([part.tokens_KM for part in targets_of_set], axis=1),
        ids_M=np.concatenate([part.ids_M for part in targets_of_set]),
    )
    # Each row is padded by the largest offset, so that an offset never reaches into another row.
    reach = int(np.abs(targets.offsets_KM).max(initial=0))
    text = np.pad(rows_RT, ((0, 0), (reach, reach)), constant_values=MISSING).ravel()

    # Visit the tree of offset chains from its root, which has no offsets and all targets.
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
        # The losses are also stored at larger depths, where children overwrite those of their
        # targets. Targets without a child keep them.
        nats_OM[node.depth :, node.target_M] = -np.log(probability_M)
        if node.depth == order:
            continue
        for child in node.children(text, targets, vocab_size, probability_M):
            if len(child.target_M) >= rare * num_targets:
                nodes.append(child)

    # Cut the targets into the evaluated sets again.
    ends = np.cumsum([len(part.ids_M) for part in targets_of_set])
    return np.split(nats_OM, ends[:-1], axis=1)


class _Targets(NamedTuple):
    """M masked targets, with the offsets and tokens of their K nearest visible neighbours."""

    offsets_KM: np.ndarray  # 0 where the row has no more visible neighbours
    tokens_KM: np.ndarray
    ids_M: np.ndarray

    @classmethod
    def from_rows(
        cls, shown_RT: np.ndarray, rows_RT: np.ndarray, hidden_RT: np.ndarray, order: int
    ) -> '_Targets':
        """Finds the masked tokens of R rows, and the nearest visible neighbours of each.

        For example, the middle token of [5, MISSING, 7] has the neighbour 5 at offset -1, then 7 at
        offset +1.

        Args:
            shown_RT: The visible ids; MISSING where the text is hidden.
            rows_RT: The ids of the text.
            hidden_RT: True at the M targets.
            order: K, the largest number of neighbours of a target.
        """
        row_M, column_M = np.nonzero(hidden_RT)
        length = rows_RT.shape[1]
        num_targets = len(row_M)
        offsets_KM = np.zeros((order, num_targets), np.int64)
        tokens_KM = np.full((order, num_targets), MISSING)
        num_found_M = np.zeros(num_targets, np.int64)  # neighbours found so far

        # Look at one offset of all targets at a time, the nearest first: -1, +1, -2, +2, ....
        offsets = [sign * distance for distance in range(1, length) for sign in (-1, 1)]
        for offset in offsets:
            neighbour_M = column_M + offset
            is_inside_M = (neighbour_M >= 0) & (neighbour_M < length)
            token_M = shown_RT[row_M, np.clip(neighbour_M, 0, length - 1)]
            is_visible_M = is_inside_M & (token_M != MISSING)

            # Store the visible neighbours of the targets that lack some. The first neighbour of a
            # target goes to row 0 of its column, the second one to row 1, and so on.
            targets = np.flatnonzero(is_visible_M & (num_found_M < order))
            rows = num_found_M[targets]
            offsets_KM[rows, targets] = offset
            tokens_KM[rows, targets] = token_M[targets]
            num_found_M[targets] += 1
            if np.all(num_found_M == order):
                break
        return cls(offsets_KM, tokens_KM, rows_RT[row_M, column_M])


class _Node(NamedTuple):
    """A node of the tree of offset chains: all targets whose chains begin with the same offsets.

    The node -1, +1 has the targets whose two nearest visible neighbours are directly before and
    behind them. A context is the tokens at these offsets. The contexts of the node's targets are
    numbered from 0. The node counts them at every position of the text that has one of them.
    """

    depth: int  # the number of offsets
    position_N: np.ndarray  # the N positions of the text that have the context of a target
    context_N: np.ndarray  # the number of the context at each position
    target_M: np.ndarray  # the indices of the node's M targets among all targets
    context_M: np.ndarray  # the number of each target's context
    lower_M: np.ndarray  # the probability of each target at the parent node

    def probability(self, text: np.ndarray, targets: _Targets, vocab_size: int) -> np.ndarray:
        """Returns P_k of each of the M targets (see the equation of this module)."""
        num_contexts = int(self.context_M.max(initial=0)) + 1
        counts = _Counts.from_targets(
            self.context_N, text[self.position_N], num_contexts, vocab_size
        )
        ids_M = targets.ids_M[self.target_M]
        return counts.probability(self.context_M, ids_M, self.lower_M, vocab_size)

    def children(
        self, text: np.ndarray, targets: _Targets, vocab_size: int, probability_M: np.ndarray
    ) -> Iterator['_Node']:
        """Yields the child nodes, whose chains of offsets are longer by one.

        For example, this node has the targets whose nearest visible neighbour is at offset -1. The
        next neighbour is at +1 for some of them, and at -2 for others. So there are two children,
        with the chains (-1, +1) and (-1, -2), and each has its own targets. The contexts in a child
        are longer by the token at the added offset.

        Args:
            text: The counted text, all rows in one array.
            targets: All targets, not only those of this node.
            vocab_size: The number of ids.
            probability_M: The probability of each target of this node (see `probability`).
        """
        next_offset_M = targets.offsets_KM[self.depth, self.target_M]
        next_token_M = targets.tokens_KM[self.depth, self.target_M]
        has_next_M = next_offset_M != 0
        for offset in np.unique(next_offset_M[has_next_M]):
            # Extend the contexts of the child's targets by the token at the offset: context c and
            # token w give c V + w. The longer contexts are numbered in the order of these integers.
            members = np.flatnonzero(next_offset_M == offset)
            longer_M = self.context_M[members] * vocab_size + next_token_M[members]
            longer_C, context_M = np.unique(longer_M, return_inverse=True)

            # Extend the contexts at the positions of the text in the same way. A position whose
            # longer context is that of no target is not counted.
            added_N = text[self.position_N + offset]
            context_N = _extended(longer_C, self.context_N, added_N, vocab_size)
            is_counted_N = context_N != MISSING
            yield _Node(
                depth=self.depth + 1,
                position_N=self.position_N[is_counted_N],
                context_N=context_N[is_counted_N],
                target_M=self.target_M[members],
                context_M=context_M,
                lower_M=probability_M[members],
            )
