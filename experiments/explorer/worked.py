"""The equations of a bench as text or LaTeX."""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from experiments.explorer.bench import Bench
from experiments.explorer.symbolic import generators, rank
from qkattn.report.prose import counted


def worked(bench: Bench, *, latex: bool = False) -> str:
    """Returns the equations of a bench as plain text, or as LaTeX that needs amsmath.

    The sections are A, scores s, probabilities p, B, and output. Scores and output are written with
    symbols for the entries of A and B, such as a12.
    """
    N = bench.heads
    T = bench.tokens
    D = bench.dims

    # Arrays of symbols; a_NDE and b_NDE stand for the entries of A_NDE and B_NDE. E = D, S = T.
    shapes = {'a': (N, D, D), 's': (N, T, T), 'p': (N, T, T), 'x': (1, T, D), 'b': (N, D, D)}
    ring, (a_NDE, s_NTS, p_NTS, x_1TD, b_NDE) = generators(shapes)
    _, (out_1TE,) = generators({'out': (1, T, D)})
    A_NDE = abbreviated(bench.matrix_of('score'), a_NDE, ring)
    B_NDE = abbreviated(bench.matrix_of('value'), b_NDE, ring)
    x_TD = x_1TD[0]
    scores_NTS = np.einsum('td,nde,se->nts', x_TD, A_NDE, x_TD)
    output_TE = np.einsum('nts,sd,nde->te', p_NTS, x_TD, B_NDE)

    n = '[n]' if N > 1 else ''
    scale = float(bench.layer.score.scale)
    scaled_s = f's{n}' if scale == 1 else f'{number(scale)} s{n}'
    output_equation = 'out = sum_n p[n] x B[n]' if N > 1 else 'out = p x B'
    sections = {  # lines by heading
        f'A[n] = {bench.layer.score.equation}': _circuit(bench, 'score', A_NDE, a_NDE),
        f's{n} = x A{n} x^T': _equations(s_NTS, scores_NTS),
        f'p{n}_ts = exp({scaled_s}_ts) / sum_u exp({scaled_s}_tu)': [],
        f'B[n] = {bench.layer.value.equation}': _circuit(bench, 'value', B_NDE, b_NDE),
        output_equation: _equations(out_1TE, output_TE),
    }
    title = f'{bench.variant}: {T} tokens, d_model {D}, {counted(N, "head")}'
    return _latex(title, sections) if latex else _text(title, sections)


def _circuit(
    bench: Bench, circuit: str, short_NDE: np.ndarray, symbols_NDE: np.ndarray
) -> list[str]:
    """Returns the lines of a score or value: parameters, symbols, and the matrix of each head.

    For example, the lines of shared_qk, whose matrix is symmetric:

        W_Q: 2 x 2
        a11 = q11^2 + q12^2
        a12 = q11 q21 + q12 q22
        a22 = q21^2 + q22^2
        A = [a11, a12; a12, a22], rank 2

    Args:
        circuit: 'score' or 'value'.
        short_NDE: The matrix of the circuit, as returned by `abbreviated`.
        symbols_NDE: The symbols for its entries.
    """
    lines = []
    for parameter in bench.parameters_of(circuit):
        heads, *sizes = parameter.by_head.shape
        line = f'{parameter.name}: {" x ".join(map(str, sizes))}'
        if heads > 1:
            line += ', in each head'
        lines.append(line)

    # Equal entries share a symbol, so some symbols are not used.
    M_NDE = bench.matrix_of(circuit)  # polynomials in the parameters
    is_used_NDE = symbols_NDE == short_NDE
    lines += _equations(symbols_NDE[is_used_NDE], M_NDE[is_used_NDE])

    letter = 'A' if circuit == 'score' else 'B'
    for head, (short_DE, M_DE) in enumerate(zip(short_NDE, M_NDE, strict=True), start=1):
        name = f'{letter}[{head}]' if len(short_NDE) > 1 else letter
        rows = [', '.join(map(polynomial, row)) for row in short_DE]
        lines.append(f'{name} = [{"; ".join(rows)}], rank {rank(M_DE)}')
    return lines


def _equations(lefts: np.ndarray, rights: np.ndarray) -> list[str]:
    """Returns 'left = right' for each pair of entries."""
    pairs = zip(lefts.flat, rights.flat, strict=True)
    return [f'{polynomial(left)} = {polynomial(right)}' for left, right in pairs]


def abbreviated(M_NDE: np.ndarray, symbols_NDE: np.ndarray, ring: Any) -> np.ndarray:
    """Replaces each polynomial by a symbol of `ring`, and equal polynomials by the same symbol.

    For example, [[p, q], [-q, 1]] becomes [[a11, a12], [-a12, 1]] with the symbols a11 to a22.
    """
    symbol_by_polynomial: dict[Any, Any] = {}
    short_NDE = np.empty_like(M_NDE)
    for index, entry in np.ndenumerate(M_NDE):
        if -entry in symbol_by_polynomial:
            short_NDE[index] = -symbol_by_polynomial[-entry]
        elif entry.is_ground:  # a constant
            coefficient = entry.LC
            short_NDE[index] = ring(coefficient)
        else:
            short_NDE[index] = symbol_by_polynomial.setdefault(entry, symbols_NDE[index])
    return short_NDE


def polynomial(entry: Any) -> str:
    """Formats a polynomial, such as '-2 a11 x21^2 + x22'."""
    text = ''
    for powers, coefficient in entry.terms():
        factors = []
        is_constant = not any(powers)
        if abs(coefficient) != 1 or is_constant:  # '-x22' rather than '-1 x22'
            factors.append(number(abs(coefficient)))
        for symbol, power in zip(entry.ring.symbols, powers, strict=True):
            if power == 1:
                factors.append(str(symbol))
            elif power > 1:
                factors.append(f'{symbol}^{power}')
        if text:
            text += ' - ' if coefficient < 0 else ' + '
        elif coefficient < 0:
            text = '-'
        text += ' '.join(factors)
    return text or '0'


def number(value: float) -> str:
    """Formats a positive number as a fraction or the square root of a fraction, if possible.

    0.5 gives '1/2', 2**-0.5 gives 'sqrt(1/2)', and 0.123456789 gives '0.123457'.
    """
    for power, template in ((1, '{}'), (2, 'sqrt({})')):
        raised = float(value) ** power
        fraction = Fraction(raised).limit_denominator(10_000)
        # 0 is near to every small number.
        if fraction and abs(float(fraction) - raised) < 1e-12:
            return template.format(fraction)
    return f'{float(value):g}'


def _text(title: str, sections: Mapping[str, list[str]]) -> str:
    """Formats a title, and headings with indented lines, as plain text."""
    blocks = ['\n  '.join([heading, *lines]) for heading, lines in sections.items()]
    return '\n\n'.join([title, *blocks]) + '\n'


def _latex(title: str, sections: Mapping[str, list[str]]) -> str:
    """Formats a title as a comment, and headings with lines aligned at the first '=' or ':'."""
    blocks = [f'% {title}']
    for heading, lines in sections.items():
        block = rf'\[ {in_latex(heading)} \]'
        if lines:
            # LaTeX aligns lines at '&', and '\\' ends a line.
            aligned_lines = [re.sub('([=:])', r'&\1', in_latex(line), count=1) for line in lines]
            rows = ' \\\\\n  '.join(aligned_lines)
            block += f'\n\\begin{{align*}}\n  {rows}\n\\end{{align*}}'
        blocks.append(block)
    return '\n\n'.join(blocks) + '\n'


# Patterns of plain text and their LaTeX, applied in this order.
_LATEX = (
    # Symbols: 'a[2]12', 'a12'. Names of one letter are italic.
    (r'\b([A-Za-z]+)\[(\d)\](\d+)', r'\\mathrm{\1}_{\2,\3}'),
    (r'\b([A-Za-z]+)(\d+)', r'\\mathrm{\1}_{\2}'),
    (r'\\mathrm\{(\w)\}', r'\1'),
    # Indices: 'W_Q', 's[n]_ts'.
    (r'(?<=[A-Za-z\]])_(\w+)', r'_{\\mathrm{\1}}'),
    # Indices of several words: 'q_outer' in 'W_q_outer'.
    (r'_(?=\w+\})', r'\\ '),
    # Powers: '^T', '^-T', '^-1', '^2'.
    (r'\^(-?)T\b', r'^{\1\\top}'),
    (r'\^(-?\d+)', r'^{\1}'),
    # Functions: 'exp(', 'sum_u', 'diag', 'sqrt(1/2)'.
    (r'\b(exp|sum)(?=[_(])', r'\\\1'),
    (r'\bdiag\b', r'\\operatorname{diag}'),
    (r'sqrt\((.*?)\)', r'\\sqrt{\1}'),
    # Products of sizes: '2 x 2'.
    (r'(?<=\d) x (?=\d)', r' \\times '),
    # Words at the end: ', rank R'.
    (r', ([A-Za-z][\w ]*)$', r',\\ \\text{\1}'),
)


def in_latex(text: str) -> str:
    r"""Converts text to LaTeX: 'A[n]^T, rank R' -> 'A[n]^{\top},\ \text{rank R}'."""
    for pattern, replacement in _LATEX:
        text = re.sub(pattern, replacement, text)
    matrix = re.search(r'= \[(.*)\]', text)  # '= [a, b; c, d]'
    if matrix:
        rows = matrix[1].replace(', ', ' & ').replace('; ', r' \\ ')
        text = text.replace(matrix[0], rf'= \begin{{pmatrix}} {rows} \end{{pmatrix}}')
    return text
