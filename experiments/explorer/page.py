"""The interactive page: self-contained HTML, no server, no network.

Its table holds A[n] and B[n] as polynomials from the variants' own classes. A polynomial is a list
of terms [coefficient, index, index, ...]: the product of the coefficient and the entries with these
indices. Index i >= 0 is an entry of the circuit's own parameters in the order of reading, -1 - i
one of the Score that a Value shares.
"""

import json
import zlib
from collections.abc import Iterable
from typing import Any

import jinja2
import numpy as np

from experiments.explorer.bench import Bench, Parameter
from experiments.explorer.worked import polynomial
from qkattn.attention import SCORES, VALUES
from qkattn.errors import ConfigError
from qkattn.report.figures.style import DARK, LIGHT
from qkattn.report.prose import environment

# d_model and heads that the page offers.
SIZES = ((2, 1), (2, 2), (3, 1), (4, 1), (4, 2))


def page(sizes: Iterable[tuple[int, int]] = SIZES) -> str:
    """Returns the page as an HTML document. `sizes` are pairs of d_model and number of heads."""
    tables_by_size = {f'{dims},{heads}': _table(dims, heads) for dims, heads in sizes}
    equations: dict[str, dict[str, str]] = {'score': {}, 'value': {}}
    not_shown = []  # scores and values that have no matrix at any size
    for circuit, registered in (('score', SCORES), ('value', VALUES)):
        for name, cls in registered.items():
            if any(name in table[circuit] for table in tables_by_size.values()):
                equations[circuit][name] = cls.equation
            else:
                not_shown.append(name)
    templates = environment(html=True).overlay(loader=jinja2.PackageLoader('experiments.explorer'))
    return templates.get_template('explorer.html.j2').render(
        # '<' inside a string of JSON would end the script element early.
        data=json.dumps(tables_by_size, separators=(',', ':')).replace('<', '\\u003c'),
        sizes=[size.split(',') for size in tables_by_size],
        equations=equations,
        without=not_shown,
        light=LIGHT,
        dark=DARK,
    )


def _table(dims: int, heads: int) -> dict[str, Any]:
    """Returns the scores and values that can be shown at a size, for JSON.

    For example, with ... for parameters and matrices:

        {'score': {'qk': {'parameters': ..., 'A': ..., 'scale': 0.7}, 'shared_qk': ...},
         'value': {'vo': {'parameters': ..., 'B': {'': ...}},
                   'k_is_v': {'parameters': ..., 'B': {'qk': ..., 'shared_qk': ...}}}}

    The value k_is_v uses the matrix W_K of its score. Its matrix B therefore depends on the score,
    and there is one for each.
    """
    scores = {}
    for name in SCORES:
        bench = _bench(name, 'vo', dims, heads)
        if bench is not None:
            scores[name] = {
                'parameters': _parameters(bench, 'score'),
                'A': _polynomials(bench, 'score'),
                'scale': float(bench.layer.score.scale),
            }
    values = {}
    for name, cls in VALUES.items():
        # The score of each matrix B, by its key in the table.
        score_by_key = {'': cls.partner}
        if cls.shares:
            score_by_key = {score: score for score in scores}
        matrices = {}
        for key, score in score_by_key.items():
            bench = _bench(score, name, dims, heads)
            if bench is not None:
                matrices[key] = _polynomials(bench, 'value')
                parameters = _parameters(bench, 'value')  # its own: the same with every score
        if matrices:
            values[name] = {'parameters': parameters, 'B': matrices}
    return {'score': scores, 'value': values}


def _bench(score: str, value: str, dims: int, heads: int) -> Bench | None:
    """Returns the bench of a variant; None if it cannot be shown at this size."""
    try:
        return Bench(f'{score}/{value}', 2, dims, heads)
    except ConfigError:
        return None


def _parameters(bench: Bench, circuit: str) -> list[dict[str, Any]]:
    """The parameters of a circuit: name, shape [heads, rows, columns], and initial numbers."""
    parameters = []
    for parameter in bench.parameters_of(circuit):
        shape = list(parameter.by_head.shape)
        if len(shape) == 2:
            shape.insert(1, 1)  # a vector is a matrix of one row
        initial = _initial(parameter)
        parameters.append({'name': parameter.name, 'shape': shape, 'initial': initial})
    return parameters


def _initial(parameter: Parameter) -> list[float]:
    """Returns the numbers with which the page shows a parameter first, by head, row and column.

    Gains have their initial values, and matrices random numbers that depend on their name only.
    """
    if parameter.attribute.startswith('g_'):
        return parameter.initial.ravel()[parameter.by_head].ravel().tolist()
    rng = np.random.default_rng([3, zlib.crc32(parameter.name.encode())])
    return (rng.integers(-10, 11, parameter.initial.size) / 10).tolist()


def _polynomials(bench: Bench, circuit: str) -> list[Any]:
    """Returns A or B as [head][row][column] polynomials, each as text and as terms."""
    # The symbols of the ring are the entries of the score, followed by those of the value.
    num_foreign = 0
    if circuit == 'value':
        num_foreign = sum(p.initial.size for p in bench.parameters_of('score'))

    def to_json(entry: Any) -> dict[str, Any]:
        terms = []
        for powers, coefficient in entry.terms():
            terms.append(_term(powers, coefficient, num_foreign))
        return {'text': polynomial(entry), 'terms': terms}

    return np.vectorize(to_json, otypes=[object])(bench.matrix_of(circuit)).tolist()


def _term(powers: Iterable[int], coefficient: Any, num_foreign: int) -> list[Any]:
    """Returns a term of a polynomial as [coefficient, index, index, ...], as the page reads it.

    For example, a Value has the entries v0, v1, ..., and its Score has s0, s1, s2 and s3. The term
    5 s0 v1^2 has the powers (1, 0, 0, 0, 0, 2, ...), and becomes [5, -1, 1, 1]: the entry vi has
    the index i, and si has the index -1 - i.

    Args:
        powers: The power of each symbol: first those of the Score that a Value may share, then
            those of the circuit itself.
        coefficient: The coefficient of the term.
        num_foreign: The number of symbols that belong to the Score; 0 if the circuit is a Score.
    """
    is_whole = coefficient == int(coefficient)
    term: list[Any] = [int(coefficient) if is_whole else float(coefficient)]
    for number, power in enumerate(powers):
        index = -1 - number if number < num_foreign else number - num_foreign
        term.extend([index] * power)
    return term
