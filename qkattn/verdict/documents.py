"""Losses by document: nats and targets of the last evaluation, of every trial and split."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qkattn.metrics import PREFIXES
from qkattn.storage.records import DOCUMENTS, check, parse_file

# The field of a result that counts the targets of a split.
COUNTS = {'val': 'eval_tokens', 'test': 'test_tokens'}
_ROUNDING = 1e-5  # relative; losses are sums of the same numbers in another order


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """One trial on one split: the names of C documents, their targets and their nats.

    The split's loss is nats_C.sum() / tokens_C.sum().
    """

    names: tuple[str, ...]
    tokens_C: np.ndarray
    nats_C: np.ndarray

    @property
    def loss(self) -> float:
        return float(self.nats_C.sum() / self.tokens_C.sum())

    def alike(self, other: 'Documents') -> bool:
        """Whether both are sums over the same targets."""
        return self.names == other.names and np.array_equal(self.tokens_C, other.tokens_C)


def read(
    path: Path, losses: list[dict[str, float | None]], counts: Mapping[str, int | None]
) -> list[dict[str, Documents]]:
    """The documents of each trial by the prefix of a split.

    Args:
      losses: of every trial.
      counts: targets of the splits, those that are known.

    Raises:
      ValueError: names the field that is bad or contradicts a loss or count.
    """
    record = parse_file(path, {'validation': DOCUMENTS})
    trials: list[dict[str, Documents]] = [{} for _ in losses]
    for split, prefix in PREFIXES.items():
        if split not in record:
            if any(own[prefix] is not None for own in losses):
                raise ValueError(f'split {split!r} is missing, of which its results have losses')
        else:
            of_split = _split(record[split], split, len(losses))
            if counts[prefix] not in (None, tokens := sum(record[split]['tokens'])):
                raise ValueError(
                    f'it has {tokens} tokens of split {split!r}, but its results {counts[prefix]}'
                )
            for place, (found, own) in enumerate(zip(of_split, losses, strict=True)):
                expected = own[prefix]
                loss = None if found is None else found.loss
                if loss != expected and not math.isclose(
                    loss or math.nan, expected or math.nan, rel_tol=_ROUNDING
                ):
                    raise ValueError(
                        f'trial {place} of split {split!r} has a loss of {loss} nats/token over '
                        f'its documents, its result has {expected}'
                    )
                if found is not None:
                    trials[place][prefix] = found
    return trials


def _split(record: Any, split: str, num_trials: int) -> list[Documents | None]:
    check(record, DOCUMENTS)
    names, tokens_C = tuple(record['documents']), np.array(record['tokens'], float)
    rows = [None if row is None else np.array(row, float) for row in record['nats']]
    if len(rows) != num_trials:
        raise ValueError(f'split {split!r} has nats of {len(rows)} trials, not of {num_trials}')
    if any(of is not None and of.shape != (len(names),) for of in (tokens_C, *rows)):
        raise ValueError(f'split {split!r} does not have one number for each of its documents')
    if len(set(names)) < len(names) or not names or not (tokens_C > 0).all():
        raise ValueError(f'split {split!r} repeats a document, or has one without targets')
    return [None if row is None else Documents(names, tokens_C, row) for row in rows]
