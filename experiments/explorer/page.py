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
    """The page as an HTML document that offers these pairs of d_model and number of heads."""
    tables_by_size = {f'{dims},{heads}': _table(dims, heads) for dims, heads in sizes}
    equations: dict[str, dict[str, str]] = {'score': {}, 'value': {}}
    without = []
    for circuit, registered in (('score', SCORES), ('value', VALUES)):
        for name, cls in registered.items():
            if any(name in table[circuit] for table in tables_by_size.values()):
                equations[circuit][name] = cls.equation
            else:
                without.append(name)
    templates = environment(html=True).overlay(loader=jinja2.PackageLoader('experiments.explorer'))
    return templates.get_template('explorer.html.j2').render(
        # '<' inside a string of JSON would end the script element early.
        data=json.dumps(tables_by_size, separators=(',', ':')).replace('<', '\\u003c'),
        sizes=[size.split(',') for size in tables_by_size],
        equations=equations,
        without=without,
        light=LIGHT,
        dark=DARK,
    )


def _table(dims: int, heads: int) -> dict[str, Any]:
    """The scores and values that can be shown at these sizes by name, for JSON.

    A score has its parameters, its scale and A. A value has its parameters and B: one of them,
    under '', or, where it shares a matrix with its score, one under the name of each score.
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
        partners = {score: score for score in scores} if cls.shares else {'': cls.partner}
        polynomials = {}
        for key, score in partners.items():
            bench = _bench(score, name, dims, heads)
            if bench is not None:
                polynomials[key] = _polynomials(bench, 'value')
                parameters = _parameters(bench, 'value')
        if polynomials:
            values[name] = {'parameters': parameters, 'B': polynomials}
    return {'score': scores, 'value': values}


def _bench(score: str, value: str, dims: int, heads: int) -> Bench | None:
    """The bench of a variant; None if it has none at these sizes."""
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
    """The numbers that a parameter begins with, in the order of reading: head, row, column.

    Gains begin at their initial values, matrices at numbers that their name determines.
    """
    if parameter.attribute.startswith('g_'):
        return parameter.initial.ravel()[parameter.by_head].ravel().tolist()
    rng = np.random.default_rng([3, zlib.crc32(parameter.name.encode())])
    return (rng.integers(-10, 11, parameter.initial.size) / 10).tolist()


def _polynomials(bench: Bench, circuit: str) -> list[Any]:
    """A or B as [head][row][column] polynomials, each as text and as terms."""
    # The ring has the entries of the score first, then those of the value.
    first_own = 0
    if circuit == 'value':
        first_own = sum(p.initial.size for p in bench.parameters_of('score'))

    def described(entry: Any) -> dict[str, Any]:
        terms = [_term(powers, number, first_own) for powers, number in entry.terms()]
        return {'text': polynomial(entry), 'terms': terms}

    return np.vectorize(described, otypes=[object])(bench.matrix_of(circuit)).tolist()


def _term(powers: Iterable[int], number: Any, first_own: int) -> list[Any]:
    """A term of a polynomial as [coefficient, index, index, ...], as the page reads it.

    `powers` are those of all generators of the ring. The circuit's own entries begin at the
    generator `first_own`; those before it are of the Score. A squared entry has its index twice.
    """
    term: list[Any] = [int(number) if number == int(number) else float(number)]
    for generator, power in enumerate(powers):
        index = generator - first_own if generator >= first_own else -1 - generator
        term.extend([index] * power)
    return term
