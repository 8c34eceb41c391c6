"""Losses of interpolated n-grams, for language models and for masked models.

An n-gram of order k predicts a target token w from a context h of k - 1 tokens, nearest first. For
a language model, these are the preceding tokens. For a masked model, they are the visible
neighbours. Orders are interpolated as in Witten and Bell (1991, 'The zero-frequency problem'):

    P_k(w | h) = (count(h, w) + types(h) P_{k-1}(w | h')) / (count(h) + types(h))

types(h) is the number of distinct targets in the context h, h' is h without its last token, and P_0
is 1 / V. If h does not occur in the counted text or has a missing token, P_k is P_{k-1}.

The neighbours of a masked target are at the offsets -1, +1, -2, +2, ... without the hidden
positions. Targets with the same first offsets share counts, so the offsets form a tree.

The C contexts of one order have the IDs 0 .. C - 1. The integer c V + w is the code of context c
with token w, where w is either a target or the token that extends the context.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# Chains of offsets that fewer than this share of the masked targets have are not counted.
RARE = 0.0005
# A context token that is hidden or beyond the row, or the ID of a context that was not counted.
MISSING = -1


class _Counts(NamedTuple):
    """Counts of P pairs (h, w) of a context h and a target token w, for C contexts of one order."""

    code_P: np.ndarray  # c V + w for context ID c and token w, ascending
    count_P: np.ndarray  # count(h, w)
    total_C: np.ndarray  # count(h)
    types_C: np.ndarray  # types(h), the number of distinct targets

    @classmethod
    def from_targets(
        cls, context_N: np.ndarray, target_N: np.ndarray, num_contexts: int, vocab_size: int
    ) -> '_Counts':
        """Counts the P distinct pairs among N context IDs c with their target tokens w."""
        # A pair has the code c V + w.
        code_P, count_P = np.unique(context_N * vocab_size + target_N, return_counts=True)
        context_P = code_P // vocab_size
        total_C = np.bincount(context_N, minlength=num_contexts)
        types_C = np.bincount(context_P, minlength=num_contexts)
        return cls(code_P, count_P, total_C, types_C)

    def probability(
        self, context_M: np.ndarray, target_M: np.ndarray, lower_M: np.ndarray, vocab_size: int
    ) -> np.ndarray:
        """Returns the probability P_k of M target tokens w in the contexts h.

            P_k = (count(h, w) + types(h) P_{k-1}) / (count(h) + types(h))

        `context_M` are context IDs, and `lower_M` is P_{k-1}. If the context is MISSING or has no
        counts, P_k is P_{k-1}.
        """
        pair_M = _find(self.code_P, context_M * vocab_size + target_M)
        # MISSING = -1 selects the last entry, so append the counts of a missing pair or context.
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
    """Counts n-grams of the orders 1 to K + 1, and returns the losses of evaluated targets.

    Args:
        contexts_KN: The K nearest context tokens of each of N targets to count, nearest first, with
            IDs in [0, vocab_size) or MISSING.
        targets_N: The token IDs of the targets to count.
        evaluated: (contexts_KM, targets_M) of each evaluated set.
        vocab_size: The number of token IDs.

    Returns:
        nats_OM of each evaluated set, for the O = K + 1 orders.
    """
    # Evaluate all sets at once, since they share the counts.
    contexts_KM = np.concatenate([contexts for contexts, _ in evaluated], axis=1)
    targets_M = np.concatenate([targets for _, targets in evaluated])
    probability_M = np.full(len(targets_M), 1 / vocab_size)  # P_0
    # At order 1, all targets have the empty context with ID 0.
    context_M = np.zeros(len(targets_M), np.int64)
    context_N = np.zeros(len(targets_N), np.int64)
    num_contexts = 1
    # Indices of the targets with a complete context. N shrinks from order to order.
    counted_N = np.arange(len(targets_N))
    max_order = len(contexts_KN) + 1
    nats = []
    for order in range(1, max_order + 1):
        if order > 1:
            # Extend each context by one token. The codes c V + w of the longer contexts are
            # replaced by IDs.
            row = order - 2
            added_N = contexts_KN[row, counted_N]
            is_known_N = added_N != MISSING
            counted_N = counted_N[is_known_N]
            code_N = context_N[is_known_N] * vocab_size + added_N[is_known_N]
            code_C, context_N = np.unique(code_N, return_inverse=True)
            num_contexts = len(code_C)
            context_M = _extended(code_C, context_M, contexts_KM[row], vocab_size)
        counts = _Counts.from_targets(context_N, targets_N[counted_N], num_contexts, vocab_size)
        probability_M = counts.probability(context_M, targets_M, probability_M, vocab_size)
        nats.append(-np.log(probability_M))

    # Split the targets into the evaluated sets.
    ends = np.cumsum([len(targets) for _, targets in evaluated])
    return np.split(np.stack(nats), ends[:-1], axis=1)


def _extended(
    code_C: np.ndarray, context_M: np.ndarray, added_M: np.ndarray, vocab_size: int
) -> np.ndarray:
    """Extends contexts by one token each, and returns the IDs of the longer contexts.

    With V = 100, context 3 extended by token 7 has the code 3 V + 7 = 307. If code_C is
    [205, 307, 412], the longer context has the ID 1, the index of 307.

    Args:
        code_C: The codes of the longer contexts that occur, ascending.
        context_M: The IDs of the contexts to extend.
        added_M: The added tokens.
        vocab_size: V.

    Returns:
        The IDs of the longer contexts. The ID is MISSING if the context or the token is MISSING, or
        if the longer context does not occur.
    """
    longer_id_M = _find(code_C, context_M * vocab_size + added_M)
    is_complete_M = (context_M != MISSING) & (added_M != MISSING)
    return np.where(is_complete_M, longer_id_M, MISSING)


def _find(ascending: np.ndarray, wanted_M: np.ndarray) -> np.ndarray:
    """Returns the index of each wanted value in an ascending array, or MISSING.

    For example, searching [205, 307] for [307, 206] gives [1, MISSING].
    """
    index_M = np.searchsorted(ascending, wanted_M)
    # searchsorted returns len(ascending) for a value above the last one. The appended entry makes
    # this index valid.
    is_found_M = np.append(ascending, MISSING)[index_M] == wanted_M
    return np.where(is_found_M, index_M, MISSING)


def preceding(rows_RL: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the contexts and targets of a language model.

    The targets are all tokens of a row but the first. For example, the row [5, 6, 7] and K = 2 give
    the targets 6 and 7 with the contexts [5, MISSING] and [6, 5].

    Args:
        rows_RL: R rows of L token IDs.
        number: K, the number of tokens in a context, 1 or more.

    Returns:
        contexts_KN, nearest token first and MISSING before the start of the row, and targets_N. The
        N = R (L - 1) targets are in the order of the rows.
    """
    targets_RT = rows_RL[:, 1:]
    num_targets = targets_RT.shape[1]  # of each row
    padding = ((0, 0), (number, 0))  # K columns before each row
    padded_RP = np.pad(rows_RL, padding, constant_values=MISSING)
    first_target = number + 1  # its column in the padded row
    tokens_by_distance = []
    for distance in range(1, number + 1):
        start = first_target - distance
        tokens_by_distance.append(padded_RP[:, start : start + num_targets])
    contexts_KRT = np.stack(tokens_by_distance)
    return contexts_KRT.reshape(number, -1), targets_RT.ravel()


def masked_losses(
    rows_RT: np.ndarray,
    evaluated: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
    order: int,
    vocab_size: int,
    rare: float = RARE,
) -> list[np.ndarray]:
    """Counts n-grams of a text, and returns the losses of masked targets.

    A target is predicted from its 0, 1, ..., `order` nearest visible neighbours.

    Args:
        rows_RT: The text to count, token IDs in [0, vocab_size).
        evaluated: (shown_RT, rows_RT, hidden_RT) of each evaluated set: the visible token IDs with
            MISSING where the text is hidden, the whole text, and a mask that is true at M targets.
        order: The maximum number of neighbours.
        vocab_size: The number of token IDs.
        rare: Chains of neighbour offsets that fewer than this share of all targets have are not
            counted. The targets keep the loss of a shorter chain.

    Returns:
        nats_OM of each set, for O = order + 1 numbers of neighbours.
    """
    targets_of_set = [
        _Targets.from_rows(shown_RT, text_RT, hidden_RT, order)
        for shown_RT, text_RT, hidden_RT in evaluated
    ]
    # Evaluate all sets at once, since they share the counts.
    targets = _Targets(
        offsets_KM=np.concatenate([part.offsets_KM for part in targets_of_set], axis=1),
        tokens_KM=np.concatenate([part.tokens_KM for part in targets_of_set], axis=1),
        ids_M=np.concatenate([part.ids_M for part in targets_of_set]),
    )
    # Pad each row so that no offset reaches into another row.
    max_offset = int(np.abs(targets.offsets_KM).max(initial=0))
    padding = ((0, 0), (max_offset, max_offset))
    text = np.pad(rows_RT, padding, constant_values=MISSING).ravel()

    # Visit the tree of offset chains from its root.
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
        # Targets that are in no child keep this loss at larger depths, too.
        nats_OM[node.depth :, node.target_M] = -np.log(probability_M)
        if node.depth == order:
            continue
        for child in node.children(text, targets, vocab_size, probability_M):
            if len(child.target_M) >= rare * num_targets:
                nodes.append(child)

    # Split the targets into the evaluated sets.
    ends = np.cumsum([len(part.ids_M) for part in targets_of_set])
    return np.split(nats_OM, ends[:-1], axis=1)


class _Targets(NamedTuple):
    """M masked targets and their K nearest visible neighbours, nearest first."""

    offsets_KM: np.ndarray  # position of the neighbour minus position of the target; 0 if missing
    tokens_KM: np.ndarray  # token IDs of the neighbours
    ids_M: np.ndarray  # token IDs of the targets

    @classmethod
    def from_rows(
        cls, shown_RT: np.ndarray, rows_RT: np.ndarray, hidden_RT: np.ndarray, order: int
    ) -> '_Targets':
        """Finds the masked tokens of R rows, and their nearest visible neighbours.

        For example, the middle token of [5, MISSING, 7] has the neighbours 5 at offset -1 and 7 at
        offset +1.

        Args:
            shown_RT: The visible token IDs; MISSING where the text is hidden.
            rows_RT: The token IDs of the whole text.
            hidden_RT: True at the M targets.
            order: K, the maximum number of neighbours of a target.
        """
        row_M, column_M = np.nonzero(hidden_RT)
        length = rows_RT.shape[1]
        num_targets = len(row_M)
        offsets_KM = np.zeros((order, num_targets), np.int64)
        tokens_KM = np.full((order, num_targets), MISSING)
        num_found_M = np.zeros(num_targets, np.int64)  # neighbours found so far

        # Nearest first: -1, +1, -2, +2, ...
        offsets = [sign * distance for distance in range(1, length) for sign in (-1, 1)]
        for offset in offsets:
            neighbour_M = column_M + offset
            is_inside_M = (neighbour_M >= 0) & (neighbour_M < length)
            token_M = shown_RT[row_M, np.clip(neighbour_M, 0, length - 1)]
            is_visible_M = is_inside_M & (token_M != MISSING)

            # Store this neighbour for the targets that have fewer than K neighbours so far.
            targets = np.flatnonzero(is_visible_M & (num_found_M < order))
            free_rows = num_found_M[targets]  # the first free row in each target's column
            offsets_KM[free_rows, targets] = offset
            tokens_KM[free_rows, targets] = token_M[targets]
            num_found_M[targets] += 1
            if np.all(num_found_M == order):
                break
        return cls(offsets_KM, tokens_KM, rows_RT[row_M, column_M])


class _Node(NamedTuple):
    """The targets that share the offsets of their nearest visible neighbours.

    For example, the node (-1, +1) has the targets between two visible tokens. The context of a
    target is the tokens at these offsets. The N positions of the text with the context of any
    target are counted.
    """

    depth: int  # number of offsets
    position_N: np.ndarray  # positions in the counted text
    context_N: np.ndarray  # context ID of each position
    target_M: np.ndarray  # indices of the node's M targets among all targets
    context_M: np.ndarray  # context ID of each target
    lower_M: np.ndarray  # probability of each target at the parent node

    def probability(self, text: np.ndarray, targets: _Targets, vocab_size: int) -> np.ndarray:
        """Returns the probability of each of the node's M targets, given its context."""
        num_contexts = int(self.context_M.max(initial=0)) + 1
        counts = _Counts.from_targets(
            self.context_N, text[self.position_N], num_contexts, vocab_size
        )
        ids_M = targets.ids_M[self.target_M]
        return counts.probability(self.context_M, ids_M, self.lower_M, vocab_size)

    def children(
        self, text: np.ndarray, targets: _Targets, vocab_size: int, probability_M: np.ndarray
    ) -> Iterator['_Node']:
        """Yields a child node for each offset of the next visible neighbour.

        For example, the node (-1) may have the children (-1, +1) and (-1, -2). The contexts in a
        child are longer by the token at the added offset.

        Args:
            text: The counted text, with all rows in one array.
            targets: All targets, not only those of this node.
            vocab_size: The number of token IDs.
            probability_M: The probability of each target of this node, from `probability`.
        """
        next_offset_M = targets.offsets_KM[self.depth, self.target_M]
        next_token_M = targets.tokens_KM[self.depth, self.target_M]
        has_next_M = next_offset_M != 0  # 0 stands for no further neighbour
        for offset in np.unique(next_offset_M[has_next_M]):
            # Extend the contexts of the child's targets by the token at this offset. The code
            # c V + w of context c with token w is replaced by the ID of the longer context.
            members = np.flatnonzero(next_offset_M == offset)
            code_M = self.context_M[members] * vocab_size + next_token_M[members]
            code_C, context_M = np.unique(code_M, return_inverse=True)

            # Extend the contexts in the text. Count only the positions with a target's context.
            added_N = text[self.position_N + offset]
            context_N = _extended(code_C, self.context_N, added_N, vocab_size)
            is_counted_N = context_N != MISSING
            yield _Node(
                depth=self.depth + 1,
                position_N=self.position_N[is_counted_N],
                context_N=context_N[is_counted_N],
                target_M=self.target_M[members],
                context_M=context_M,
                lower_M=probability_M[members],
            )
