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
    by_size = {f'{dims},{heads}': _of_size(dims, heads) for dims, heads in sizes}
    equations: dict[str, dict[str, str]] = {}
    without = []
    for circuit, registered in (('score', SCORES), ('value', VALUES)):
        shown = {name for known in by_size.values() for name in known[circuit]}
        equations[circuit] = {n: cls.equation for n, cls in registered.items() if n in shown}
        without += [name for name in registered if name not in shown]
    made = environment(html=True).overlay(loader=jinja2.PackageLoader('experiments.explorer'))
    return made.get_template('explorer.html.j2').render(
        # '<' inside a string of JSON would end the script element early.
        data=json.dumps(by_size, separators=(',', ':')).replace('<', '\\u003c'),
        sizes=[key.split(',') for key in by_size],
        equations=equations,
        without=without,
        light=LIGHT,
        dark=DARK,
    )


def _of_size(dims: int, heads: int) -> dict[str, Any]:
    """Scores and values by name, as JSON."""
    scores = {}
    values = {}
    for name in SCORES:
        if bench := _bench(name, 'vo', dims, heads):
            scores[name] = _parameters(bench, 'score') | {
                'A': _polynomials(bench, 'score'),
                'scale': float(bench.layer.score.scale),
            }
    for name, cls in VALUES.items():
        # One table for all Scores, or one for each of those that share a matrix with the Value.
        partners = {score: score for score in scores} if cls.shares else {'': cls.partner}
        benches = {key: _bench(score, name, dims, heads) for key, score in partners.items()}
        if present := {key: bench for key, bench in benches.items() if bench}:
            values[name] = _parameters([*present.values()][-1], 'value') | {
                'B': {key: _polynomials(bench, 'value') for key, bench in present.items()},
            }
    return {'score': scores, 'value': values}


def _bench(score: str, value: str, dims: int, heads: int) -> Bench | None:
    try:
        return Bench(f'{score}/{value}', 2, dims, heads)
    except ConfigError:
        return None


def _parameters(bench: Bench, circuit: str) -> dict[str, Any]:
    """The parameters of a circuit with their initial numbers in the order of reading."""
    shown = []
    for parameter in bench.parameters_of(circuit):
        heads, *place = parameter.by_head.shape
        shape = [heads, *place] if len(place) > 1 else [heads, 1, *place]
        initial = _initial(parameter)
        shown.append({'name': parameter.name, 'shape': shape, 'initial': initial})
    return {'parameters': shown}


def _initial(parameter: Parameter) -> list[float]:
    """Gains begin at their initial values, matrices at numbers that their name determines."""
    if parameter.attribute.startswith('g_'):
        return parameter.initial.ravel()[parameter.by_head].ravel().tolist()
    rng = np.random.default_rng([3, zlib.crc32(parameter.name.encode())])
    return (rng.integers(-10, 11, parameter.initial.size) / 10).tolist()


def _polynomials(bench: Bench, circuit: str) -> list[Any]:
    """A or B as [head][row][column] polynomials, as text and as terms."""
    first = sum(p.initial.size for p in bench.parameters_of('score')) if circuit == 'value' else 0

    def terms(entry: Any) -> list[list[Any]]:
        """Coefficients with indices, repeated as often as the power says."""
        return [
            [int(number) if number == int(number) else float(number)]
            + [i - first if i >= first else -1 - i for i, n in enumerate(powers) for _ in range(n)]
            for powers, number in entry.terms()
        ]

    def shown(entry: Any) -> dict[str, Any]:
        return {'text': polynomial(entry), 'terms': terms(entry)}

    matrices = bench.AB[circuit == 'value']
    return [[[shown(entry) for entry in row] for row in matrix] for matrix in matrices]
