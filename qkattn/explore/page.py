"""The page on which numbers are dragged: self-contained HTML, no server, no network.

Its table holds A[n] and B[n] as polynomials from the variants' own classes. A polynomial is a list
of terms [coefficient, index, index, ...]: the product of the coefficient and the entries with these
indices. Index i >= 0 is an entry of the circuit's own parameters in the order of reading, -1 - i
one of the Score that a Value shares.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
import numpy as np

from qkattn.attention import SCORES, VALUES, AttentionSpec, registry
from qkattn.errors import ConfigError, SpecError
from qkattn.explore.bench import Bench, Parameter, kind, sympy
from qkattn.report.figures.style import DARK, LIGHT

KINDS: dict[str, Mapping[str, Any]] = {'score': SCORES, 'value': VALUES}
# d_model and heads that the page offers.
SIZES = ((2, 1), (2, 2), (3, 1), (4, 1), (4, 2))


def page(sizes: Iterable[tuple[int, int]] = SIZES) -> str:
    """The page as an HTML document that offers these pairs of d_model and number of heads."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader('qkattn.explore'),
        autoescape=jinja2.select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    # '<' inside a string of JSON would end the script element early.
    data = json.dumps(table(sizes), separators=(',', ':')).replace('<', '\\u003c')
    css, *scripts = (
        environment.loader.get_source(environment, f'explorer.{name}')[0]
        for name in ('css', 'compute.js', 'show.js', 'act.js')
    )
    template = environment.get_template('explorer.html.j2')
    return template.render(data=data, light=LIGHT, dark=DARK, css=css, scripts=scripts)


def table(sizes: Iterable[tuple[int, int]] = SIZES) -> dict[str, Any]:
    """All variants at all sizes, as JSON; 'without' names those that have no polynomials at any."""
    by_size = {f'{dims},{heads}': _of_size(dims, heads) for dims, heads in sizes}
    shown = {kind: {name for kinds in by_size.values() for name in kinds[kind]} for kind in KINDS}
    return {
        'equations': {
            kind: {name: cls.equation for name, cls in known.items()}
            for kind, known in KINDS.items()
        },
        'sizes': by_size,
        'without': {
            kind: [n for n in known if n not in shown[kind]] for kind, known in KINDS.items()
        },
    }


def _of_size(dims: int, heads: int) -> dict[str, Any]:
    scores, values = {}, {}
    for name in SCORES:
        bench = _bench(name, 'vo', dims, heads)
        if bench is not None:
            polynomials, kinds = _polynomials(bench, 'score')
            about = _parameters(bench.of('score'))
            scale = float(bench.layer.score.scale)
            scores[name] = {'parameters': about, 'A': polynomials, 'kind': kinds, 'scale': scale}
    for name, cls in VALUES.items():
        # One table for all Scores, or one for each of those that share a matrix with the Value.
        found = {}
        for score in scores if cls.shares else (cls.partner,):
            bench = _bench(score, name, dims, heads)
            if bench is not None:
                about = _parameters(bench.of('value'))
                found['' if not cls.shares else score] = _polynomials(bench, 'value')
        if found:
            values[name] = {
                'parameters': about,
                'B': {score: polynomials for score, (polynomials, _) in found.items()},
                'kind': {score: kinds for score, (_, kinds) in found.items()},
            }
    return {'score': scores, 'value': values}


def _bench(score: str, value: str, dims: int, heads: int) -> Bench | None:
    try:
        registry.check(AttentionSpec(score=score, value=value, d_model=dims, num_heads=heads))
        return Bench(f'{score}/{value}', 2, dims, heads)
    except (ConfigError, SpecError):
        return None


def _parameters(parameters: list[Parameter]) -> list[dict[str, Any]]:
    """How the page shows them; gains begin with their initial values, matrices with the page's."""
    return [
        {
            'name': parameter.name,
            'stem': parameter.stem.replace('_', ''),
            'shape': list(parameter.by_head.shape),
            'vector': parameter.is_vector,
            'initial': parameter.initial.ravel()[parameter.by_head].ravel().tolist()
            if parameter.attribute.startswith('g_')
            else None,
        }
        for parameter in parameters
    ]


def _polynomials(bench: Bench, circuit: str) -> tuple[list[Any], str]:
    """A or B as [head][row][column] polynomials, and the kind that all heads have."""
    names = [f'{p.attribute}{place}' for p in bench.parameters for place in range(p.initial.size)]
    ring = sympy().polys.rings.PolyRing(names, sympy().RR)
    entries, arrays, place = list(ring.gens), [], {}
    for own in bench.parameters:
        flat = np.empty(own.initial.size, object)
        flat[:] = entries[: flat.size]
        entries = entries[flat.size :]
        arrays.append(flat.reshape(own.initial.shape))
    for part in ('score', 'value'):
        index = 0
        for parameter in bench.of(part):
            first = names.index(f'{parameter.attribute}0')
            for position in parameter.by_head.flat:
                place[first + position] = index if part == circuit else -1 - index
                index += 1
    matrices = bench.matrices(arrays, ring.ground_new)[circuit == 'value']
    kinds = {kind(matrix) for matrix in matrices}

    def terms(polynomial: Any) -> list[list[Any]]:
        """Coefficients with indices, repeated as often as the power says."""
        return [
            [_short(float(coefficient))]
            + sorted((place[i] for i, n in enumerate(powers) for _ in range(n)), key=_reading)
            for powers, coefficient in polynomial.terms()
            if coefficient
        ]

    rows = [[[terms(entry) for entry in row] for row in matrix] for matrix in matrices]
    return rows, kinds.pop() if len(kinds) == 1 else 'general'


def _reading(index: int) -> tuple[bool, int]:
    """Entries of the Score stand before those of the Value."""
    return index >= 0, abs(index)


def _short(number: float) -> float | int:
    return int(number) if number == int(number) else number
