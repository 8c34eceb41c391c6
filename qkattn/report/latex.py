"""The summary as a LaTeX table: booktabs and nothing else."""

import re
from collections.abc import Sequence

from qkattn.report.columns import tuned_value
from qkattn.report.numbers import NONE, counted, interval, listed, mean_sd, p_value, span, words
from qkattn.report.sentences import budget
from qkattn.study.tuning import KNOBS
from qkattn.verdict import Arm, Findings
from qkattn.verdict.load import Study
from qkattn.verdict.measures import losses

_ESCAPES = {
    '\\': r'\textbackslash{}',
    '{': r'\{',
    '}': r'\}',
    '$': r'\$',
    '&': r'\&',
    '#': r'\#',
    '%': r'\%',
    '_': r'\_',
    '^': r'\textasciicircum{}',
    '~': r'\textasciitilde{}',
    '<': r'\textless{}',
    '>': r'\textgreater{}',
    '|': r'\textbar{}',
    '"': "''",
    '±': r'\ensuremath{\pm}',
    '→': r'\ensuremath{\rightarrow}',
    '×': r'\ensuremath{\times}',
    '–': r'\textendash{}',
    '…': r'\ldots{}',
}
LAST_LATIN = 0x17F
_MINUS = re.compile(r'(?<![\w.])-(?=\d)')


def escape(text: str) -> str:
    """`text` for LaTeX's text mode, on one line; a sign before a digit becomes a minus.

    A character outside of what LaTeX's default fonts hold is written as its code point.
    """
    kept = ' '.join(text.split())
    pieces = (''.join(map(_escape, part)) for part in _MINUS.split(kept))
    # Ligatures would join the hyphens of a name.
    return r'\ensuremath{-}'.join(piece.replace('--', '-{}-') for piece in pieces)


def _escape(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    return character if ord(character) <= LAST_LATIN else f'[U+{ord(character):04X}]'


def latex_table(study: Study, findings: Findings) -> str:
    """A table environment with a caption that says what is equal, how many seeds, which margin."""
    columns = _columns(study, findings)
    head = ' & '.join(title for title, _, _ in columns)
    places = ''.join('l' if left else 'r' for _, left, _ in columns)
    groups = [
        [arm for arm in findings.arms if arm.size == size]
        for size in study.sizes
        if any(arm.size == size for arm in findings.arms)
    ]
    bodies = (''.join(_line(columns, arm) for arm in group) for group in groups)
    return (
        '% needs \\usepackage{booktabs}\n'
        '\\begin{table}\n'
        '\\centering\n'
        f'\\caption{{{escape(caption(study, findings))}}}\n'
        f'\\begin{{tabular}}{{{places}}}\n'
        '\\toprule\n'
        f'{head} \\\\\n'
        '\\midrule\n'
        f'{_MIDRULE.join(bodies)}'
        '\\bottomrule\n'
        '\\end{tabular}\n'
        '\\end{table}\n'
    )


_MIDRULE = '\\midrule\n'


def caption(study: Study, findings: Findings) -> str:
    """Plain text: what the numbers are, what is equal, seeds, margin."""
    said = [f'{study.name}: {study.question}' if study.question else f'{study.name}.']
    if study.baseline is not None:
        said.append(
            f'Difference: validation loss minus that of {study.baseline} in nats/token, with its '
            '95 % interval; below zero is better.'
        )
    said.append(f'{budget(study, findings.arms)}.')
    counts = {len(row.chosen) for row in findings.arms if row.chosen}
    seeds = f'{span(counts)} seed{"s" * (counts != {1})}'
    if study.tuning is None:
        said.append(f'{seeds}; the learning rate was not tuned separately: no verdicts.')
    else:
        said.append(
            f'{listed(map(words, study.tuning.knobs)).capitalize() or "Nothing"} tuned per arm on '
            f'other seeds; {seeds}; p after Holm over '
            f'{counted(findings.num_comparisons, "comparison")}; equivalence margin '
            f'{study.margin:g} nats/token.'
        )
    if any(arm.not_bracketed for arm in findings.arms):
        said.append('*: not bracketed.')
    return ' '.join(said)


def _columns(study: Study, findings: Findings) -> list[tuple]:
    """(heading in LaTeX, whether left-aligned, text of an arm)."""
    columns = [('arm', True, lambda arm: arm.variant)]
    if len(study.sizes) > 1:
        columns.append(('size', True, lambda arm: arm.size))
    columns.append(('parameters', False, lambda arm: f'{arm.example.parameters["total"]:,}'))
    loss = losses(findings.arms)[0]
    columns.append((escape(loss.heading), False, lambda arm: mean_sd(loss.over_seeds(arm), 4)))
    if study.baseline is not None:
        columns.append(('difference', False, _difference))
    if study.tuning is not None:
        columns.append(('$p$', False, lambda arm: p_value(arm.verdict and arm.verdict.p_holm)))
        columns.append(
            ('verdict', True, lambda arm: arm.verdict.decision.value if arm.verdict else NONE)
        )
    for knob in KNOBS:
        if any(knob in arm.sweeps for arm in findings.arms):
            columns.append(
                (escape(words(knob)), False, lambda arm, k=knob: tuned_value(arm, k, span=False))
            )
    return columns


def _difference(arm: Arm) -> str:
    return 'baseline' if arm.is_baseline else interval(arm.difference)


def _line(columns: Sequence[tuple], arm: Arm) -> str:
    return f'{" & ".join(escape(text(arm)) for _, _, text in columns)} \\\\\n'
