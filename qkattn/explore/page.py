"""The interactive page: self-contained HTML, no server, no network.

Its table holds A[n] and B[n] as polynomials from the variants' own classes. A polynomial is a list
of terms [coefficient, index, index, ...]: the product of the coefficient and the entries with these
indices. Index i >= 0 is an entry of the circuit's own parameters in the order of reading, -1 - i
one of the Score that a Value shares.
"""

import json
from collections.abc import Iterable
from typing import Any

import jinja2

from qkattn.attention import SCORES, VALUES
from qkattn.errors import ConfigError
from qkattn.explore.bench import Bench, kind
from qkattn.report.figures.style import DARK, LIGHT
from qkattn.report.prose import environment

# d_model and heads that the page offers.
SIZES = ((2, 1), (2, 2), (3, 1), (4, 1), (4, 2))


def page(sizes: Iterable[tuple[int, int]] = SIZES) -> str:
    """The page as an HTML document that offers these pairs of d_model and number of heads."""
    loader = jinja2.PackageLoader('qkattn.explore')
    made = environment(html=True).overlay(loader=loader)
    # '<' inside a string of JSON would end the script element early.
    data = json.dumps(table(sizes), separators=(',', ':')).replace('<', '\\u003c')
    names = ('explorer.css', 'explorer.compute.js', 'explorer.show.js', 'explorer.act.js')
    css, *scripts = (loader.get_source(made, name)[0] for name in names)
    template = made.get_template('explorer.html.j2')
    return template.render(data=data, light=LIGHT, dark=DARK, css=css, scripts=scripts)


def table(sizes: Iterable[tuple[int, int]] = SIZES) -> dict[str, Any]:
    """All variants at all sizes, as JSON; 'without' names those that have no polynomials at any."""
    by_size = {f'{dims},{heads}': _of_size(dims, heads) for dims, heads in sizes}
    equations, without = {}, {}
    for circuit, registered in (('score', SCORES), ('value', VALUES)):
        shown = {name for known in by_size.values() for name in known[circuit]}
        equations[circuit] = {name: cls.equation for name, cls in registered.items()}
        without[circuit] = [name for name in registered if name not in shown]
    return {'equations': equations, 'sizes': by_size, 'without': without}


def _of_size(dims: int, heads: int) -> dict[str, Any]:
    scores, values = {}, {}
    for name in SCORES:
        if bench := _bench(name, 'vo', dims, heads):
            scores[name] = {
                'parameters': _parameters(bench, 'score'),
                'A': _polynomials(bench, 'score'),
                'kind': _kind(bench, 'score'),
                'scale': bench.scale,
            }
    for name, cls in VALUES.items():
        # One table for all Scores, or one for each of those that share a matrix with the Value.
        partners = {score: score for score in scores} if cls.shares else {'': cls.partner}
        benches = {key: _bench(score, name, dims, heads) for key, score in partners.items()}
        if present := {key: bench for key, bench in benches.items() if bench}:
            values[name] = {
                'parameters': _parameters([*present.values()][-1], 'value'),
                'B': {key: _polynomials(bench, 'value') for key, bench in present.items()},
                'kind': {key: _kind(bench, 'value') for key, bench in present.items()},
            }
    return {'score': scores, 'value': values}


def _bench(score: str, value: str, dims: int, heads: int) -> Bench | None:
    try:
        return Bench(f'{score}/{value}', 2, dims, heads)
    except ConfigError:
        return None


def _parameters(bench: Bench, circuit: str) -> list[dict[str, Any]]:
    """Parameters as the page shows them; gains start at their initial values."""
    shown = []
    for parameter in bench.parameters_of(circuit):
        heads, *place = parameter.by_head.shape
        initial = parameter.initial.ravel()[parameter.by_head].ravel().tolist()
        shown.append(
            {
                'name': parameter.name,
                'stem': parameter.stem.replace('_', ''),
                'shape': [heads, *place] if len(place) > 1 else [heads, 1, *place],
                'vector': len(place) == 1,
                'initial': initial if parameter.attribute.startswith('g_') else None,
            }
        )
    return shown


def _kind(bench: Bench, circuit: str) -> str:
    """The common kind of the matrices of all heads."""
    kinds = {kind(matrix) for matrix in bench.AB[circuit == 'value']}
    return kinds.pop() if len(kinds) == 1 else 'general'


def _polynomials(bench: Bench, circuit: str) -> list[Any]:
    """A or B as [head][row][column] polynomials."""
    first = sum(p.initial.size for p in bench.parameters_of('score')) if circuit == 'value' else 0

    def terms(polynomial: Any) -> list[list[Any]]:
        """Coefficients with indices, repeated as often as the power says."""
        return [
            [int(number) if number == int(number) else float(number)]
            + [i - first if i >= first else -1 - i for i, n in enumerate(powers) for _ in range(n)]
            for powers, number in polynomial.terms()
        ]

    matrices = bench.AB[circuit == 'value']
    return [[[terms(entry) for entry in row] for row in matrix] for matrix in matrices]
