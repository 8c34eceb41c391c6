"""Changes of parameters that leave A[n] and B[n] as they are, solved for with an invertible G.

Parameters and G have rational values instead of symbols: what holds there, exactly, holds for
almost all values, and G may have any size.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from qkattn.explore.bench import Bench, Parameter, exact, grid, sympy
from qkattn.explore.structure import point

Values = dict[str, np.ndarray]
Matrices = tuple[np.ndarray, np.ndarray]
# The plain powers first; a key takes G^-T, and what follows W_V or W_Q takes G^-1.
ON_LEFT = ('', 'G^-1', 'G^-T', 'G', 'G^T', 'G^-2')
ON_RIGHT = ('', 'G^-T', 'G^-1', 'G', 'G^T', 'G^-2')


@dataclasses.dataclass(frozen=True)
class Gauge:
    """W' = W G with every other change that it takes.

    Attributes:
      first: what is multiplied by G from the right, e.g. 'W_Q'.
      changes: what becomes of the others: 'W_K G^-T', or None where it is no such product.
      group: which G are meant: 'invertible', 'orthogonal' or 'diagonal'.
    """

    first: str
    changes: Mapping[str, str | None]
    group: str


def gauges(bench: Bench) -> list[Gauge]:
    """Those of every axis that A or B sums over, at the bench's own sizes."""
    parts = [*bench.of('score'), *bench.of('value')]
    letters = dict.fromkeys(letter for part in parts for letter in part.axes)
    return [g for letter in letters if letter not in 'DENK' for g in _along(bench, parts, letter)]


def _along(bench: Bench, parts: list[Parameter], letter: str) -> Iterator[Gauge]:
    """The gauges of one axis; each parameter is changed by one of them."""
    having = [part for part in parts if letter in part.axes]
    done: set[str] = set()
    for first in having:
        if first.name in done or first.axes[-1] != letter or first.initial.ndim < 2:
            continue
        others = [part for part in having if part is not first]
        found = _solved(bench, first, others)
        if found is not None:
            done |= {found.first, *found.changes}
            yield found


def _solved(bench: Bench, first: Parameter, others: list[Parameter]) -> Gauge | None:
    """The first group of G whose changes are matrix products, else the first of all."""
    size = first.initial.shape[-1]
    G = grid('G', size, size)
    at = point(G, *(part.symbols for part in bench.parameters))
    values = {part.attribute: _valued(part.symbols, at) for part in bench.parameters}
    found = []
    for group, elements in _elements(_valued(G, at)).items():
        ways = [_changes(bench, values, first, others, element) for element in elements]
        if ways[0] is not None and all(way == ways[0] for way in ways):
            found.append(Gauge(first.name, ways[0], group))
            if None not in ways[0].values():
                return found[-1]
    return found[0] if found else None


def _valued(symbols: np.ndarray, at: Mapping[Any, Any]) -> np.ndarray:
    return np.vectorize(at.__getitem__, otypes=[object])(symbols)


def _elements(free: np.ndarray) -> dict[str, list[np.ndarray]]:
    """Generic elements of each group; of the orthogonal one a rotation and a reflection."""
    size = len(free)
    one, G = sympy().eye(size), sympy().Matrix(free)
    rotation = (one - G + G.T) * (one + G - G.T).inv()  # Cayley
    reflection = sympy().diag(-1, *[1] * (size - 1)) * rotation
    return {
        'invertible': [free],
        'orthogonal': [np.array(turned.tolist(), object) for turned in (rotation, reflection)],
        'diagonal': [np.where(np.eye(size), free, exact(0.0))],
    }


def _changes(
    bench: Bench, before: Values, first: Parameter, others: list[Parameter], G: np.ndarray
) -> dict[str, str | None] | None:
    """What becomes of the others when the first is multiplied by G; None if A or B is lost."""
    values = {**before, first.attribute: before[first.attribute] @ G}
    wanted = _matrices(bench, before)
    changes: dict[str, str | None] = {}
    for which in (0, 1):
        if any(_difference(bench, values, wanted)[which]):
            free = [part for part in others if part.name not in changes]
            if not _repair(bench, values, wanted, free, changes, which, G):
                return None
    return None if any(map(any, _difference(bench, values, wanted))) else changes


def _repair(
    bench: Bench,
    values: Values,
    wanted: Matrices,
    free: list[Parameter],
    changes: dict[str, str | None],
    which: int,
    G: np.ndarray,
) -> bool:
    """Changes one more parameter such that A (0) or B (1) is as before; False if none does it."""
    solved = []
    for other in free:
        unknown = np.array(sympy().symbols(f'u:{other.initial.size}'), object)
        trial = {**values, other.attribute: unknown.reshape(other.initial.shape)}
        equations = _difference(bench, trial, wanted)[which]
        if not all(sympy().Poly(e, *unknown).total_degree() < 2 for e in equations):
            continue
        rows, right = sympy().linear_eq_to_matrix(equations, *unknown)
        for words, array in _products(other, values[other.attribute], G):
            if not any(map(sympy().expand, rows * sympy().Matrix(array.ravel()) - right)):
                values[other.attribute], changes[other.name] = array, words
                return True
        solutions = list(sympy().linsolve((rows, right), *unknown))
        if solutions and not solutions[0].free_symbols:
            solved.append((other, np.array(solutions[0], object).reshape(other.initial.shape)))
    if not solved:
        return False
    other, values[other.attribute] = solved[0]
    changes[other.name] = None
    return True


def _matrices(bench: Bench, values: Values) -> Matrices:
    return bench.matrices([values[part.attribute] for part in bench.parameters], exact)


def _difference(bench: Bench, values: Values, wanted: Matrices) -> list[list[Any]]:
    """The entries of A' - A and of B' - B."""
    pairs = zip(_matrices(bench, values), wanted, strict=True)
    return [[sympy().expand(entry) for entry in (new - old).flat] for new, old in pairs]


def _products(
    part: Parameter, array: np.ndarray, G: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """The parameter with powers of G to the left and to the right, with the words for it."""
    power = sympy().Matrix(G)
    inverse = power.inv()
    powers = {'G': power, 'G^T': power.T, 'G^-1': inverse, 'G^-T': inverse.T, 'G^-2': inverse**2}
    forms = {word: np.array(matrix.tolist(), object) for word, matrix in powers.items()}
    before = array.ravel()[part.by_head]
    pairs = itertools.product(
        ON_LEFT if before.shape[1] == len(G) else ON_LEFT[:1],
        ON_RIGHT if before.shape[2] == len(G) else ON_RIGHT[:1],
    )
    for left, right in sorted(pairs, key=lambda pair: sum(map(bool, pair))):
        after = forms[left] @ before if left else before
        after = after @ forms[right] if right else after
        changed = np.empty(array.size, object)
        changed[part.by_head] = after
        yield (
            ' '.join(word for word in (left, part.name, right) if word),
            changed.reshape(array.shape),
        )
