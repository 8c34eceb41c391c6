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
    """The equations of a bench: A with its parameters, scores, attention, B, and output.

    As plain text, or as LaTeX, which needs amsmath.
    """
    N = bench.heads
    T = bench.tokens
    D = bench.dims
    shapes = {'a': (N, D, D), 's': (N, T, T), 'p': (N, T, T), 'x': (1, T, D), 'b': (N, D, D)}
    ring, (a_NDE, s_NTS, p_NTS, x_1TD, b_NDE) = generators(shapes)
    _, (out_1TE,) = generators({'out': (1, T, D)})
    A_NDE = named(bench.matrix_of('score'), a_NDE, ring)
    B_NDE = named(bench.matrix_of('value'), b_NDE, ring)
    x_TD = x_1TD[0]
    scores_NTS = np.einsum('td,nde,se->nts', x_TD, A_NDE, x_TD)
    output_TE = np.einsum('nts,sd,nde->te', p_NTS, x_TD, B_NDE)

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
    bench: Bench, circuit: str, named_NDE: np.ndarray, symbols_NDE: np.ndarray
) -> list[str]:
    """The sizes of parameters, the entries that have a symbol, and the matrix of each head.

    `named_NDE` is the matrix of the circuit after `named`, `symbols_NDE` a symbol for each entry.
    """
    lines = []
    for parameter in bench.parameters_of(circuit):
        heads, *sizes = parameter.by_head.shape
        line = f'{parameter.name}: {" x ".join(map(str, sizes))}'
        if heads > 1:
            line += ', in each head'
        lines.append(line)
    M_NDE = bench.matrix_of(circuit)
    is_defined_NDE = symbols_NDE == named_NDE
    lines += _equations(symbols_NDE[is_defined_NDE], M_NDE[is_defined_NDE])
    letter = 'A' if circuit == 'score' else 'B'
    for n, named_DE in enumerate(named_NDE):
        rows = [', '.join(map(polynomial, row)) for row in named_DE]
        name = f'{letter}[{n + 1}]' if len(named_NDE) > 1 else letter
        lines.append(f'{name} = [{"; ".join(rows)}], rank {rank(M_NDE[n])}')
    return lines


def _equations(lefts: np.ndarray, rights: np.ndarray) -> list[str]:
    """'left = right' of each pair of entries."""
    pairs = zip(lefts.flat, rights.flat, strict=True)
    return [f'{polynomial(left)} = {polynomial(right)}' for left, right in pairs]


def named(M_NDE: np.ndarray, symbols_NDE: np.ndarray, ring: Any) -> np.ndarray:
    """The matrices with a symbol of `ring` in place of each entry.

    Equal entries share the symbol of the first of them, which negative ones have with a minus sign.
    Numbers stay numbers.
    """
    symbol_of: dict[Any, Any] = {}
    named_NDE = np.empty_like(M_NDE)
    for place, entry in np.ndenumerate(M_NDE):
        if -entry in symbol_of:
            named_NDE[place] = -symbol_of[-entry]
        elif entry.is_ground:
            named_NDE[place] = ring(entry.LC)
        else:
            named_NDE[place] = symbol_of.setdefault(entry, symbols_NDE[place])
    return named_NDE


def polynomial(entry: Any) -> str:
    """'-2 a11 x21^2 + x22', with the factors of each term in the order of its ring."""
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
    """A positive number as a fraction or the square root of one, if equal in float64.

    0.5 is '1/2', 2**-0.5 'sqrt(1/2)', and 0.123456789 '0.123457'.
    """
    for power, form in ((1, '{}'), (2, 'sqrt({})')):
        exact = Fraction(float(value) ** power).limit_denominator(10_000)
        if abs(float(exact) - float(value) ** power) < 1e-12:
            return form.format(exact)
    return f'{float(value):g}'


def _text(title: str, sections: Mapping[str, list[str]]) -> str:
    """The title, and each heading with its lines indented below it, as plain text."""
    blocks = ['\n  '.join([heading, *lines]) for heading, lines in sections.items()]
    return '\n\n'.join([title, *blocks]) + '\n'


def _latex(title: str, sections: Mapping[str, list[str]]) -> str:
    """The title as a comment, and each heading with its lines, aligned at their first = or :."""
    blocks = [f'% {title}']
    for heading, lines in sections.items():
        block = rf'\[ {in_latex(heading)} \]'
        if lines:
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
