"""The interactive page: self-contained HTML, no server, no network.

The page holds A[n] and B[n] as polynomials. A polynomial is a list of terms
[coefficient, index, index, ...], where each index is a factor. Index i >= 0 is entry i of the
circuit's own parameters. Index -1 - i is entry i of the Score whose parameters a Value shares.
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

# The sizes of the page, as (d_model, number of heads).
SIZES = ((2, 1), (2, 2), (3, 1), (4, 1), (4, 2))


def page(sizes: Iterable[tuple[int, int]] = SIZES) -> str:
    """Returns the page as an HTML document. `sizes` are pairs of d_model and number of heads."""
    table_by_size = {f'{dims},{heads}': _table(dims, heads) for dims, heads in sizes}
    equations: dict[str, dict[str, str]] = {'score': {}, 'value': {}}
    not_shown = []  # scores and values without a matrix at any size
    for circuit, classes in (('score', SCORES), ('value', VALUES)):
        for name, cls in classes.items():
            if any(name in table[circuit] for table in table_by_size.values()):
                equations[circuit][name] = cls.equation
            else:
                not_shown.append(name)
    templates = environment(html=True).overlay(loader=jinja2.PackageLoader('experiments.explorer'))
    data = json.dumps(table_by_size, separators=(',', ':'))
    return templates.get_template('explorer.html.j2').render(
        data=data.replace('<', '\\u003c'),  # '</script>' in a string would end the script
        sizes=[size.split(',') for size in table_by_size],  # '4,2' -> ['4', '2']
        equations=equations,
        without=not_shown,
        light=LIGHT,
        dark=DARK,
    )


def _table(dims: int, heads: int) -> dict[str, Any]:
    """Returns the scores and values that can be shown at a size, for JSON.

    For example:

        {'score': {'qk': {'parameters': ..., 'A': ..., 'scale': 0.7}, 'shared_qk': ...},
         'value': {'vo': {'parameters': ..., 'B': {'': ...}},
                   'k_is_v': {'parameters': ..., 'B': {'qk': ..., 'shared_qk': ...}}}}

    The value k_is_v shares W_K with its score, so it has a matrix B for each score.
    """
    scores = {}
    for name in SCORES:
        bench = _bench(name, value='vo', dims=dims, heads=heads)
        if bench is not None:
            scores[name] = {
                'parameters': _parameters(bench, 'score'),
                'A': _polynomials(bench, 'score'),
                'scale': float(bench.layer.score.scale),
            }
    values = {}
    for name, cls in VALUES.items():
        # The score that each matrix B is computed with, by the key of B.
        score_by_key = {'': cls.partner}
        if cls.shares:  # parameters with its score
            score_by_key = {score: score for score in scores}
        matrices = {}
        for key, score in score_by_key.items():
            bench = _bench(score, value=name, dims=dims, heads=heads)
            if bench is not None:
                matrices[key] = _polynomials(bench, 'value')
                parameters = _parameters(bench, 'value')  # the same with every score
        if matrices:
            values[name] = {'parameters': parameters, 'B': matrices}
    return {'score': scores, 'value': values}


def _bench(score: str, value: str, dims: int, heads: int) -> Bench | None:
    """Returns the bench of a variant; None if it cannot be shown at this size."""
    try:
        return Bench(f'{score}/{value}', tokens=2, dims=dims, heads=heads)
    except ConfigError:
        return None


def _parameters(bench: Bench, circuit: str) -> list[dict[str, Any]]:
    """Returns the parameters of a circuit as dicts. The shapes are [heads, rows, columns]."""
    parameters = []
    for parameter in bench.parameters_of(circuit):
        shape = list(parameter.by_head.shape)
        if len(shape) == 2:
            shape.insert(1, 1)  # a vector is a matrix of one row
        initial = _initial(parameter)
        parameters.append({'name': parameter.name, 'shape': shape, 'initial': initial})
    return parameters


def _initial(parameter: Parameter) -> list[float]:
    """Returns the entries that the page first shows, ordered by head, row and column.

    Gains have their initial values. Matrices have random values that depend on the name only.
    """
    is_gain = parameter.attribute.startswith('g_')
    if is_gain:
        flat = parameter.initial.ravel()
        return flat[parameter.by_head].ravel().tolist()
    checksum_of_name = zlib.crc32(parameter.name.encode())
    rng = np.random.default_rng([3, checksum_of_name])
    tenths = rng.integers(-10, 11, parameter.initial.size)
    return (tenths / 10).tolist()


def _polynomials(bench: Bench, circuit: str) -> list[Any]:
    """Returns A or B as [head][row][column] polynomials, each as text and as terms."""
    num_score_symbols = 0
    if circuit == 'value':
        num_score_symbols = sum(p.initial.size for p in bench.parameters_of('score'))

    def to_json(entry: Any) -> dict[str, Any]:
        terms = []
        for powers, coefficient in entry.terms():
            terms.append(_term(powers, coefficient, num_score_symbols))
        return {'text': polynomial(entry), 'terms': terms}

    entries_to_json = np.vectorize(to_json, otypes=[object])
    return entries_to_json(bench.matrix_of(circuit)).tolist()


def _term(powers: Iterable[int], coefficient: Any, num_score_symbols: int) -> list[Any]:
    """Returns a term of a polynomial as [coefficient, index, index, ...].

    The index of an entry v_i of a Value is i, and the index of an entry s_i of its Score is -1 - i.
    For example, 5 s_0 v_1^2 becomes [5, -1, 1, 1].

    Args:
        powers: The power of each symbol. The symbols of the Score come first.
        coefficient: The coefficient of the term.
        num_score_symbols: The number of symbols of the Score. It is 0 if the polynomial belongs to
            a Score, whose own indices are not negative.
    """
    is_whole = coefficient == int(coefficient)
    term: list[Any] = [int(coefficient) if is_whole else float(coefficient)]
    for position, power in enumerate(powers):
        index = position - num_score_symbols
        if index < 0:  # a symbol of the Score
            index = -1 - position
        term.extend([index] * power)
    return term
