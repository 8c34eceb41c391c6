"""What the equations of a variant fix: equal entries, kinds of matrices, ranks, dimensions."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from qkattn.explore.bench import sympy

Point = Mapping[Any, Any]


def named(name: str, M_NDE: np.ndarray) -> np.ndarray:
    """The matrices with a name for each entry; equal entries share one, numbers stay numbers."""
    known: dict[Any, Any] = {}
    out = np.empty_like(M_NDE)
    for (n, row, column), entry in np.ndenumerate(M_NDE):
        head = f'[{n + 1}]' if len(M_NDE) > 1 else ''
        if -entry in known:
            out[n, row, column] = -known[-entry]
        elif entry.is_number:
            out[n, row, column] = entry
        else:
            symbol = sympy().Symbol(f'{name}{head}{row + 1}{column + 1}')
            out[n, row, column] = known.setdefault(entry, symbol)
    return out


def ties(M_NTS: np.ndarray) -> list[list[tuple[int, int, int]]]:
    """Places (head, row, column) of entries that are equal for all values, in groups."""
    groups: dict[Any, list[tuple[int, int, int]]] = {}
    for (n, row, column), entry in np.ndenumerate(M_NTS):
        groups.setdefault(entry, []).append((n, row, column))
    return [places for places in groups.values() if len(places) > 1]


def kind(M_DE: np.ndarray) -> str:
    """'identity', 'diagonal', 'symmetric', 'skew' or 'general', for all values of the symbols."""
    on = np.eye(len(M_DE), dtype=bool)
    if (M_DE[~on] == 0).all():
        return 'identity' if (M_DE[on] == 1).all() else 'diagonal'
    if (M_DE == M_DE.T).all():
        return 'symmetric'
    return 'skew' if (M_DE + M_DE.T == 0).all() else 'general'


def point(*expressions: np.ndarray) -> Point:
    """A rational value for each symbol, the same at every call; ranks there are generic."""
    symbols = {s for array in expressions for entry in array.flat for s in entry.free_symbols}
    rng = random.Random(0)
    return {
        symbol: sympy().Rational(rng.randint(-999, 999), 997) for symbol in sorted(symbols, key=str)
    }


def rank(M_DE: np.ndarray) -> int:
    """The rank for almost all values of the symbols."""
    return int(sympy().Matrix(M_DE).subs(point(M_DE)).rank())


def dimension(*matrices: np.ndarray) -> int:
    """In how many independent directions the matrices move when their symbols do."""
    at = point(*matrices)
    entries = [entry for array in matrices for entry in array.flat]
    jacobian = sympy().Matrix([[entry.diff(symbol) for symbol in at] for entry in entries])
    return int(jacobian.subs(at).rank()) if at else 0
