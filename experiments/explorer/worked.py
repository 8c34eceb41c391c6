"""The equations of a bench as text or LaTeX."""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from experiments.explorer.bench import Bench, generators, rank


def worked(bench: Bench, *, latex: bool = False) -> str:
    """A with its parameters, scores, attention, B with its parameters, and output.

    LaTeX needs amsmath.
    """
    N, T, D = bench.heads, bench.tokens, bench.dims
    shapes = {'a': (N, D, D), 's': (N, T, T), 'p': (N, T, T), 'x': (1, T, D), 'b': (N, D, D)}
    ring, (a_NDE, s_NTS, p_NTS, (x_TD,), b_NDE) = generators(shapes)
    _, (out_1TE,) = generators({'out': (1, T, D)})
    A_NDE, B_NDE = (named(*m, ring) for m in zip(bench.AB, (a_NDE, b_NDE), strict=True))
    scores = np.einsum('td,nde,se->nts', x_TD, A_NDE, x_TD)
    output = np.einsum('nts,sd,nde->te', p_NTS, x_TD, B_NDE)
    head = '[n]' if N > 1 else ''
    scale = float(bench.layer.score.scale)
    s = f's{head}' if scale == 1 else f'{number(scale)} s{head}'
    sections = {
        f'A[n] = {bench.layer.score.equation}': _circuit(bench, 'A', A_NDE, a_NDE),
        f's{head} = x A{head} x^T': _equations(s_NTS, scores),
        f'p{head}_ts = exp({s}_ts) / sum_u exp({s}_tu)': [],
        f'B[n] = {bench.layer.value.equation}': _circuit(bench, 'B', B_NDE, b_NDE),
        'out = sum_n p[n] x B[n]' if N > 1 else 'out = p x B': _equations(out_1TE, output),
    }
    title = f'{bench.variant}: {T} tokens, d_model {D}, {N} head{"s" if N > 1 else ""}'
    return _latex(title, sections) if latex else _text(title, sections)


def _circuit(bench: Bench, name: str, named_NDE: np.ndarray, symbols_NDE: np.ndarray) -> list[str]:
    """The sizes of parameters, the entries that have a symbol, and the matrix of each head."""
    M_NDE = bench.AB[name == 'B']
    lines = []
    for parameter in bench.parameters_of('value' if name == 'B' else 'score'):
        heads, *sizes = parameter.by_head.shape
        each = ', in each head' if heads > 1 else ''
        lines.append(f'{parameter.name}: {" x ".join(map(str, sizes))}{each}')
    defined = symbols_NDE == named_NDE
    lines += _equations(symbols_NDE[defined], M_NDE[defined])
    for n, (M_DE, named_DE) in enumerate(zip(M_NDE, named_NDE, strict=True), start=1):
        rows = '; '.join(', '.join(map(polynomial, row)) for row in named_DE)
        of_head = f'[{n}]' if len(M_NDE) > 1 else ''
        lines.append(f'{name}{of_head} = [{rows}], rank {rank(M_DE)}')
    return lines


def _equations(lefts: np.ndarray, rights: np.ndarray) -> list[str]:
    pairs = zip(lefts.flat, rights.flat, strict=True)
    return [f'{polynomial(left)} = {polynomial(right)}' for left, right in pairs]


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


def polynomial(entry: Any) -> str:
    """A polynomial with the factors of each term in the order of its ring."""
    text = ''
    for powers, value in entry.terms():
        factors = [
            str(symbol) if n == 1 else f'{symbol}^{n}'
            for symbol, n in zip(entry.ring.symbols, powers, strict=True)
            if n
        ]
        if abs(value) != 1 or not factors:
            factors.insert(0, number(abs(value)))
        sign = (' - ' if value < 0 else ' + ') if text else ('-' if value < 0 else '')
        text += sign + ' '.join(factors)
    return text or '0'


def number(value: float) -> str:
    """A positive number as a fraction or the square root of one, if equal in float64."""
    for power, form in ((1, '{}'), (2, 'sqrt({})')):
        exact = Fraction(float(value) ** power).limit_denominator(10_000)
        if abs(float(exact) - float(value) ** power) < 1e-12:
            return form.format(exact)
    return f'{float(value):g}'


def _text(title: str, sections: Mapping[str, list[str]]) -> str:
    blocks = ['\n  '.join([heading, *lines]) for heading, lines in sections.items()]
    return '\n\n'.join([title, *blocks]) + '\n'


def _latex(title: str, sections: Mapping[str, list[str]]) -> str:
    blocks = [f'% {title}']
    for heading, lines in sections.items():
        blocks.append(rf'\[ {in_latex(heading)} \]')
        if lines:
            aligned = ' \\\\\n  '.join(
                re.sub('([=:])', r'&\1', in_latex(line), count=1) for line in lines
            )
            blocks[-1] += f'\n\\begin{{align*}}\n  {aligned}\n\\end{{align*}}'
    return '\n\n'.join(blocks) + '\n'


# Symbols of a head and others, indices, powers, functions, products of sizes, words at the end.
_LATEX = (
    (r'\b([A-Za-z]+)\[(\d)\](\d+)', r'\\mathrm{\1}_{\2,\3}'),
    (r'\b([A-Za-z]+)(\d+)', r'\\mathrm{\1}_{\2}'),
    (r'\\mathrm\{(\w)\}', r'\1'),
    (r'(?<=[A-Za-z\]])_(\w+)', r'_{\\mathrm{\1}}'),
    (r'\^(-?)T\b', r'^{\1\\top}'),
    (r'\^(-?\d+)', r'^{\1}'),
    (r'\b(exp|sum)(?=[_(])', r'\\\1'),
    (r'\bdiag\b', r'\\operatorname{diag}'),
    (r'sqrt\((.*?)\)', r'\\sqrt{\1}'),
    (r'(?<=\d) x (?=\d)', r' \\times '),
    (r', ([A-Za-z][\w ]*)$', r',\\ \\text{\1}'),
)


def in_latex(text: str) -> str:
    r"""'W_K[n]^T, rank R' -> 'W_{\mathrm{K}}[n]^{\top},\ \text{rank R}'."""
    for pattern, replacement in _LATEX:
        text = re.sub(pattern, replacement, text)
    if matrix := re.search(r'= \[(.*)\]', text):
        rows = matrix[1].replace(', ', ' & ').replace('; ', r' \\ ')
        text = text.replace(matrix[0], rf'= \begin{{pmatrix}} {rows} \end{{pmatrix}}')
    return text
