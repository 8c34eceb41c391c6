"""The equations of a bench as text or LaTeX."""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jinja2
import numpy as np

from qkattn.explore.bench import Bench, generators, kind, rank, sympy
from qkattn.report.prose import environment

# What stands around code in a template of LaTeX, which is full of braces.
LATEX_MARKS: dict[str, Any] = {
    **{'block_start_string': '<%', 'block_end_string': '%>'},
    **{'variable_start_string': '<<', 'variable_end_string': '>>'},
}
POWERS = {'^-1': '^{-1}', '^-2': '^{-2}', '^-T': r'^{-\top}', '^T': r'^{\top}'}


def worked(bench: Bench, *, latex: bool = False) -> str:
    """Parameters, A, scores, the softmax's input, B and output."""
    loader, marks = jinja2.PackageLoader('qkattn.explore'), LATEX_MARKS if latex else {}
    made = environment(html=False).overlay(loader=loader, **marks)
    made.filters = {
        **made.filters,
        'polynomial': lambda entry: polynomial(entry, latex),
        'number': lambda value: number(value, latex),
        'equation': equation_latex if latex else str,
        'matrix': matrix_latex if latex else matrix_text,
    }
    template = made.get_template('bench.tex.j2' if latex else 'bench.txt.j2')
    N, T, D = bench.heads, bench.tokens, bench.dims
    shapes = {'a': (N, D, D), 's': (N, T, T), 'p': (N, T, T), 'x': (1, T, D), 'b': (N, D, D)}
    ring, (a_NDE, s_NTS, p_NTS, (x_TD,), b_NDE) = generators(shapes)
    _, (out_1TE,) = generators({'out': (1, T, D)})
    A_NDE, B_NDE = (named(*m, ring) for m in zip(bench.AB, (a_NDE, b_NDE), strict=True))
    scores = np.einsum('td,nde,se->nts', x_TD, A_NDE, x_TD)
    output = np.einsum('nts,sd,nde->te', p_NTS, x_TD, B_NDE)
    return template.render(
        bench=bench,
        circuits=[
            _circuit(bench, 'A', 'score', A_NDE, a_NDE),
            _circuit(bench, 'B', 'value', B_NDE, b_NDE),
        ],
        scores=list(zip(s_NTS.flat, scores.flat, strict=True)),
        output=list(zip(out_1TE.flat, output.flat, strict=True)),
    )


def _circuit(
    bench: Bench, name: str, circuit: str, named_NDE: np.ndarray, symbols_NDE: np.ndarray
) -> dict[str, Any]:
    M_NDE = bench.AB[circuit == 'value']
    entries = zip(symbols_NDE.flat, named_NDE.flat, M_NDE.flat, strict=True)
    return {
        'name': name,
        'equation': type(getattr(bench.layer, circuit)).equation,
        'parameters': bench.parameters_of(circuit),
        'definitions': [(symbol, entry) for symbol, label, entry in entries if symbol == label],
        'heads': [
            {'kind': kind(M_DE), 'rank': rank(M_DE), 'rows': rows.tolist()}
            for M_DE, rows in zip(M_NDE, named_NDE, strict=True)
        ],
    }


def named(M_NDE: np.ndarray, symbols_NDE: np.ndarray, ring: Any) -> np.ndarray:
    """The matrices in the symbols of `ring`; equal entries share one, numbers stay numbers."""
    known: dict[Any, Any] = {}
    out = np.empty_like(M_NDE)
    for place, entry in np.ndenumerate(M_NDE):
        if -entry in known:
            out[place] = -known[-entry]
        elif entry.is_ground:
            out[place] = ring(entry.LC)
        else:
            out[place] = known.setdefault(entry, symbols_NDE[place])
    return out


def polynomial(entry: Any, latex: bool) -> str:
    """A polynomial with the factors of each term in the order of its ring."""
    text, power = '', '{{{}}}^{{{}}}' if latex else '{}^{}'
    symbols = [symbol_latex(str(s)) if latex else str(s) for s in entry.ring.symbols]
    for powers, value in entry.terms():
        factors = [
            symbol if n == 1 else power.format(symbol, n)
            for symbol, n in zip(symbols, powers, strict=True)
            if n
        ]
        if abs(value) != 1 or not factors:
            factors.insert(0, number(abs(value), latex))
        sign = (' - ' if value < 0 else ' + ') if text else ('-' if value < 0 else '')
        text += sign + ' '.join(factors)
    return text or '0'


def number(value: float, latex: bool) -> str:
    """A positive number as a fraction or its square root, if equal in float64."""
    square = Fraction(float(value) ** 2).limit_denominator(10_000)
    if abs(float(square) - float(value) ** 2) > 1e-12:
        return f'{float(value):g}'
    root = sympy().sqrt(sympy().Rational(square.numerator, square.denominator))
    return sympy().latex(root) if latex else str(root)


def matrix_text(rows: Sequence[Sequence[Any]], name: str) -> str:
    """A = [ a11  a12 ] over as many lines as there are rows."""
    cells = [[polynomial(entry, False) for entry in row] for row in rows]
    width = max(len(cell) for row in cells for cell in row)
    lines = [f'[ {"  ".join(f"{cell:>{width}}" for cell in row)} ]' for row in cells]
    return f'  {name} = ' + ('\n' + ' ' * len(f'  {name} = ')).join(lines)


def matrix_latex(rows: Sequence[Sequence[Any]]) -> str:
    r"""A pmatrix."""
    lines = [' & '.join(polynomial(entry, True) for entry in row) for row in rows]
    return r'\begin{pmatrix} ' + r' \\ '.join(lines) + r' \end{pmatrix}'


def symbol_latex(symbol: str) -> str:
    """q12 -> q_{12}, q[1]12 -> q^{(1)}_{12}, sign1 -> \\mathrm{sign}_{1}."""
    stem, head, place = re.fullmatch(r'([A-Za-z]+)(?:\[(\d)\])?(\d+)', symbol).groups()
    stem = stem if len(stem) == 1 else rf'\mathrm{{{stem}}}'
    return stem + (f'^{{({head})}}' if head else '') + f'_{{{place}}}'


def equation_latex(text: str) -> str:
    """'W_Q[n] W_K[n]^T' -> 'W_{Q}^{(n)} {W_{K}^{(n)}}^{\\top}'; words after a comma as text."""
    formula, comma, words = text.partition(',')
    for plain, power in POWERS.items():
        formula = formula.replace(plain, power)
    formula = re.sub(r'([A-Za-z])_(\w+)', r'\1_{\\mathrm{\2}}', formula)
    formula = re.sub(r'([A-Za-z]+(?:_\{\\mathrm\{\w+\}\})?)\[n\]', r'{\1^{(n)}}', formula)
    formula = formula.replace('diag', r'\operatorname{diag}')
    return formula + (rf',\ \text{{{words.strip()}}}' if comma else '')
