"""The summary table as aligned text and Markdown, and a short one for a README."""

from collections.abc import Sequence

from qkattn.report.columns import Column, columns_of, tuned_value
from qkattn.report.notes import notes
from qkattn.report.numbers import interval, mean_sd, si
from qkattn.report.sentences import found_in, held_equal
from qkattn.study.tuning import KNOBS
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study

__all__ = [
    'Column',
    'columns_of',
    'headline',
    'markdown_table',
    'report_markdown',
    'report_text',
    'si',
    'text_table',
]


def text_table(findings: Findings) -> str:
    """Aligned plain text, two heading lines, one line per arm."""
    columns = columns_of(findings)
    lines = [
        [column.heading[0] for column in columns],
        [column.heading[1] for column in columns],
        *([_one_line(column.text(arm)) for column in columns] for arm in findings.arms),
    ]
    widths = [max(map(len, runs)) for runs in zip(*lines, strict=True)]
    rule = ['-' * width for width in widths]
    return '\n'.join(
        '  '.join(
            run.ljust(width) if column.left else run.rjust(width)
            for run, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in [*lines[:2], rule, *lines[2:]]
    )


def _one_line(text: str) -> str:
    return ' '.join(text.split())


def markdown_table(findings: Findings) -> str:
    """A pipe table; pipes and backslashes in names are escaped."""
    columns = columns_of(findings)
    return _pipes(
        [column.title for column in columns],
        [column.left for column in columns],
        [[column.text(arm) for column in columns] for arm in findings.arms],
    )


def _pipes(titles: Sequence[str], left: Sequence[bool], lines: Sequence[Sequence[str]]) -> str:
    def line(runs: Sequence[str]) -> str:
        escaped = (_one_line(c).replace('\\', '\\\\').replace('|', '\\|') for c in runs)
        return f'| {" | ".join(escaped)} |'

    rule = line([':--' if is_left else '--:' for is_left in left])
    return '\n'.join([line(titles), rule, *map(line, lines)])


def headline(study: Study, findings: Findings) -> str:
    """The result for a README: a Markdown table of few columns, and what was held equal.

    Arms in the order of their difference, the baseline first, size by size.
    """
    several = len(study.sizes) > 1
    knobs = [knob for knob in KNOBS if any(knob in arm.sweeps for arm in findings.arms)]
    titles = ['arm', *(['size'] if several else [])]
    titles += ['difference in val loss, nats/token [95 %]' if study.baseline else 'val loss']
    titles += ['verdict'] if study.tuning else []
    titles += [f'tuned {knob.replace("_", " ")}' for knob in knobs]
    ordered = sorted(
        findings.arms,
        key=lambda arm: (
            study.sizes.index(arm.size),
            not arm.is_baseline,
            arm.difference is None,
            arm.difference.mean if arm.difference else 0.0,
        ),
    )
    lines = []
    for arm in ordered:
        line = [arm.variant, *([arm.size] if several else [])]
        if arm.is_baseline:
            line.append(f'baseline, val loss {mean_sd(arm.val_loss, 4)}')
        elif study.baseline:
            line.append(interval(arm.difference))
        else:
            line.append(mean_sd(arm.val_loss, 4))
        if study.tuning:
            line.append(arm.verdict.decision.value if arm.verdict else '')
        line += [tuned_value(arm, knob, span=False) for knob in knobs]
        lines.append(line)
    names = 2 if several else 1
    table = _pipes(titles, [place < names for place in range(len(titles))], lines)
    return f'{table}\n\n{_one_line(held_equal(study, findings))}\n'


def report_text(study: Study, findings: Findings) -> str:
    """What a terminal shows: heading, what was found, table, notes and problems."""
    heading = [f'study {study.name}'] + ([study.question] if study.question else [])
    found = [*found_in(study, findings), held_equal(study, findings)]
    problems = [f'! {problem}' for problem in study.problems]
    rest = [*notes(study, findings), *problems]
    return '\n'.join([*heading, '', *found, '', text_table(findings), '', *rest]) + '\n'


def report_markdown(study: Study, findings: Findings) -> str:
    """What was found, the table and its notes as a Markdown document."""
    parts = [f'# {_one_line(study.name)}', '']
    if study.question:
        parts += [_one_line(study.question), '']
    for sentence in (*found_in(study, findings), held_equal(study, findings)):
        parts += [_one_line(sentence), '']
    parts += [markdown_table(findings), '']
    parts += [f'- {_one_line(note)}' for note in (*notes(study, findings), *study.problems)]
    return '\n'.join(parts) + '\n'
