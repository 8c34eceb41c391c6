"""Writes the claims of a directory as Markdown, from claims.json and the scaling study alone."""

import dataclasses
import datetime
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from experiments.claims import export
from experiments.claims.claim import UNIT, ClaimResult, ClaimVerdict, Kind, Row, Speaks
from qkattn.jobs.output import short
from qkattn.report import described
from qkattn.report.figures import figures
from qkattn.report.figures.drawing import Drawing, write_plots
from qkattn.report.figures.forest import Line, Panels, forest
from qkattn.report.figures.style import styles
from qkattn.report.prose import NONE, decision_at_length, environment, si, words
from qkattn.report.tables import Heading, markdown_table, sheets
from qkattn.report.verify import Blocks
from qkattn.stats.decision import Decision
from qkattn.storage.files import write_atomic
from qkattn.verdict import Findings, load_findings
from qkattn.verdict.judging import DECIDED

PAGE = 'claims.md'


class Group(NamedTuple):
    """A group of claims."""

    title: str
    introduction: str


# By the first letter of the claims' names.
GROUPS = {
    'a': Group(
        'Why two matrices?',
        'A head scores the position of y_s for the query of x_t by x_t W_Q W_K^T y_s^T. Only the '
        'product W_Q W_K^T enters, so one D x D matrix W_QK could take the place of two. A1 to A3 '
        'ask what that changes: the function, the parameters, the multiply-adds. A4 and A5 ask how '
        'several heads share D dimensions. Exact checks decide these five. A6 asks whether W_Q and '
        'W_K of full size train to a lower loss; studies decide it. Here D is `d_model`, H the '
        'head size, N the number of heads and T the number of tokens.',
    ),
    'b': Group(
        'Is W_Q needed?',
        'In a single head, W_K can absorb W_Q, so a layer without W_Q expresses the same '
        'functions. B1 and B3 check this on small layers. The other claims are about trained '
        'models: a single head (B2), several heads (B4), more layers of one head (B5), losses '
        'early in training (B6), W_Q W_K^T of low rank (B7), and cross-attention (B8).',
    ),
    'c': Group(
        'Why not Q Q^T?',
        'With one matrix for queries and keys, the scores are Q Q^T. C1 and C7 check what that '
        'means for the pattern; they train nothing. C2 to C5 repeat experiments that an answer in '
        'a forum reports: translators whose encoder lacks a matrix. C6 asks the same of models '
        'that are only an encoder or only a decoder.',
    ),
    'd': Group(
        'One projection or two?',
        'Some descriptions of multi-head attention project with a matrix that all heads share, '
        'W^Q, and then with a matrix per head, W_i^Q: two matrices in a row. D1 asks whether that '
        'adds functions, D2 whether it trains differently, and D3 what implementations do.',
    ),
    'e': Group(
        'What the literature adds',
        'These claims come from publications about the matrices of attention. Each names its '
        'source. Studies decide them, except E5, which exact checks decide. Published models are '
        'larger, have wider heads (at twelve heads 64 and not 8 dimensions), and losses per '
        'subword and not per byte, so only the sign of a difference can be compared.',
    ),
}


class Phrase(NamedTuple):
    """How pages show a verdict."""

    mark: str
    of_one: str  # verb phrase for one claim
    of_several: str  # verb phrase for several claims


PHRASES = {
    ClaimVerdict.HOLDS: Phrase('●', 'holds', 'hold'),
    ClaimVerdict.HOLDS_HERE: Phrase('◉', 'holds in one setting', 'hold in one setting'),
    ClaimVerdict.HOLDS_ONLY_IF: Phrase('◐', 'holds under a condition', 'hold under a condition'),
    ClaimVerdict.FAILS: Phrase('✕', 'fails', 'fail'),
    ClaimVerdict.FAILS_HERE: Phrase('⊗', 'fails in one setting', 'fail in one setting'),
    ClaimVerdict.UNDECIDED: Phrase('○', 'is undecided', 'are undecided'),
}
# The column titles of the parts of a difference.
PARTS: dict[str, str] = {
    Kind.SAME_SHAPE: f'at the same shape, {UNIT}',
    Kind.REINVESTED: f'reinvesting, {UNIT}',
    Kind.MATCHED: f'at equal parameter count, {UNIT}',
}


class Shape(NamedTuple):
    """Names of the shape at which an arm is compared with its baseline."""

    panel: str  # in figures
    column: str  # in the table of answers


SHAPES: dict[Kind, Shape] = {
    Kind.SAME_SHAPE: Shape('same shape, fewer parameters', 'same shape'),
    Kind.MATCHED: Shape('equal parameter count', 'equal count'),
    Kind.LONGER: Shape('equal count, 4 times the steps', '4 times the steps'),
}
# The columns about training, as (title, whether the column is aligned to the left).
_TRAINING: list[Heading] = [
    ('length', True),
    ('tokens', False),
    (f'loss, {UNIT}', False),
    ('yardstick', True),
]
# Names of the values of the factor 'shape' in a context.
_SHAPES_OF_CONTEXT = {'equal': 'same shape', 'matched': 'equal parameter count'}
# The kinds of model and row whose verdict the table of answers shows.
DECIDED_IN = ('decoder', Kind.MATCHED)
# The most characters of a line's name in figures.
_LONGEST = 52
# The most characters of a quantity in a line's name.
_LONGEST_QUANTITY = 22


def group_parts(rows: Iterable[Row]) -> list[dict[str, Row]]:
    """Groups rows by quantity and context, without the factor 'shape' of the context.

    Returns:
        A dict of rows by kind for each group: {'removed': ..., 'reinvested': ..., 'matched': ...}.
        Kinds may be missing. Of two rows of one kind, the one that decides the claim is kept.
    """
    groups: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        if row.kind not in PARTS:
            continue
        context = dict(row.context)
        context.pop('shape', None)
        group_key = (row.quantity, *context.items())
        row_by_kind = groups.setdefault(group_key, {})
        is_first_of_kind = row.kind not in row_by_kind
        is_deciding = row.speaks != Speaks.BESIDE  # a row BESIDE the claim is only shown
        if is_first_of_kind or is_deciding:
            row_by_kind[row.kind] = dataclasses.replace(row, context=context)
    return list(groups.values())


def differing_factors(rows: Sequence[Row]) -> list[str]:
    """Returns the factors that differ between rows, except those that only repeat `quantity`."""
    all_factors: dict[str, None] = {}  # an ordered set
    for row in rows:
        all_factors |= dict.fromkeys(row.context)
    differing = []
    for factor in all_factors:
        values = {row.context.get(factor) for row in rows}
        with_factor = [row for row in rows if factor in row.context]
        repeats_quantity = all(row.context[factor] == row.quantity for row in with_factor)
        if len(values) > 1 and not repeats_quantity:
            differing.append(factor)
    return differing


def context_texts(row: Row, factors: Iterable[str]) -> list[str]:
    """Formats some factors of a row's context.

    The context {'size': 'd_model=64', 'steps': '500'} gives ['d_model=64', 'steps 500']. The name
    of a factor is added to numbers, to the matrix in 'without W_Q', and to all values of an exact
    check, as in 'part: symmetry'.
    """
    texts = []
    for factor in factors:
        if factor not in row.context:
            continue
        value = row.context[factor]
        if factor == 'shape':
            value = _SHAPES_OF_CONTEXT.get(value, value)
        if row.kind == Kind.EXACT:
            texts.append(f'{words(factor)}: {value}')
        elif value[:1].isdigit() or factor == 'without':  # value '500', or 'W_Q'
            texts.append(f'{words(factor)} {value}')
        else:
            texts.append(value)
    return texts


def write_page(directory: str | Path) -> Path:
    """Writes plots/ and claims.md beside a claims.json; returns the path of claims.md.

    Raises:
        ReportError: claims.json or the scaling study cannot be read.
        RunDirectoryError: claims.json was edited.
    """
    directory = Path(directory)

    drawings = []
    for claim in export.read_claims(directory):
        if has_figure(claim):
            drawings.append(claim_figure(claim))
    figure_of_answers = answers_figure(export.read_answers(directory))
    if figure_of_answers:
        drawings.append(figure_of_answers)
    scaling = _scaling(directory)
    if scaling:
        _, figures_of_laws = scaling
        for figure in figures_of_laws:
            drawings.append(dataclasses.replace(figure, stem=f'scaling_{figure.stem}'))
    write_plots(directory / 'plots', drawings, formats=['png'])

    blocks = [verdicts_markdown(directory, base='.', page='')]
    for letter in GROUPS:
        blocks.append(group_markdown(directory, base='.', letter=letter, page=''))
    blocks.append(laws_markdown(directory, base='.'))
    return write_atomic(directory / PAGE, '# Claims\n\n' + '\n'.join(blocks))


def verdicts_markdown(directory: Path, base: str, page: str = 'claims_{}.md') -> str:
    """Returns the number of claims with each verdict, and a table of all claims.

    Args:
        directory: The directory of claims.json.
        base: The prefix of links to files of the directory.
        page: The page of a claim, with '{}' for the letter of its group.
    """
    claims = export.read_claims(directory)
    counts = Counter(claim.verdict for claim in claims)
    counts_in_order = {verdict: counts[verdict] for verdict in PHRASES if counts[verdict]}
    return _template('verdicts.md.j2').render(
        base=base,
        claims=claims,
        counts=counts_in_order,
        table_of_claims=_table_of_claims(claims, page),
    )


def group_markdown(directory: Path, base: str, letter: str, page: str = PAGE) -> str:
    """Returns an introduction of a group, and a section for each of its claims.

    Args:
        directory: The directory of claims.json.
        base: The prefix of links to files of the directory.
        letter: The group, a key of GROUPS.
        page: The page that explains verdicts and tables; '' if it is the same page.
    """
    claims = export.read_claims(directory)
    return _template('group.md.j2').render(
        base=base,
        letter=letter,
        group=GROUPS[letter],
        page=page,
        claims=[claim for claim in claims if claim.name[0].lower() == letter],
    )


def laws_markdown(directory: Path, base: str) -> str:
    """Returns the figure and table of scaling laws; '' without a scaling study.

    `base` is the prefix of links to files of the directory.
    """
    scaling = _scaling(directory)
    if scaling is None:
        return ''
    findings, drawings = scaling
    return _template('laws.md.j2').render(
        base=base,
        figures=[described(findings, drawing) for drawing in drawings],
        sheets=[sheet for sheet in sheets(findings) if sheet.name == 'laws'],
    )


def answers_markdown(directory: Path, base: str) -> str:
    """Returns the table of what each matrix is worth, with its sources and figure.

    The table has a column for each kind of model and each of SHAPES, if it has any difference.
    Differences whose verdict is withheld are left out.
    """
    answers = []
    for answer in export.read_answers(directory):
        judged_answer = _without_withheld_rows(answer)
        if judged_answer.rows:
            answers.append(judged_answer)
    columns: list[tuple[str, Kind]] = []
    for model in export.MODELS:
        for kind in SHAPES:
            if any(answer.row(model, kind) for answer in answers):
                columns.append((model, kind))

    # A title is paired with whether its column is aligned to the left.
    titles: list[Heading] = [('', True), ('size of attention', False)]
    for column in columns:
        model, kind = column
        titles.append((f'{model}, {SHAPES[kind].column}', False))
        if column == _column_before_verdict(columns):
            titles.append(('verdict', True))
    lines = [_cells_of_answer(answer, columns) for answer in answers]
    all_rows = [row for answer in answers for row in answer.rows]
    return _template('answers.md.j2').render(
        table=markdown_table(titles, lines),
        sources=_sources(answers),
        has_short=any(row.is_short for row in all_rows),
        has_longer=any(row.kind == Kind.LONGER for row in all_rows),
        figure=f'{base}/plots/answers.png' if answers_figure(answers) else None,
    )


# The answers that drop, merge or share a matrix.
SHORT_TABLE = (
    'drop W_Q',
    'drop W_K',
    'Q = K',
    'merge W_Q and W_K',
    'K = V',
    'Q = K = V',
    'drop W_V',
    'drop W_O',
)


def short_answers_markdown(directory: Path, _: str = '') -> str:
    """Returns the table of SHORT_TABLE for a decoder at equal parameter count.

    A line is a change of attention, such as 'drop W_V'. If results of longer training exist, they
    are a column before the verdict.
    """
    model, kind = DECIDED_IN
    answers = []
    for answer in export.read_answers(directory):
        judged_answer = _without_withheld_rows(answer)
        if answer.name in SHORT_TABLE and judged_answer.row(model, kind):
            answers.append(judged_answer)

    columns = [DECIDED_IN]
    # A title is paired with whether its column is aligned to the left.
    titles: list[Heading] = [
        ('', True),
        ('size of attention', False),
        ('difference in loss [95 % interval]', False),
    ]
    if any(answer.row(model, Kind.LONGER) for answer in answers):
        columns.append((model, Kind.LONGER))
        titles.append((SHAPES[Kind.LONGER].column, False))
    titles.append(('verdict', True))

    lines = []
    for answer in answers:
        cells = _cells_of_answer(answer, columns)
        lines.append([cell.replace('<br>', ' ') for cell in cells])
    return markdown_table(titles, lines) + '\n'


def _without_withheld_rows(answer: export.Answer) -> export.Answer:
    """Drops the rows of an answer whose verdict is withheld."""
    rows = tuple(row for row in answer.rows if row.decision != Decision.NO_VERDICT.value)
    return dataclasses.replace(answer, rows=rows)


def _cells_of_answer(answer: export.Answer, columns: Sequence[tuple[str, Kind]]) -> list[str]:
    """Returns the cells of an answer: its name, the size of attention, and a difference per column.

    `columns` are pairs of a model and a kind of row. The verdict is on the row DECIDED_IN, and
    follows the last column of its model.
    """
    size = NONE
    if answer.attention is not None:
        percent = round(100 * answer.attention)
        size = f'{percent:+d} %' if percent else '0 %'
    cells = [answer.name, size]
    for column in columns:
        model, kind = column
        row = answer.row(model, kind)
        cells.append(_cell_of_difference(row))
        if column == _column_before_verdict(columns):
            cells.append(_verdict_of_answer(answer))
    return cells


def _column_before_verdict(columns: Sequence[tuple[str, Kind]]) -> tuple[str, Kind] | None:
    """Returns the last column of the model whose verdicts are shown; None without verdicts."""
    if DECIDED_IN not in columns:
        return None
    decided_model, _ = DECIDED_IN
    columns_of_model = [(model, kind) for model, kind in columns if model == decided_model]
    return columns_of_model[-1]


def _verdict_of_answer(answer: export.Answer) -> str:
    """Formats the verdict of the row DECIDED_IN: 'worse at this length: grows'."""
    model, kind = DECIDED_IN
    row = answer.row(model, kind)
    if row is None:
        return NONE
    # 'at this length: grows to +0.0910 at 4 times the steps' -> 'at this length: grows'. The number
    # is in the column beside the verdict.
    length = row.length or ''
    length_without_number, _, _ = length.partition(' to ')
    return decision_at_length(row.decision or NONE, length_without_number)


def _sources(answers: Iterable[export.Answer]) -> dict[str, dict[tuple, list[str | None]]]:
    """Returns the distinct studies behind answers, by model and by (size, corpus, tokens).

    For example, {'decoder': {('d_model=96', 'stdlib', '4,096,000'): ['lm_dropped']}}.
    """
    sources: dict[str, dict[tuple, list[str | None]]] = {}
    for answer in answers:
        for row in answer.rows:
            setting = (row.context['size'], row.context['corpus'], row.context['tokens'])
            studies_by_setting = sources.setdefault(row.context['model'], {})
            studies = studies_by_setting.setdefault(setting, [])
            if row.study not in studies:
                studies.append(row.study)
    return sources


def _cell_of_difference(row: Row | None) -> str:
    """Formats a difference with its 95 % interval. A dagger marks an arm below its yardstick."""
    if row is None:
        return NONE
    value = f'{row.value:+.3f}'
    if row.is_short:
        value += '†'
    if row.low is None or row.high is None:
        return value
    return Markup('<br>').join([value, f'[{row.low:+.3f}, {row.high:+.3f}]'])


# The blocks of `report.verify.check_page`.
BLOCKS: Blocks = {
    'answers': answers_markdown,
    'answers_short': short_answers_markdown,
    'claims_verdicts': verdicts_markdown,
    **{f'claims_{letter}': functools.partial(group_markdown, letter=letter) for letter in GROUPS},
    'claims_laws': laws_markdown,
}


def _scaling(directory: Path) -> tuple[Findings, list[Drawing]] | None:
    """Returns the scaling study, if any, with its figure of loss over parameters."""
    if not (directory / export.SCALING / 'study.json').is_file():
        return None
    findings = load_findings(directory / export.SCALING)
    drawings = [drawing for drawing in figures(findings) if drawing.stem == 'loss_parameters']
    return findings, drawings


@functools.cache
def _template(name: str) -> jinja2.Template:
    """Returns a template from experiments/claims/templates."""
    templates = environment(html=False).overlay(
        loader=jinja2.PackageLoader('experiments.claims'), keep_trailing_newline=True
    )
    # Functions and constants that the templates use.
    templates.globals |= {
        'phrases': PHRASES,
        'timedelta': datetime.timedelta,
        'decisive': decisive,
        'markdown_table': markdown_table,
        'has_figure': has_figure,
        'tables': _tables,
        'shared': _shared,
    }
    # Escapes text, so that Markdown shows it as it is.
    templates.filters['md'] = lambda text: text.replace('<', '&lt;').replace('*', r'\*')
    return templates.get_template(name)


def _table_of_claims(claims: Sequence[ClaimResult], page: str) -> str:
    """Returns a table of all claims, with links to `page` ('{}' stands for the group's letter)."""
    titles: list[Heading] = [
        ('', True),
        ('claim', True),
        ('verdict', True),
        ('what it means', True),
        ('number [95 % interval]', True),
    ]
    lines = []
    for claim in claims:
        group_letter = claim.name[0].lower()
        link = f'{page.format(group_letter)}#{claim.name.lower()}'  # 'claims_b.md#b2'
        phrase = PHRASES[ClaimVerdict(claim.verdict)]
        verdict = claim.verdict
        if verdict == ClaimVerdict.HOLDS_ONLY_IF:
            verdict = phrase.of_one  # 'holds under a condition', which can end a sentence
        row = claim.decisive
        lines.append(
            [
                Markup(f'[{claim.name}]({link})'),
                claim.title,
                f'{phrase.mark} {verdict}',
                _meaning(claim),
                _evidence(row) if row else NONE,
            ]
        )
    return markdown_table(titles, lines)


def _meaning(claim: ClaimResult) -> str:
    """Returns what a verdict means, or its condition; with what an undecided claim needs."""
    texts = []
    if claim.meaning:
        texts.append(claim.meaning)
    elif claim.condition:
        texts.append(f'only if {claim.condition}')
    if claim.needed:
        # '40 seeds in place of 16, to tell ...' -> '40 seeds in place of 16'
        short_need, _, _ = claim.needed.partition(', ')
        texts.append(f'needs {short_need}')
    return '; '.join(texts) or NONE


def decisive(claim: ClaimResult) -> str:
    """Formats the decisive row of a claim with its quantity and context; '' if there is none.

    For example, '0, asymmetry of A[n] (part: symmetry)'.
    """
    row = claim.decisive
    if row is None:
        return ''
    text = _evidence(row)
    distinct_texts = dict.fromkeys(context_texts(row, row.context))
    distinct_texts.pop(row.quantity, None)  # `text` has it already
    if distinct_texts:
        text += f' ({", ".join(distinct_texts)})'
    return text


def _evidence(row: Row) -> str:
    """Formats a row's value and quantity. A dagger marks an arm below its yardstick."""
    dagger = '†' if row.is_short else ''
    return f'{amount(row)}, {row.quantity}{dagger}'


def amount(row: Row, with_unit: bool = True) -> str:
    """Formats the value of a row with its interval: '+0.0102 [+0.0062, +0.0154] nats/token'."""
    text = _number(row.value, row.unit)
    if row.low is not None and row.high is not None:
        text += f' [{_number(row.low, row.unit)}, {_number(row.high, row.unit)}]'
    if with_unit and row.unit:
        text += f' {row.unit}'
    return text


def _number(value: float, unit: str) -> str:
    """Formats a difference in loss as '+0.0102', and any other number as '3,072' or '3.1e-16'."""
    if unit == UNIT:
        return f'{value:+.4f}'
    if value == round(value) and abs(value) < 1e12:
        return f'{value:,.0f}'
    return f'{value:.4g}'


def _expected(row: Row) -> str:
    """Formats the expected value of a row, such as '0 ± 1e-12'; '-' if there is none."""
    if row.expected is None:
        return NONE
    text = _number(row.expected, row.unit)
    if row.tolerance:
        text += f' ± {row.tolerance:.3g}'
    return text


def _shared(claim: ClaimResult) -> str:
    """Formats the factors that are equal in all rows, such as 'model decoder, steps 500'."""
    if not claim.rows:
        return ''
    texts = []
    for factor, value in claim.rows[0].context.items():
        if all(row.context.get(factor) == value for row in claim.rows):
            texts.append(f'{words(factor)} {value}')
    return ', '.join(texts)


def _tables(claim: ClaimResult) -> list[str]:
    """Returns the tables of a claim: one of differences and one of other values, if any."""
    tables = []
    differences = group_parts(claim.rows)
    if differences:
        tables.append(_table_of_differences(differences))
    other_rows = [row for row in claim.rows if row.kind not in PARTS]
    if other_rows:
        tables.append(_table_of_values(other_rows))
    return tables


def _table_of_differences(differences: Sequence[Mapping[str, Row]]) -> str:
    """Returns a table with a line for each difference and a column for each of its parts.

    A difference is a dict of rows by kind, as in `group_parts`.
    """
    # A title is paired with whether its column is aligned to the left.
    titles: list[Heading] = [(title, False) for title in PARTS.values()]
    titles += [('verdict', True), *_TRAINING]
    first_rows = []
    lines = []
    for row_by_kind in differences:
        amounts = []
        rows = []
        for kind in PARTS:
            row = row_by_kind.get(kind)
            if row is None:
                amounts.append(NONE)
            else:
                amounts.append(amount(row, with_unit=False))
                rows.append(row)
        decisions = dict.fromkeys(row.decision for row in rows if row.decision)
        verdict = ' / '.join(decisions) or NONE
        for_or_against = _for_or_against(row_by_kind.values())
        first_rows.append(rows[0])
        lines.append([*amounts, verdict, *_training(rows), for_or_against])
    return _table('arm', titles, first_rows, lines)


def _table_of_values(rows: Sequence[Row]) -> str:
    """Returns a table with a line for each row."""
    # A title is paired with whether its column is aligned to the left.
    titles: list[Heading] = [('value', False), ('expected', False), ('verdict', True), *_TRAINING]
    lines = []
    for row in rows:
        verdict = row.decision or NONE
        training = _training([row])
        for_or_against = _for_or_against([row])
        lines.append([amount(row), _expected(row), verdict, *training, for_or_against])
    has_arms = any(row.decision for row in rows)
    first_title = 'arm' if has_arms else 'quantity'
    return _table(first_title, titles, rows, lines)


def _training(rows: Sequence[Row]) -> list[str]:
    """Returns a line's cells about training: length, tokens, loss and yardstick of one of its rows.

    A row that decides the claim is preferred to one that is only shown, then a row with a loss.
    """
    deciding = [row for row in rows if row.speaks != Speaks.BESIDE]
    candidates = deciding or list(rows)
    with_loss = [row for row in candidates if row.loss is not None]
    row = with_loss[0] if with_loss else candidates[-1]
    loss = NONE
    if row.loss is not None:
        dagger = '†' if row.is_short else ''
        loss = f'{row.loss:.3f}{dagger}'
    return [row.length or NONE, si(row.tokens), loss, row.yardstick or NONE]


def _table(
    first_title: str, titles: Sequence[Heading], rows: Sequence[Row], cells: Sequence[Sequence[str]]
) -> str:
    """Returns a table of quantities, differing factors and cells, without empty columns.

    Args:
        first_title: The title of the quantities.
        titles: The titles of the cells, except the last one ('for or against').
        rows: A row for each line, whose quantity and context are shown.
        cells: The cells of each line.
    """
    factors = differing_factors(rows)
    lines = []
    for row, cells_of_row in zip(rows, cells, strict=True):
        context = [row.context.get(factor, NONE) for factor in factors]
        lines.append([row.quantity, *context, *cells_of_row])
    factor_titles = [(words(factor), True) for factor in factors]
    last_title = ('for or against|the claim', True)
    all_titles = [(first_title, True), *factor_titles, *titles, last_title]

    columns = zip(*lines, strict=True)
    is_filled = [any(cell != NONE for cell in column) for column in columns]
    filled_titles = list(compress(all_titles, is_filled))
    filled_lines = [list(compress(line, is_filled)) for line in lines]
    return markdown_table(filled_titles, filled_lines)


def _for_or_against(rows: Iterable[Row]) -> str:
    """Formats how rows speak for or against a claim: 'for', or 'for "worse", open "not better"'."""
    texts = []
    for row in rows:
        if row.speaks == Speaks.BESIDE:  # only shown
            continue
        text = str(row.speaks)  # 'for', 'against' or 'open'
        if row.relation:
            text += f' "{words(row.relation)}"'
        texts.append(text)
    distinct_texts = dict.fromkeys(texts)
    return ', '.join(distinct_texts) or NONE


def has_figure(claim: ClaimResult) -> bool:
    """Returns whether a claim has differences to draw."""
    return any(row.kind in SHAPES for row in claim.rows)


def claim_figure(claim: ClaimResult) -> Drawing:
    """Draws a claim's differences, in one panel at the same shape and one at equal count.

    A line is named by its quantity, such as 'qk/no_v', and by factors such as 'd_model=96' where
    several lines have the same quantity.
    """
    differences = group_parts(claim.rows)
    # The rows of a difference have the same quantity and context.
    first_rows = [next(iter(row_by_kind.values())) for row_by_kind in differences]
    quantities = {row.quantity for row in first_rows}
    factors = []
    if len(quantities) < len(differences):
        factors = differing_factors(first_rows)

    lines_by_panel: dict[str, list[Line]] = {}
    for kind, shape in SHAPES.items():
        for row_by_kind in differences:
            row = row_by_kind.get(kind)
            if row is None:
                continue
            names = context_texts(row, factors)
            if len(quantities) > 1 or not names:
                names.insert(0, short(row.quantity, _LONGEST_QUANTITY))
            line = _line(
                row,
                style_of=row.quantity,
                is_decided=row.speaks in (Speaks.FOR, Speaks.AGAINST),
                name=', '.join(names),
                right=row.decision or '',
            )
            lines_by_panel.setdefault(shape.panel, []).append(line)
    return _drawing(f'{claim.name.lower()}_differences', lines_by_panel)


# The width of the figure of answers, in inches. It leaves room for the names of the lines.
ANSWERS_WIDTH = 9.0
# The margin of the decoders' studies, in nats/token, which the figure of answers shows as a band.
ANSWERS_MARGIN = 0.01


def answers_figure(answers: Sequence[export.Answer]) -> Drawing | None:
    """Draws the differences of all changes in a decoder at equal parameter count.

    The difference after longer training is below that of the usual length, with a hollow marker in
    the style of its own verdict. A dagger marks an arm below its yardstick. Returns None if no
    change has a verdict.
    """
    decided = [decision.value for decision in DECIDED]
    model, kind = DECIDED_IN
    lines = []
    for answer in answers:
        judged_answer = _without_withheld_rows(answer)
        row = judged_answer.row(model, kind)
        if row is None:
            continue
        verdict = row.decision or ''
        dagger = '†' if row.is_short else ''
        line = _line(
            row,
            style_of=verdict,
            is_decided=verdict in decided,
            name=f'{answer.name}{dagger}: {verdict}',
            meaning=verdict,
            longer_row=judged_answer.row(model, Kind.LONGER),
        )
        lines.append(line)
    if not lines:
        return None
    panels = {SHAPES[kind].panel: lines}
    black = Decision.NO_VERDICT.value
    # With `far`, the axis reaches to the largest difference.
    drawing = _drawing('answers', panels, black, margin=ANSWERS_MARGIN, far=math.inf)
    return dataclasses.replace(drawing, file_width=ANSWERS_WIDTH)


def _line(
    row: Row,
    *,
    style_of: str,
    is_decided: bool,
    name: str,
    right: str = '',
    meaning: str = 'mean',
    longer_row: Row | None = None,
) -> Line:
    """Returns the line of a difference in a figure.

    Args:
        row: The row of the difference.
        style_of: Lines with equal texts here share a style.
        is_decided: Whether the name is bold.
        name: The text beside the axis.
        right: A text below the name.
        meaning: What the legend calls the marker of the difference.
        longer_row: The row of the difference after longer training, if it is shown below this one.
            Its style is that of its own verdict.
    """
    longer = None
    longer_arm = ''
    if longer_row is not None:
        longer = (longer_row.value, longer_row.low, longer_row.high)
        longer_arm = longer_row.decision or ''
    # The reported range belongs to a row that decides the claim, not to one that is only shown.
    is_deciding = row.speaks != Speaks.BESIDE
    reported = None
    if is_deciding and row.expected is not None and row.tolerance is not None:
        reported = (row.expected - row.tolerance, row.expected + row.tolerance)
    return Line(
        arm=style_of,
        mean=row.value,
        low=row.low,
        high=row.high,
        right=right,
        is_decided=is_decided,
        name=name,
        reported=reported,
        meaning=meaning,
        longer=longer,
        longer_arm=longer_arm,
        longer_meaning=SHAPES[Kind.LONGER].column,
    )


def _drawing(stem: str, panels: Panels, black: str = '', **options: float) -> Drawing:
    """Returns a forest plot with the arm `black` in black. `options` are passed to `forest`."""
    all_lines = [line for lines in panels.values() for line in lines]
    arms = dict.fromkeys(line.arm for line in all_lines)  # an ordered set
    # Styles go by order, so those of longer training alone come last.
    arms |= dict.fromkeys(line.longer_arm for line in all_lines if line.longer_arm)
    style_by_arm = styles(list(arms), baseline=black)

    def draw(width: float) -> Figure:
        xlabel = f'difference ({UNIT})'
        return forest(panels, xlabel, style_by_arm, longest=_LONGEST, width=width, **options)

    return Drawing(stem, draw)
