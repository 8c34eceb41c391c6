"""A report as text: table.md, table.csv, and what a terminal shows.

Besides the main table there are sheets: tables of the parts of differences, the controls, the
yardsticks, the scaling laws, the variants and the ledger. Each is declared once, as rows of text,
and printed in every format.
"""

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from markupsafe import Markup

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
    """Returns table.md and table.csv, which `verify` compares with the logs, by name."""
    return {'table.md': report_markdown(findings), 'table.csv': csv_table(findings)}


def csv_table(findings: Findings) -> str:
    """Returns table.csv: a row per arm, controls last.

    Numbers are rounded to a few significant digits. A cell without a value is empty. Raises
    ValueError if two columns have the same name.
    """
    all_columns = list(columns.columns(findings))
    rows = []
    for arm in findings.every_arm:
        row = dict[str, Any]()
        for column in all_columns:
            # Most columns have one cell. A loss has several, such as its mean and its sd.
            cells = column.cells(arm)
            for name in cells:
                if name in row:
                    raise ValueError(f'two columns of table.csv are named {name!r}')
            row |= cells
        rows.append({name: rounded(value) for name, value in row.items()})
    return csv_text(rows)


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Formats rows as CSV, with a line of their names first.

    Text that begins like a formula gets an apostrophe before it, so that a spreadsheet shows it as
    text. Numbers do not change.
    """
    escaped_rows = []
    for row in rows:
        escaped_rows.append({_as_text(name): _as_text(value) for name, value in row.items()})
    return pd.DataFrame(escaped_rows, dtype=object).to_csv(index=False, lineterminator='\n')


# Text that begins like this is a formula to a spreadsheet.
_FORMULA = ('=', '+', '-', '@', '\t', '\r')


def _as_text(cell: Any) -> Any:
    """Puts an apostrophe before text that begins like a formula."""
    if isinstance(cell, str) and cell.startswith(_FORMULA):
        return f"'{cell}"
    return cell


def markdown_table(titles: Sequence[Heading], rows: Sequence[Sequence[str]]) -> str:
    """Formats a Markdown table. Cells are escaped, unless they are `Markup`.

    `titles` are pairs of a title and whether its column is aligned to the left. A bar in a title is
    a place to break the line. Markdown has no such breaks: 'their|loss' -> 'their loss' and
    'loss|/token' -> 'loss/token'.
    """
    headings = []
    alignments = []
    for title, is_left in titles:
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
    """Escapes text for Markdown, which then shows it as it is; the result is one line."""
    return _MARKUP.sub(lambda match: _ESCAPES[match[0]], escape_control_characters(one_line(text)))


# What Markdown would not show as it is: the '<' of a tag, the '&' of an entity, a backslash, a
# backtick, and a character after ']' that makes a link: '](', '][' and ']:'.
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


# The cells of a row by their headings. A bar in a heading is a place to break the line.
Row = dict[str, str]


class Sheet(NamedTuple):
    """A table as text, with a title and a note under it.

    The title and the note come from the macro `name` in templates/sheets.j2.
    """

    name: str
    headings: Sequence[Heading]
    rows: Sequence[Sequence[str]]
    title: str
    note: str


def sheets(findings: Findings) -> list[Sheet]:
    """Returns the sheets of a study that have rows, in the order in which they are printed."""
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
            # The macro `name` of the template gives the title and the note of the sheet.
            title, note = prose.macro('sheets.j2', name, {'study': study}, findings=findings)
            sheets_with_rows.append(Sheet(name, headings, rows, title, note))
    return sheets_with_rows


# The headings of columns of text. Text is aligned to the left, numbers to the right.
_OF_TEXT = {
    'variant',
    'size',
    'corpus',
    'form',
    'A[n]',
    'B[n]',
    'no number, because',
    'time, UTC',
    'event',
    'details',
}


def _table(rows: Iterable[Row]) -> Table:
    """Makes a table from rows with equal headings. Without rows, it has no headings either."""
    all_rows = list(rows)
    if not all_rows:
        return [], []
    headings = [(name, name in _OF_TEXT) for name in all_rows[0]]
    return headings, [list(row.values()) for row in all_rows]


def _identity(study: TrainedStudy, row: Any) -> Row:
    """Returns the cells that identify a row: its variant, and its size and corpus.

    The size is left out if the study has one size only, and the corpus if it has one corpus. `row`
    is what the row is about: an arm, or the scaling of a variant, which has no size.
    """
    cells = {'variant': row.variant}
    if len(study.sizes) > 1 and hasattr(row, 'size'):
        cells['size'] = row.size
    if len(study.corpora) > 1 and hasattr(row, 'corpus'):
        cells['corpus'] = row.corpus
    return cells


def _parts(findings: Findings) -> Iterator[Row]:
    """Yields a row for each arm with the parts of its difference from the baseline.

    The first part is the difference at the baseline's shape. The second is what reinvesting the
    saved parameters changes. Their sum is the difference of the matched arm. A fourth column is the
    difference after longer training, if the study has such runs.
    """
    if not findings.has_parts:
        return
    # The longer runs have this many times the steps; None if the study has no longer runs.
    times = findings.study.controls.longer
    for arm in findings.arms:
        if arm.is_baseline:
            continue
        comparison_of_column = {
            'at the same shape|minus the baseline': arm.parts.same_shape,
            'reinvesting|matched - same shape': arm.parts.reinvesting,
            'both|matched - baseline': arm.comparison,
        }
        if times:
            comparison_of_column[f'at {times} x the steps|matched - baseline'] = arm.parts.longer

        row = _identity(findings.study, arm)
        for heading, comparison in comparison_of_column.items():
            difference = comparison.difference if comparison else None
            row[heading] = interval(difference)
        yield row


def _yardsticks(findings: Findings) -> Iterator[Row]:
    """Yields a row for each baseline: its own numbers, and the yardsticks that it has to beat.

    A yardstick is what a simple method reaches on the same data: n-grams in language modeling, or
    word by word translation.
    """
    loss_heading = f'{prose.SPLITS[findings.split]}|loss'
    for arm in rules.baselines(findings.study, findings.every_arm):
        shortfalls = list(rules.why_untrained(arm))
        row = {
            'size': arm.size,
            'corpus': arm.corpus,
            'trained|enough': 'no' if shortfalls else 'yes',
            'tokens|seen': prose.si(arm.yardstick.seen) if arm.yardstick else prose.NOT_RECORDED,
            loss_heading: f'{arm.loss.mean:.3f}' if arm.loss else NONE,
        }
        yield row | _yardstick_cells(arm)


def _yardstick_cells(arm: TrainedArm) -> Row:
    """Returns the cells of a baseline's yardstick; NONE where its task does not define a number.

    The best counts are the n-grams with the lowest loss, counted on the tokens that the baseline
    has seen, or for a probe, chance. A language model also has its gain from context. A translation
    has BLEU scores in place of counts, and the baseline's gain from its sources.
    """
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


def _recorded(value: float | None, spec: str) -> str:
    """Formats a number, or says that it was not recorded."""
    return prose.NOT_RECORDED if value is None else format(value, spec)


def _laws(findings: Findings) -> Iterator[Row]:
    """Yields a row for each variant: its scaling law, and what one of its parameters is worth.

    The law gives the loss E + A N^-a at N parameters. The worth is how many parameters the baseline
    needs in place of one of the variant. If a number is missing, the last column says why.
    """
    for scaling in findings.scaling:
        row = {
            **_identity(findings.study, scaling),
            'E,|nats/token': NONE,
            'A': NONE,
            'a': NONE,
            'R²': NONE,
            'baseline parameters|per parameter': NONE,
            'no number, because': NONE,
        }
        problems = list[Problem]()  # why numbers are missing

        law = scaling.law
        if isinstance(law, Problem):
            # The losses do not determine a law.
            problems.append(law)
        elif law.loose:
            # There is a law, but the sizes of the study do not determine its exponent.
            problems.append(law.loose)
        else:
            row['E,|nats/token'] = _bounded(law.E)
            row['A'] = f'{law.A:.3g}'
            row['a'] = _bounded(law.a)
            row['R²'] = f'{law.r_squared:.3f}'

        worth = scaling.worth
        if isinstance(worth, Interval):
            row['baseline parameters|per parameter'] = _bounded(worth)
        elif isinstance(worth, Problem):
            problems.append(worth)

        if problems:
            row['no number, because'] = '; '.join(prose.clause(problem) for problem in problems)
        yield row


def _bounded(number: Interval) -> str:
    """Formats a number with its interval, as in '0.300 [0.281, 0.319]'."""
    return f'{number.value:.3f} [{number.low:.3f}, {number.high:.3f}]'


def _forms(findings: Findings) -> Iterator[Row]:
    """Yields the equations of each variant, with all its options."""
    arm_by_variant = {arm.variant: arm for arm in findings.arms}
    for variant, arm in arm_by_variant.items():
        for form, score, value in prose.forms(arm.example.run.config['model']):
            yield {'variant': variant, 'form': form, 'A[n]': score, 'B[n]': value}


def _ledger(study: TrainedStudy) -> Iterator[Row]:
    """Yields the entries of the study's ledger, which records its declarations and looks.

    A look is a report on results, and has a number. The family is the number of arms that are
    compared with the baseline, whose p values are corrected for each other.
    """
    for entry in study.ledger.entries:
        arms = [ArmKey(*ledger.arm_key(arm)) for arm in entry.get('arms', ())]
        # The macro `entered` writes one sentence.
        (details,) = prose.macro('sheets.j2', 'entered', {'study': study}, entry=entry, arms=arms)
        # '2025-01-02T03:04:05+00:00' -> '2025-01-02 03:04:05'
        time = str(entry['time']).removesuffix('+00:00').replace('T', ' ')
        yield {
            'time, UTC': time,
            'event': words(entry['event']),
            'look': str(entry.get('look', NONE)),
            'family': str(entry.get('family', NONE)),
            'details': details,
        }


def headline(findings: Findings) -> str:
    """Returns the result for a README: a narrow Markdown table and what was held equal.

    Arms are grouped by size and corpus. In each group, the baseline comes first, and the other arms
    follow in the order of their difference.
    """

    def rank(arm: TrainedArm) -> tuple[bool, float]:
        difference = arm.difference.mean if arm.difference else math.inf
        return not arm.is_baseline, difference

    arms = list[TrainedArm]()
    for group in prose.by_size_and_corpus(findings.arms, findings.study).values():
        arms += sorted(group, key=rank)
    headings, rows = columns.printed(columns.HEADLINE, findings, arms)

    lines = sentences('headline.j2', study=findings.study, findings=findings)
    held_equal = summary(findings)[-1]  # the last sentence of a summary states what all arms share
    text = markdown(' '.join([*lines, held_equal]))
    return f'{markdown_table(headings, rows)}\n\n{text}\n'


def settings(findings: Findings) -> list[str]:
    """Returns 'name: value' for the settings that all arms with results share."""
    return sentences('settings.j2', study=findings.study, findings=findings)


def summary(findings: Findings, with_arms: bool = True) -> list[str]:
    """Returns the result in sentences. The last one states what all arms share.

    Without `with_arms`, the sentences that list arms by verdict or difference are left out.
    """
    return sentences('summary.j2', study=findings.study, findings=findings, with_arms=with_arms)


def notes(findings: Findings) -> list[str]:
    """Returns the notes under the table: what the numbers mean, and what they cannot show.

    The template prints the power and the error rates that verdicts are made at.
    """
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
    """Returns the result, the tables and their notes as a Markdown document."""
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

    Table columns that do not fit into WIDTH are left out.

    Args:
        findings: The findings to report.
        page: The path of report.html.
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
    """Formats a table for a terminal, with as many of the first columns as fit into WIDTH.

    Names in the first column that are longer than a quarter of the width are cut in the middle. If
    two names would become equal, all names keep more characters. The first column always stays.
    """
    names = [escape_control_characters(row[0]) for row in rows]
    name_length = WIDTH // 4
    while len({short(name, name_length) for name in names}) < len(set(names)):
        name_length += 1  # two different names are cut to the same text
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
