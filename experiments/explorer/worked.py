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
    """Returns the equations of a bench: A with its parameters, scores, attention, B, and output.

    The scores and the output are written with symbols for the entries of A and B, such as a12. The
    text is plain, or LaTeX that needs amsmath.
    """
    N = bench.heads
    T = bench.tokens
    D = bench.dims

    # Lower-case letters are symbols, and capitals are the matrices that they stand for.
    shapes = {'a': (N, D, D), 's': (N, T, T), 'p': (N, T, T), 'x': (1, T, D), 'b': (N, D, D)}
    ring, (a_NDE, s_NTS, p_NTS, x_1TD, b_NDE) = generators(shapes)
    _, (out_1TE,) = generators({'out': (1, T, D)})
    A_NDE = abbreviated(bench.matrix_of('score'), a_NDE, ring)
    B_NDE = abbreviated(bench.matrix_of('value'), b_NDE, ring)
    x_TD = x_1TD[0]
    scores_NTS = np.einsum('td,nde,se->nts', x_TD, A_NDE, x_TD)
    output_TE = np.einsum('nts,sd,nde->te', p_NTS, x_TD, B_NDE)

    # Each heading with the lines below it.
    head = '[n]' if N > 1 else ''
    scale = float(bench.layer.score.scale)
    scaled_s = f's{head}' if scale == 1 else f'{number(scale)} s{head}'
    output_equation = 'out = sum_n p[n] x B[n]' if N > 1 else 'out = p x B'
    sections = {
        f'A[n] = {bench.layer.score.equation}': _circuit(bench, 'score', A_NDE, a_NDE),
        f's{head} = x A{head} x^T': _equations(s_NTS, scores_NTS),
        f'p{head}_ts = exp({scaled_s}_ts) / sum_u exp({scaled_s}_tu)': [],
        f'B[n] = {bench.layer.value.equation}': _circuit(bench, 'value', B_NDE, b_NDE),
        output_equation: _equations(out_1TE, output_TE),
    }
    title = f'{bench.variant}: {T} tokens, d_model {D}, {counted(N, "head")}'
    return _latex(title, sections) if latex else _text(title, sections)


def _circuit(
    bench: Bench, circuit: str, short_NDE: np.ndarray, symbols_NDE: np.ndarray
) -> list[str]:
    """Returns the lines of a score or value: parameters, symbols, and the matrix of each head.

    For example, shared_qk has a symmetric matrix, in which a12 stands for two entries:

        W_Q: 2 x 2
        a11 = q11^2 + q12^2
        a12 = q11 q21 + q12 q22
        a22 = q21^2 + q22^2
        A = [a11, a12; a12, a22], rank 2

    `short_NDE` is the matrix after `abbreviated`, and `symbols_NDE` has a symbol for each entry.
    """
    lines = []
    for parameter in bench.parameters_of(circuit):
        heads, *sizes = parameter.by_head.shape
        line = f'{parameter.name}: {" x ".join(map(str, sizes))}'
        if heads > 1:
            line += ', in each head'
        lines.append(line)

    # Equal entries share a symbol. The others of their symbols are not used.
    M_NDE = bench.matrix_of(circuit)
    is_used_NDE = symbols_NDE == short_NDE
    lines += _equations(symbols_NDE[is_used_NDE], M_NDE[is_used_NDE])

    letter = 'A' if circuit == 'score' else 'B'
    for head, short_DE in enumerate(short_NDE):
        rows = [', '.join(map(polynomial, row)) for row in short_DE]
        name = f'{letter}[{head + 1}]' if len(short_NDE) > 1 else letter
        lines.append(f'{name} = [{"; ".join(rows)}], rank {rank(M_NDE[head])}')
    return lines


def _equations(lefts: np.ndarray, rights: np.ndarray) -> list[str]:
    """Returns 'left = right' for each pair of entries."""
    pairs = zip(lefts.flat, rights.flat, strict=True)
    return [f'{polynomial(left)} = {polynomial(right)}' for left, right in pairs]


def abbreviated(M_NDE: np.ndarray, symbols_NDE: np.ndarray, ring: Any) -> np.ndarray:
    """Returns matrices of polynomials with a symbol of `ring` in place of each polynomial.

    For example, [[p, q], [-q, 1]] becomes [[a11, a12], [-a12, 1]] with the symbols a11 to a22.
    Equal polynomials have the same symbol, that of the first one. Numbers stay numbers.
    """
    symbol_of: dict[Any, Any] = {}  # by polynomial
    short_NDE = np.empty_like(M_NDE)
    for place, entry in np.ndenumerate(M_NDE):
        if -entry in symbol_of:
            short_NDE[place] = -symbol_of[-entry]
        elif entry.is_ground:
            # A constant polynomial. LC is its coefficient.
            short_NDE[place] = ring(entry.LC)
        else:
            short_NDE[place] = symbol_of.setdefault(entry, symbols_NDE[place])
    return short_NDE


def polynomial(entry: Any) -> str:
    """Formats a polynomial: '-2 a11 x21^2 + x22'. Factors are in the order of its ring."""
    text = ''
    for powers, value in entry.terms():
        factors = []
        if abs(value) != 1 or not any(powers):
            factors.append(number(abs(value)))
        for symbol, power in zip(entry.ring.symbols, powers, strict=True):
            if power == 1:
                factors.append(str(symbol))
            elif power > 1:
                factors.append(f'{symbol}^{power}')
        if not text:
            text = '-' if value < 0 else ''
        else:
            text += ' - ' if value < 0 else ' + '
        text += ' '.join(factors)
    return text or '0'


def number(value: float) -> str:
    """Formats a positive number as a fraction or the square root of one, if it is one.

    0.5 gives '1/2', 2**-0.5 gives 'sqrt(1/2)', and 0.123456789 gives '0.123457'.
    """
    for power, form in ((1, '{}'), (2, 'sqrt({})')):
        exact = Fraction(float(value) ** power).limit_denominator(10_000)
        if abs(float(exact) - float(value) ** power) < 1e-12:
            return form.format(exact)
    return f'{float(value):g}'


def _text(title: str, sections: Mapping[str, list[str]]) -> str:
    """Formats a title, and headings with their lines indented below them, as plain text."""
    blocks = ['\n  '.join([heading, *lines]) for heading, lines in sections.items()]
    return '\n\n'.join([title, *blocks]) + '\n'


def _latex(title: str, sections: Mapping[str, list[str]]) -> str:
    """Formats a title, which is a comment, and headings with their lines below them.

    The lines of a section are aligned at the first '=' or ':' of each.
    """
    blocks = [f'% {title}']
    for heading, lines in sections.items():
        block = rf'\[ {in_latex(heading)} \]'
        if lines:
            # LaTeX aligns lines at '&', and '\\' ends a line.
            aligned = [re.sub('([=:])', r'&\1', in_latex(line), count=1) for line in lines]
            rows = ' \\\\\n  '.join(aligned)
            block += f'\n\\begin{{align*}}\n  {rows}\n\\end{{align*}}'
        blocks.append(block)
    return '\n\n'.join(blocks) + '\n'


# Patterns of plain text and what stands for them in LaTeX, in the order in which they are replaced.
_LATEX = (
    # A symbol of a head, 'a[2]12', and another one, 'a12'; a name of one letter is not upright.
    (r'\b([A-Za-z]+)\[(\d)\](\d+)', r'\\mathrm{\1}_{\2,\3}'),
    (r'\b([A-Za-z]+)(\d+)', r'\\mathrm{\1}_{\2}'),
    (r'\\mathrm\{(\w)\}', r'\1'),
    # Indices: 'W_Q', 's[n]_ts'.
    (r'(?<=[A-Za-z\]])_(\w+)', r'_{\\mathrm{\1}}'),
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
    r"""'W_K[n]^T, rank R' -> 'W_{\mathrm{K}}[n]^{\top},\ \text{rank R}'."""
    for pattern, replacement in _LATEX:
        text = re.sub(pattern, replacement, text)
    matrix = re.search(r'= \[(.*)\]', text)  # '= [a, b; c, d]'
    if matrix:
        rows = matrix[1].replace(', ', ' & ').replace('; ', r' \\ ')
        text = text.replace(matrix[0], rf'= \begin{{pmatrix}} {rows} \end{{pmatrix}}')
    return text
