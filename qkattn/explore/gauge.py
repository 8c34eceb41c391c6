"""Changes of parameters that leave A[n] and B[n] as they are, solved for with an invertible G."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from qkattn.errors import ConfigError
from qkattn.explore.bench import Bench, Parameter, exact, grid, sympy
from qkattn.explore.structure import point

Values = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Gauge:
    """W' = W G with every other change that it takes.

    Attributes:
      first: what is multiplied by G from the right, e.g. 'W_Q'.
      changes: what becomes of the others: 'W_K G^-T', or None where it is no such product.
      group: which G are meant: 'invertible', 'diagonal' or 'orthogonal'.
    """

    first: str
    changes: Mapping[str, str | None]
    group: str


def gauges(bench: Bench) -> list[Gauge]:
    """Solved with symbols at d_model 2; the form of a gauge is the same at every size."""
    small = _small(bench)
    if small is None:
        return []
    parts = [*small.of('score'), *small.of('value')]
    letters = dict.fromkeys(letter for part in parts for letter in part.axes)
    return [g for letter in letters if letter not in 'DENK' for g in _along(small, parts, letter)]


def _small(bench: Bench) -> Bench | None:
    for heads in (1, 2):
        try:
            return Bench(bench.variant, 2, 2, heads)
        except ConfigError:  # options that need other sizes
            pass
    return None


def _along(bench: Bench, parts: list[Parameter], letter: str) -> Iterator[Gauge]:
    """The gauges of an axis that A or B sums over; each parameter is changed by one of them."""
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
    """The widest group of G whose changes are matrix products, else the widest of all."""
    size = first.initial.shape[-1]
    G = grid('G', size, size)
    found = []
    for group, M in (('invertible', G), ('diagonal', np.where(np.eye(size), G, exact(0.0)))):
        values: Values = {part.attribute: part.symbols for part in bench.parameters}
        values[first.attribute] = first.symbols @ M
        changes: dict[str, str | None] = {}
        conditions: list[Any] = []
        for which in (0, 1):
            problem = _difference(bench, values, which)
            free = [part for part in others if part.name not in changes]
            if problem and not _repair(bench, values, free, changes, which, M):
                conditions += problem
        if not conditions or _hold_if_orthogonal(conditions, G):
            found.append(Gauge(first.name, changes, 'orthogonal' if conditions else group))
            if None not in changes.values():
                return found[-1]
    return found[0] if found else None


def _repair(
    bench: Bench,
    values: Values,
    free: list[Parameter],
    changes: dict[str, str | None],
    which: int,
    M: np.ndarray,
) -> bool:
    """Changes one more parameter such that A (0) or B (1) is as before; False if none does it."""
    solved = []
    for other in free:
        unknown = np.array(sympy().symbols(f'u:{other.initial.size}'), object)
        trial = {**values, other.attribute: unknown.reshape(other.initial.shape)}
        solution = _linear(_difference(bench, trial, which), list(unknown))
        if solution is not None:
            array = solution.reshape(other.initial.shape)
            solved.append((other, array, _words(other, array, M)))
            if solved[-1][2] is not None:
                break
    if not solved:
        return False
    other, values[other.attribute], changes[other.name] = solved[-1] if solved[-1][2] else solved[0]
    return True


def _difference(bench: Bench, values: Values, which: int) -> list[Any]:
    """The numerators of the entries of A' - A, or of B' - B, that are not zero."""
    changed = bench.matrices([values[p.attribute] for p in bench.parameters], exact)[which]
    entries = [a - b for a, b in zip(changed.flat, bench.AB[which].flat, strict=True)]
    numerators = [sympy().expand(sympy().fraction(sympy().together(e))[0]) for e in entries]
    return [numerator for numerator in numerators if numerator != 0]


def _linear(equations: list[Any], unknown: list[Any]) -> np.ndarray | None:
    """The only solution for almost all values of the other symbols; None without one."""
    if not all(sympy().Poly(e, *unknown).total_degree() < 2 for e in equations):
        return None
    solutions = list(sympy().linsolve(equations, *unknown))
    if not solutions or any(entry.free_symbols & {*unknown} for entry in solutions[0]):
        return None
    return np.array([sympy().cancel(entry) for entry in solutions[0]], object)


def _hold_if_orthogonal(conditions: list[Any], G: np.ndarray) -> bool:
    """Whether they hold for every rotation and reflection of at most two dimensions."""
    t = sympy().Symbol('t')
    cosine, sine = (1 - t**2) / (1 + t**2), 2 * t / (1 + t**2)
    turned = [[[sign]] for sign in (1, -1)]
    if len(G) == 2:
        turned = [[[cosine, sign * sine], [-sine, sign * cosine]] for sign in (1, -1)]
    for rows in turned:
        at = dict(zip(G.flat, itertools.chain(*rows), strict=True))
        if any(sympy().cancel(condition.subs(at)) != 0 for condition in conditions):
            return False
    return True


def _words(part: Parameter, changed: np.ndarray, M: np.ndarray) -> str | None:
    """The change as matrices to the left and to the right of the parameter; None if it is not."""
    at = point(changed, part.symbols, M)
    values = (np.array([e.subs(at) for e in array.flat]) for array in (changed, part.symbols))
    after, before = (array[part.by_head] for array in values)
    G = sympy().Matrix(M).subs(at)
    powers = {
        '': G**0,
        'G^-1': G.inv(),
        'G^-T': G.inv().T,
        'G': G,
        'G^T': G.T,
        'G^-2': G.inv() ** 2,
    }
    forms = {word: np.array(power.tolist(), object) for word, power in powers.items()}
    # The plain forms first; a key takes G^-T, and what follows W_V or W_Q takes G^-1.
    on_right = ('', 'G^-T', 'G^-1', *(word for word in forms if word not in ('', 'G^-T', 'G^-1')))
    pairs = itertools.product(forms, on_right)
    for left, right in sorted(pairs, key=lambda pair: bool(pair[0]) + bool(pair[1])):
        fits = [not left or before.shape[1] == len(M), not right or before.shape[2] == len(M)]
        if not all(fits):
            continue
        product = forms[left] @ before if left else before
        product = product @ forms[right] if right else product
        if (product == after).all():
            return ' '.join(word for word in (left, part.name, right) if word)
    return None
