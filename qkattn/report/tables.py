"""A report as text: table.md, table.csv, and the summary for a terminal.

Sheets are the smaller tables below the main one, such as controls and scaling laws.
"""

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from markupsafe import Markup

from qkattn.errors import ConfigError
from qkattn.jobs.output import escape_control_characters, short, text_table
from qkattn.report import columns, prose
from qkattn.report.columns import Heading, Table
from qkattn.report.prose import NONE, interval, one_line, rounded, sentences, words
from qkattn.stats.decision import ALPHA, level
from qkattn.stats.inference import POWER
from qkattn.stats.scaling import Interval, Problem
from qkattn.storage import ledger
from qkattn.study.arm_key import ArmKey
from qkattn.verdict import rules
from qkattn.verdict.findings import Findings
from qkattn.verdict.trained_arm import TrainedArm
from qkattn.verdict.trained_study import TrainedStudy

# The width of a report in a terminal or a log, in characters.
WIDTH = 100


def files(findings: Findings) -> dict[str, str]:
    """Returns the text of table.md and table.csv, by file name."""
    return {'table.md': report_markdown(findings), 'table.csv': csv_table(findings)}


def csv_table(findings: Findings) -> str:
    """Returns table.csv, with a row for each arm and controls last.

    Numbers have DIGITS significant digits. A cell without a value is empty.

    Raises:
        ConfigError: Two columns have the same name, or a column's path has a misspelled part.
    """
    all_columns = list(columns.columns(findings))
    for column in all_columns:
        column.require_keys(findings.every_arm)
    rows = []
    for arm in findings.every_arm:
        row = dict[str, Any]()
        for column in all_columns:
            # A column may have several cells, such as a mean and its sd.
            cells = column.cells(arm)
            for name in cells:
                if name in row:
                    raise ConfigError(f'two columns of table.csv are named {name!r}')
            row |= cells
        rows.append({name: rounded(value) for name, value in row.items()})
    return csv_text(rows)


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Formats rows as CSV with a header. Text that a spreadsheet would run is escaped."""
    escaped_rows = []
    for row in rows:
        escaped_row = {}
        for name, value in row.items():
            escaped_row[_escape_formula(name)] = _escape_formula(value)
        escaped_rows.append(escaped_row)
    return pd.DataFrame(escaped_rows, dtype=object).to_csv(index=False, lineterminator='\n')


# A spreadsheet runs text that begins with one of these as a formula.
_FORMULA = ('=', '+', '-', '@', '\t', '\r')


def _escape_formula(cell: Any) -> Any:
    """Puts an apostrophe before text that begins like a formula."""
    if isinstance(cell, str) and cell.startswith(_FORMULA):
        return f"'{cell}"
    return cell


def markdown_table(titles: Sequence[Heading], rows: Sequence[Sequence[str]]) -> str:
    """Formats a Markdown table.

    Args:
        titles: Pairs of a title and whether its column is left-aligned. In a title, '|' is a line
            break, which Markdown tables do not have: 'their|loss' -> 'their loss'.
        rows: The cells of each row. Cells are escaped, except `Markup`.
    """
    headings = []
    alignments = []
    for title, is_left in titles:
        # 'loss|/token' becomes 'loss/token'.
        unbroken_title = title.replace('|/', '/').replace('|', ' ')
        headings.append(markdown(unbroken_title))
        alignments.append(':--' if is_left else '--:')

    lines = [headings, alignments]
    for row in rows:
        cells = []
        for cell in row:
            text = cell if isinstance(cell, Markup) else markdown(cell)
            cells.append(text.replace('|', r'\|'))
        lines.append(cells)
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def markdown(text: str) -> str:
    """Escapes text for Markdown, on one line."""
    line = escape_control_characters(one_line(text))
    return _MARKUP.sub(lambda match: _ESCAPES[match[0]], line)


# Markdown syntax: the '<' of a tag, the '&' of an entity, a backslash, a backtick, and a character
# that makes a link after ']', as in '](', '][' and ']:'.
_MARKUP = re.compile(r'<(?=[A-Za-z/!?])|&(?=#?\w+;)|[\\`]|(?<=\])[(\[:]')
_ESCAPES = {
    '<': '&lt;',
    '&': '&amp;',
    '\\': '\\\\',
    '`': '\\`',
    '(': '\\(',
    '[': '\\[',
    ':': '\\:',
}


# The cells of a row by heading. In a heading, '|' is a line break.
Row = dict[str, str]


class Sheet(NamedTuple):
    """A table as text, with a title and a note."""

    name: str
    headings: Sequence[Heading]
    rows: Sequence[Sequence[str]]
    title: str
    note: str  # printed below the table


def sheets(findings: Findings) -> list[Sheet]:
    """Returns a study's sheets that have rows, in printed order."""
    study = findings.study
    controls = columns.printed(columns.CONTROL, findings, findings.controls)
    table_by_name = {
        'parts': _table(_parts(findings)),
        'controls': controls,
        'yardsticks': _table(_yardsticks(findings)),
        'laws': _table(_laws(findings)),
        'forms': _table(_forms(findings)),
        'ledger': _table(_ledger(study)),
    }
    sheets_with_rows = []
    for name, (headings, rows) in table_by_name.items():
        if rows:
            # The template has a macro for each sheet.
            title, note = prose.macro('sheets.j2', name, {'study': study}, findings=findings)
            sheets_with_rows.append(Sheet(name, headings, rows, title, note))
    return sheets_with_rows


# The headings of columns of text, which are left-aligned. Numbers are right-aligned.
_OF_TEXT = {
    'variant',
    'size',
    'corpus',
    'form',
    'A[n]',
    'B[n]',
    'why a number is missing',
    'time, UTC',
    'event',
    'details',
}


def _table(rows: Iterable[Row]) -> Table:
    """Makes a table from rows with equal headings. A table without rows has no headings."""
    all_rows = list(rows)
    if not all_rows:
        return [], []
    first_row = all_rows[0]
    headings = [(heading, heading in _OF_TEXT) for heading in first_row]
    return headings, [list(row.values()) for row in all_rows]


def _identity(study: TrainedStudy, subject: Any) -> Row:
    """Returns the cells that identify a row: variant, and size and corpus if there are several.

    `subject` is an arm, or the scaling of a variant over sizes.
    """
    cells = {'variant': subject.variant}
    if len(study.sizes) > 1 and hasattr(subject, 'size'):
        cells['size'] = subject.size
    if len(study.corpora) > 1 and hasattr(subject, 'corpus'):
        cells['corpus'] = subject.corpus
    return cells


def _parts(findings: Findings) -> Iterator[Row]:
    """Yields a row for each arm with the parts of its difference from the baseline."""
    if not findings.has_parts:
        return
    step_factor = findings.study.controls.longer  # of longer runs; None if there are none
    for arm in findings.arms:
        if arm.is_baseline:
            continue
        # The third difference is the sum of the first two.
        comparison_by_heading = {
            'at the same shape|minus the baseline': arm.parts.same_shape,
            'reinvesting|matched - same shape': arm.parts.reinvesting,
            'both|matched - baseline': arm.comparison,
        }
        if step_factor:
            longer_heading = f'at {step_factor} x the steps|matched - baseline'
            comparison_by_heading[longer_heading] = arm.parts.longer

        row = _identity(findings.study, arm)
        for heading, comparison in comparison_by_heading.items():
            difference = comparison.difference if comparison else None
            row[heading] = interval(difference)
        yield row


def _yardsticks(findings: Findings) -> Iterator[Row]:
    """Yields a row for each baseline and its yardstick.

    A yardstick is a simple method on the same data, such as n-grams, which the baseline has to
    beat.
    """
    loss_heading = f'{prose.SPLITS[findings.split]}|loss'  # such as 'validation|loss'
    for arm in rules.baselines(findings.study, findings.every_arm):
        reasons_untrained = list(rules.why_untrained(arm))
        tokens_seen = prose.si(arm.yardstick.seen) if arm.yardstick else prose.NOT_RECORDED
        row = {
            'size': arm.size,
            'corpus': arm.corpus,
            'trained|enough': 'no' if reasons_untrained else 'yes',
            'tokens|seen': tokens_seen,
            loss_heading: f'{arm.loss.mean:.3f}' if arm.loss else NONE,
        }
        yield row | _yardstick_cells(arm)


def _yardstick_cells(arm: TrainedArm) -> Row:
    """Returns the cells of a baseline's yardstick; NONE for numbers of other tasks."""
    cells = {
        'best counts|of these': NONE,
        'their|loss': NONE,
        'gain by|position': NONE,
        'BLEU': NONE,
        'word by word,|BLEU': NONE,
        'worth of|sources': NONE,
    }
    yardstick = arm.yardstick
    if yardstick is None:
        return cells

    # The n-gram model with the lowest loss, or chance for a probe task.
    best_counts = yardstick.best(arm.split)
    if best_counts is not None:
        name, loss = best_counts
        cells['best counts|of these'] = name
        cells['their|loss'] = f'{loss:.3f}'
    if yardstick.task == 'language':
        cells['gain by|position'] = _recorded(yardstick.context_gain, '.3f')
    if yardstick.task == 'translation':
        word_by_word_bleu = yardstick.bleu.get(arm.split)
        cells['BLEU'] = _recorded(arm.bleu, '.1f')
        cells['word by word,|BLEU'] = _recorded(word_by_word_bleu, '.1f')
        cells['worth of|sources'] = _recorded(yardstick.source_gain, '.3f')
    return cells


def _recorded(value: float | None, format_spec: str) -> str:
    """Formats a number, or says that it was not recorded."""
    return prose.NOT_RECORDED if value is None else format(value, format_spec)


def _laws(findings: Findings) -> Iterator[Row]:
    """Yields a row for each variant with its scaling law and the worth of its parameters.

    The law is loss = E + A N^-a for N parameters. The worth is the number of baseline parameters
    that replace one parameter of the variant.
    """
    for scaling in findings.scaling:
        row = {
            **_identity(findings.study, scaling),
            'E,|nats/token': NONE,
            'A': NONE,
            'a': NONE,
            'R²': NONE,
            'worth of a parameter,|in baseline parameters': NONE,
            'why a number is missing': NONE,
        }
        problems = list[Problem]()  # why numbers are missing

        law = scaling.law
        if isinstance(law, Problem):
            problems.append(law)
        elif law.loose:  # the Problem that the study's sizes do not determine the exponent
            problems.append(law.loose)
        else:
            row['E,|nats/token'] = _bounded(law.E)
            row['A'] = f'{law.A:.3g}'
            row['a'] = _bounded(law.a)
            row['R²'] = f'{law.r_squared:.3f}'

        worth = scaling.worth  # None for the baseline itself
        if isinstance(worth, Interval):
            row['worth of a parameter,|in baseline parameters'] = _bounded(worth)
        elif isinstance(worth, Problem):
            problems.append(worth)

        if problems:
            clauses = [prose.clause(problem) for problem in problems]
            row['why a number is missing'] = '; '.join(clauses)
        yield row


def _bounded(estimate: Interval) -> str:
    """Formats an estimate with its interval: '0.300 [0.281, 0.319]'."""
    return f'{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]'


def _forms(findings: Findings) -> Iterator[Row]:
    """Yields the equations of each variant, with all its options."""
    arm_by_variant = {arm.variant: arm for arm in findings.arms}
    for variant, arm in arm_by_variant.items():
        model_settings = arm.example.run.config['model']
        for form, score_equation, value_equation in prose.forms(model_settings):
            yield {
                'variant': variant,
                'form': form,
                'A[n]': score_equation,
                'B[n]': value_equation,
            }


def _ledger(study: TrainedStudy) -> Iterator[Row]:
    """Yields a row for each ledger entry, which is a declaration or a look at results."""
    for entry in study.ledger.entries:
        arms = [ArmKey(*ledger.arm_key(arm)) for arm in entry.get('arms', ())]
        sentences_of_entry = prose.macro(
            'sheets.j2', 'entered', {'study': study}, entry=entry, arms=arms
        )
        details = sentences_of_entry[0]  # the macro writes one sentence
        # '2025-01-02T03:04:05+00:00' -> '2025-01-02 03:04:05'
        time = str(entry['time']).removesuffix('+00:00').replace('T', ' ')
        yield {
            'time, UTC': time,
            'event': words(entry['event']),
            'look': str(entry.get('look', NONE)),
            'family': str(entry.get('family', NONE)),  # the number of compared arms
            'details': details,
        }


def headline(findings: Findings) -> str:
    """Returns the results as Markdown for a README: a narrow table and a few sentences.

    Arms are grouped by size and corpus. Each group has the baseline first, and then the arms in the
    order of their differences.
    """

    def rank(arm: TrainedArm) -> tuple[bool, float]:
        difference = arm.difference.mean if arm.difference else math.inf
        return not arm.is_baseline, difference  # False sorts before True

    arms = list[TrainedArm]()
    for group in prose.by_size_and_corpus(findings.arms, findings.study).values():
        arms += sorted(group, key=rank)
    headings, rows = columns.printed(columns.HEADLINE, findings, arms)

    headline_sentences = sentences('headline.j2', study=findings.study, findings=findings)
    what_arms_share = summary(findings)[-1]  # the last sentence of the summary
    text = markdown(' '.join([*headline_sentences, what_arms_share]))
    return f'{markdown_table(headings, rows)}\n\n{text}\n'


def settings(findings: Findings) -> list[str]:
    """Returns the settings that all arms share, as 'name: value'."""
    return sentences('settings.j2', study=findings.study, findings=findings)


def summary(findings: Findings, with_arms: bool = True) -> list[str]:
    """Returns the results in sentences. The last sentence states what all arms share.

    `with_arms` adds the sentences that list arms by verdict or difference.
    """
    return sentences('summary.j2', study=findings.study, findings=findings, with_arms=with_arms)


def notes(findings: Findings) -> list[str]:
    """Returns the notes below the table: what its numbers mean and cannot show."""
    return sentences(
        'notes.j2',
        study=findings.study,
        findings=findings,
        measures=columns.reported_measures(findings),
        power=POWER,
        alpha=ALPHA,
        level=level,
    )


def report_markdown(findings: Findings) -> str:
    """Returns the report as a Markdown document."""
    study = findings.study
    parts = [f'# {markdown(study.name)}']
    if study.question:
        parts.append(markdown(study.question))
    parts += [markdown(sentence) for sentence in summary(findings)]
    parts.append(markdown_table(*columns.printed(columns.PAGE, findings, findings.arms)))
    parts.append(_bullets([*notes(findings), *study.problems]))

    for sheet in sheets(findings):
        parts.append(f'## {markdown(sheet.title)}')
        parts.append(markdown_table(sheet.headings, sheet.rows))
        parts.append(markdown(sheet.note))

    parts.append('## Settings')
    parts.append(_bullets(settings(findings)))
    return '\n\n'.join(parts) + '\n'


def _bullets(items: Iterable[str]) -> str:
    """Formats texts as a Markdown list."""
    return '\n'.join(f'- {markdown(item)}' for item in items)


def terminal_text(findings: Findings, page: Path) -> str:
    """Formats a report for a terminal: a summary, two tables and the report's paths.

    Table columns that do not fit into WIDTH are left out. `page` is the path of report.html.
    """
    study = findings.study
    lines = [f'study {study.name}']
    if study.question:
        lines.append(study.question)
    lines.append('')
    lines += summary(findings)
    lines += [f'! {problem}' for problem in study.problems]

    wrapper = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False)
    wrapped_lines = []
    for line in lines:
        printable_line = escape_control_characters(one_line(line))
        wrapped_lines.append(wrapper.fill(printable_line))
    sections = ['\n'.join(wrapped_lines)]

    results_table = columns.printed(columns.HEADLINE, findings, findings.arms)
    yardsticks_table = _table(_yardsticks(findings))
    for headings, rows in (results_table, yardsticks_table):
        if rows:
            sections.append(_fitted(headings, rows))

    full_table = page.with_name('table.md')
    sections.append(f'all columns, notes and settings: {full_table}\nreport: {page}')
    return '\n\n'.join(sections)


def _fitted(titles: Sequence[Heading], rows: Sequence[Sequence[str]]) -> str:
    """Formats a table for a terminal, with the first columns that fit into WIDTH.

    Long names in the first column are cut in the middle.
    """
    names = [escape_control_characters(row[0]) for row in rows]
    num_names = len(set(names))
    name_length = WIDTH // 4
    # Cut names less if different names would become equal.
    while len({short(name, name_length) for name in names}) < num_names:
        name_length += 1
    short_rows = []
    for name, row in zip(names, rows, strict=True):
        short_rows.append([short(name, name_length), *row[1:]])

    # Leave out columns from the right until the table fits.
    num_columns = len(titles)
    while True:
        table = text_table(titles[:num_columns], [row[:num_columns] for row in short_rows])
        width = max(len(line) for line in table.splitlines())
        if width <= WIDTH or num_columns == 1:
            return table
        num_columns -= 1
