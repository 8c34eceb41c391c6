"""A bench worked out: its equations as text or LaTeX."""

import re
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np

from qkattn.explore.bench import Bench, Parameter, dimension, grid, kind, named, rank, sympy, ties

POWERS = {'^-1': '^{-1}', '^-2': '^{-2}', '^-T': r'^{-\top}', '^T': r'^{\top}'}


def worked(bench: Bench, *, latex: bool = False) -> str:
    """Parameters, A, scores, the softmax's input, B, output, and how many change nothing."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader('qkattn.explore'),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        block_start_string='<%' if latex else '{%',
        block_end_string='%>' if latex else '%}',
        variable_start_string='<<' if latex else '{{',
        variable_end_string='>>' if latex else '}}',
    )
    environment.filters |= {
        'symbol': symbol_latex if latex else str,
        'equation': equation_latex if latex else str,
        'matrix': matrix_latex if latex else matrix_text,
        'number': sympy().latex if latex else str,
        'polynomial': lambda pair: _sum(pair[0], pair[1], latex),
    }
    template = environment.get_template('bench.tex.j2' if latex else 'bench.txt.j2')
    return template.render(**_facts(bench))


def _facts(bench: Bench) -> dict[str, Any]:
    """What the templates show."""
    circuits = []
    for name, circuit, matrices in zip('AB', ('score', 'value'), bench.AB, strict=True):
        circuits.append(_circuit(bench, name, circuit, matrices))
    A_NDE, B_NDE = (circuit['named'] for circuit in circuits)
    T, heads = bench.tokens, [f'[{n + 1}]' if bench.heads > 1 else '' for n in range(bench.heads)]
    s_NTS, p_NTS = (np.stack([grid(c, T, T, head) for head in heads]) for c in 'sp')
    scores = bench.scores(A_NDE)
    out_TE = grid('out', T, bench.dims)
    output = bench.output(p_NTS, B_NDE)
    x, entries = list(bench.x_TD.flat), [*A_NDE.flat, *p_NTS.flat]
    return {
        'bench': bench,
        'circuits': circuits,
        'scores': list(zip(s_NTS.flat, ((e, [*entries, *x]) for e in scores.flat), strict=True)),
        'equal': [[s_NTS[place] for place in group] for group in ties(scores)],
        'output': list(
            zip(out_TE.flat, ((e, [*entries, *x, *B_NDE.flat]) for e in output.flat), strict=True)
        ),
        'dimension': dimension(*bench.AB),
        'scaled': '' if bench.scale == 1 else bench.scale,
    }


def _circuit(bench: Bench, name: str, circuit: str, matrices: np.ndarray) -> dict[str, Any]:
    parameters = bench.of(circuit)
    entries = named(name.lower(), matrices)
    order = [entry for parameter in _all(bench) for entry in parameter.symbols.flat]
    definitions = {
        label: (entry, order)
        for label, entry in zip(entries.flat, matrices.flat, strict=True)
        if label.is_Symbol
    }
    cls = type(getattr(bench.layer, circuit))
    return {
        'name': name,
        'circuit': circuit,
        'equation': cls.equation,
        'parameters': parameters,
        'count': sum(parameter.initial.size for parameter in parameters),
        'named': entries,
        'definitions': definitions,
        'heads': [
            {'kind': kind(M_DE), 'rank': rank(M_DE), 'rows': rows.tolist()}
            for M_DE, rows in zip(matrices, entries, strict=True)
        ],
    }


def _all(bench: Bench) -> list[Parameter]:
    return [*bench.of('score'), *bench.of('value')]


def _sum(expression: Any, order: Sequence[Any], latex: bool) -> str:
    """A polynomial with the factors of each term in the given order."""
    symbols = [s for s in dict.fromkeys(order) if s in expression.free_symbols]
    if not symbols:
        return sympy().latex(expression) if latex else str(expression)
    terms = sympy().Poly(expression, *symbols).terms()
    text = ''
    for powers, coefficient in terms:
        negative = coefficient.could_extract_minus_sign()
        coefficient = abs(coefficient) if negative else coefficient
        factors = [
            _power(symbol, power, latex)
            for symbol, power in zip(symbols, powers, strict=True)
            if power
        ]
        if coefficient != 1 or not factors:
            factors.insert(0, sympy().latex(coefficient) if latex else str(coefficient))
        sign = (' - ' if negative else ' + ') if text else ('-' if negative else '')
        text += sign + ' '.join(factors)
    return text


def matrix_text(rows: Sequence[Sequence[Any]], name: str) -> str:
    """A = [ a11  a12 ] over as many lines as there are rows."""
    width = max(len(str(entry)) for row in rows for entry in row)
    lines = ['  '.join(f'{entry!s:>{width}}' for entry in row) for row in rows]
    first = f'{name} = '
    return '\n'.join(
        f'  {first if index == 0 else " " * len(first)}[ {line} ]'
        for index, line in enumerate(lines)
    )


def matrix_latex(rows: Sequence[Sequence[Any]]) -> str:
    r"""A pmatrix."""
    lines = [' & '.join(map(symbol_latex, row)) for row in rows]
    return r'\begin{pmatrix} ' + r' \\ '.join(lines) + r' \end{pmatrix}'


def _power(symbol: Any, power: int, latex: bool) -> str:
    text = symbol_latex(symbol) if latex else str(symbol)
    if power == 1:
        return text
    return f'{{{text}}}^{{{power}}}' if latex else f'{text}^{power}'


def symbol_latex(symbol: Any) -> str:
    """q12 -> q_{12}, q[1]12 -> q^{(1)}_{12}, -a12 -> -a_{12}; numbers as sympy writes them."""
    match = re.fullmatch(r'(-?)([A-Za-z]+)(?:\[(\d)\])?(\d+)', str(symbol))
    if match is None:
        return str(sympy().latex(symbol))
    sign, stem, head, place = match.groups()
    stem = stem if len(stem) == 1 else rf'\mathrm{{{stem}}}'
    return f'{sign}{stem}' + (f'^{{({head})}}' if head else '') + f'_{{{place}}}'


def equation_latex(text: str) -> str:
    """'W_Q[n] W_K[n]^T' -> 'W_{Q}^{(n)} {W_{K}^{(n)}}^{\\top}'; words after a comma as text."""
    formula, comma, words = text.partition(',')
    for plain, power in POWERS.items():
        formula = formula.replace(plain, power)
    formula = re.sub(r'([A-Za-z])_(\w+)', r'\1_{\\mathrm{\2}}', formula)
    formula = re.sub(r'([A-Za-z]+(?:_\{\\mathrm\{\w+\}\})?)\[n\]', r'{\1^{(n)}}', formula)
    formula = formula.replace('diag', r'\operatorname{diag}')
    return formula + (rf',\ \text{{{words.strip()}}}' if comma else '')
