"""The claims of a directory as Markdown, from claims.json and the scaling study alone."""

import dataclasses
import datetime
import functools
import math
from collections.abc import Iterable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from experiments.claims import export
from experiments.claims.claim import UNIT, ClaimResult, ClaimVerdict, Kind, Row, Speaks
from qkattn.jobs.output import short
from qkattn.report import described
from qkattn.report.figures import figures
from qkattn.report.figures.forest import Line, Panels, forest
from qkattn.report.figures.style import Drawing, style_sheet, styles, write_plots
from qkattn.report.prose import NONE, environment, lasting, si, words
from qkattn.report.tables import Heading, markdown_table, sheets
from qkattn.report.verify import Blocks
from qkattn.stats.decision import Decision
from qkattn.storage.files import write_atomic
from qkattn.verdict import Findings, load_findings
from qkattn.verdict.judging import DECIDED

PAGE = 'claims.md'
GROUPS = {
    'a': 'Why two matrices?',
    'b': 'Is W_Q needed?',
    'c': 'Why not Q Q^T?',
    'd': 'One projection or two?',
    'e': 'What the literature adds',
}
PARTS_OF_PAGE = ('verdicts', *GROUPS, 'laws')
# By verdict: its mark, and what one claim does, and several do.
PHRASES = {
    ClaimVerdict.HOLDS: ('●', 'holds', 'hold'),
    ClaimVerdict.HOLDS_HERE: ('◉', 'holds in one setting', 'hold in one setting'),
    ClaimVerdict.HOLDS_ONLY_IF: ('◐', 'holds under a condition', 'hold under a condition'),
    ClaimVerdict.FAILS: ('✕', 'fails', 'fail'),
    ClaimVerdict.FAILS_HERE: ('⊗', 'fails in one setting', 'fail in one setting'),
    ClaimVerdict.UNDECIDED: ('○', 'is undecided', 'are undecided'),
}
PARTS: dict[str, str] = {
    Kind.SAME_SHAPE: f'at the same shape, {UNIT}',
    Kind.REINVESTED: f'reinvesting, {UNIT}|matched - same shape',
    Kind.MATCHED: f'total, {UNIT}|equal parameter count',
}
# The parts in figures, and in the table of answers.
SHAPES: dict[Kind, tuple[str, str]] = {
    Kind.SAME_SHAPE: ('same shape, fewer parameters', 'same shape'),
    Kind.MATCHED: ('equal parameter count', 'equal count'),
}
# How well the models behind a row are trained, and whether its difference is settled.
_OF_STATE: list[Heading] = [('length', True), ('tokens', False)]
_OF_STATE += [(f'loss, {UNIT}', False), ('yardstick', True)]
_OF_CONTEXT = {'equal': 'same shape', 'matched': 'equal parameter count'}  # its 'shape'
DECIDED_IN = 'decoder', Kind.MATCHED  # where answers have their verdict
# Characters of a name in figures, and of the part of it that says what is compared.
_LONGEST = 52
_QUANTITY = 22


def compared(rows: Iterable[Row]) -> list[dict[str, Row]]:
    """Rows of parts of differences by kind, for each `quantity` and context in their order.

    The kind tells the shape, which leaves the context; of two rows of one kind, the one that
    decides is shown.
    """
    by_context: dict[tuple, dict[str, Row]] = {}
    for row in (row for row in rows if row.kind in PARTS):
        context = {name: value for name, value in row.context.items() if name != 'shape'}
        parts = by_context.setdefault((row.quantity, *context.items()), {})
        if row.speaks != Speaks.BESIDE or row.kind not in parts:
            parts[row.kind] = dataclasses.replace(row, context=context)
    return list(by_context.values())


def varying(rows: Sequence[Row]) -> list[str]:
    """The names in contexts whose values differ between rows, and do not only repeat `quantity`."""
    names = []
    for name in dict.fromkeys(name for row in rows for name in row.context):
        pairs = {(row.context.get(name), row.quantity) for row in rows}
        is_news = any(value not in (None, quantity) for value, quantity in pairs)
        if len({value for value, _ in pairs}) > 1 and is_news:
            names.append(name)
    return names


def located(row: Row, names: Iterable[str]) -> list[str]:
    """'d_model=64', 'steps 500', 'part: symmetry': these of its context, named where needed."""
    values = [(name, row.context[name]) for name in names if name in row.context]
    values = [
        (name, _OF_CONTEXT.get(value, value) if name == 'shape' else value)
        for name, value in values
    ]
    if row.kind == Kind.EXACT:
        return [f'{words(name)}: {value}' for name, value in values]
    return [f'{words(name)} {value}' if value[:1].isdigit() else value for name, value in values]


def write_page(directory: str | Path) -> Path:
    """Writes plots/ and claims.md beside a claims.json; returns the path of the page.

    ReportError if claims.json or the scaling study cannot be read; RunDirectoryError if claims.json
    was edited.
    """
    directory = Path(directory)
    drawn = [claim_figure(claim) for claim in export.read_claims(directory) if has_figure(claim)]
    if figure := answers_figure(export.read_answers(directory)):
        drawn.append(figure)
    if scaling := _scaling(directory):
        drawn += [Drawing(law.figure, f'scaling_{law.stem}') for law in scaling[1]]
    write_plots(directory / 'plots', drawn, kinds=('png',))
    blocks = [claims_markdown(directory, '.', part, '') for part in PARTS_OF_PAGE]
    return write_atomic(directory / PAGE, '# Claims\n\n' + '\n'.join(blocks))


def claims_markdown(directory: Path, base: str, part: str, page: str = 'claims_{}.md') -> str:
    """A part of the page: the verdicts, the claims of a group, or the scaling laws.

    Links to files of the directory begin with `base`; those to claims are to the `page` of a group.
    """
    claims = export.read_claims(directory)
    scaling = _scaling(directory) if part == 'laws' else None
    counts = {v: [claim.verdict for claim in claims].count(v) for v in PHRASES}
    return _template('claims.md.j2').render(
        part=part,
        base=base,
        claims=[claim for claim in claims if part in (claim.name[0].lower(), 'verdicts')],
        group=GROUPS.get(part),
        counts=[f'{n} {PHRASES[v][1 if n == 1 else 2]}' for v, n in counts.items() if n],
        verdicts=_verdicts(claims, page),
        laws=[described(scaling[0], law) for law in scaling[1]] if scaling else [],
        law_tables=[s for s in sheets(scaling[0]) if s.name == 'laws'] if scaling else [],
    )


def answers_markdown(directory: Path, base: str) -> str:
    """The table of what each matrix is worth, with its sources and figure.

    Only differences with a verdict, or parts of one, are in it; a model without any has no columns.
    """
    made = [answer for answer in map(_judged, export.read_answers(directory)) if answer.rows]
    columns = [
        (model, kind)
        for model in export.MODELS
        for kind in SHAPES
        if any(answer.row(model, kind) for answer in made)
    ]
    titles: list[Heading] = [('', True), ('size of attention', False)]
    for model, kind in columns:
        titles.append((f'{model}, {SHAPES[kind][1]}', False))
        if (model, kind) == DECIDED_IN:
            titles.append(('verdict', True))
    return _template('answers.md.j2').render(
        table=markdown_table(titles, [_answer(answer, columns) for answer in made]),
        sources=_sources(made),
        has_short=any(row.is_short for answer in made for row in answer.rows),
        figure=f'{base}/plots/answers.png' if answers_figure(made) else None,
    )


def _judged(answer: export.Answer) -> export.Answer:
    """An answer without the differences whose verdict is withheld."""
    rows = tuple(row for row in answer.rows if row.decision != Decision.NO_VERDICT.value)
    return dataclasses.replace(answer, rows=rows)


def _answer(answer: export.Answer, columns: Sequence[tuple[str, Kind]]) -> list[str]:
    """The cells of an answer: its name, the size of attention, and a difference in each column."""
    share = NONE if answer.attention is None else f'{round(100 * answer.attention):+d} %'
    cells = [answer.name, share.replace('+0', '0')]
    for column in columns:
        row = answer.row(*column)
        cells.append(_cell(row))
        if column == DECIDED_IN:
            cells.append(lasting(row.decision or NONE, row.length or '') if row else NONE)
    return cells


def _sources(answers: Iterable[export.Answer]) -> dict[str, dict[tuple, dict[str | None, None]]]:
    """The studies behind answers, by model and setting."""
    sources: dict[str, dict[tuple, dict[str | None, None]]] = {}
    for answer in answers:
        for row in answer.rows:
            setting = tuple(row.context[name] for name in ('size', 'corpus', 'tokens'))
            places = sources.setdefault(row.context['model'], {})
            places.setdefault(setting, {})[row.study] = None
    return sources


def _cell(row: Row | None) -> str:
    """A difference and its 95 % interval; a dagger where the arm falls short of its yardstick."""
    if row is None:
        return NONE
    value = f'{row.value:+.3f}' + '†' * row.is_short
    if row.low is None or row.high is None:
        return value
    return Markup('<br>').join([value, f'[{row.low:+.3f}, {row.high:+.3f}]'])


BLOCKS: Blocks = {  # blocks of `report.verify.check_page`
    'answers': answers_markdown,
    **{f'claims_{part}': functools.partial(claims_markdown, part=part) for part in PARTS_OF_PAGE},
}


def _scaling(directory: Path) -> tuple[Findings, list[Drawing]] | None:
    """The scaling study with the figure of its laws; None if there is none."""
    if not (directory / export.SCALING / 'study.json').is_file():
        return None
    findings = load_findings(directory / export.SCALING)
    return findings, [figure for figure in figures(findings) if figure.stem == 'loss_parameters']


@functools.cache
def _template(name: str) -> jinja2.Template:
    """A template of claims, with the functions of this module as globals."""
    made = environment(html=False).overlay(loader=jinja2.PackageLoader('experiments.claims'))
    made.globals |= {
        'phrases': PHRASES,
        'timedelta': datetime.timedelta,
        'decisive': decisive,
        'table': markdown_table,
        'has_figure': has_figure,
        'tables_of': _tables,
        'shared': _shared,
    }
    # Text that Markdown shows as it is.
    made.filters['md'] = lambda text: text.replace('<', '&lt;').replace('*', r'\*')
    return made.get_template(name)


def _verdicts(claims: Sequence[ClaimResult], page: str) -> str:
    """A row for each claim: title, verdict and number, with links to `page`."""
    titles: list[Heading] = [(n, True) for n in ('', 'claim', 'verdict', 'number [95 % interval]')]
    rows = []
    for claim in claims:
        link = f'{page.format(claim.name[0].lower())}#{claim.name.lower()}'
        verdict = f'{PHRASES[ClaimVerdict(claim.verdict)][0]} {claim.verdict}'
        if claim.condition:
            verdict += f' {claim.condition}'
        elif claim.needed:
            verdict += f', needs {claim.needed.partition(", ")[0]}'
        row = claim.decisive
        number = f'{amount(row)}, {row.quantity}' if row else NONE
        rows.append([Markup(f'[{claim.name}]({link})'), claim.title, verdict, number])
    return markdown_table(titles, rows)


def decisive(claim: ClaimResult) -> str:
    """The decisive number with its unit, quantity and context."""
    if (row := claim.decisive) is None:
        return ''
    where = dict.fromkeys([row.quantity, *located(row, row.context)])
    return f'{amount(row)} ({", ".join(where)})'


def amount(row: Row, with_unit: bool = True) -> str:
    """'+0.0102 [+0.0062, +0.0154] nats/token', '16', '3.1e-16': the value, with its interval.

    Differences have a sign, losses four decimals.
    """
    is_loss = row.unit == UNIT
    sign = '+' * is_loss

    def number(value: float) -> str:
        whole = value == round(value) and abs(value) < 1e12
        return f'{value:{sign}{".4f" if is_loss else ",.0f" if whole else ".4g"}}'

    text = number(row.value)
    if row.low is not None and row.high is not None:
        text += f' [{number(row.low)}, {number(row.high)}]'
    return f'{text} {row.unit}' if with_unit and row.unit else text


def _expected(row: Row) -> str:
    """'16', '0 ± 1e-12', '-' where nothing is expected."""
    if row.expected is None:
        return NONE
    expected = amount(dataclasses.replace(row, value=row.expected, low=None), with_unit=False)
    return expected + (f' ± {row.tolerance:.3g}' if row.tolerance else '')


def _shared(claim: ClaimResult) -> str:
    """'model decoder, steps 500': the factors that all contexts share."""
    first = claim.rows[0].context if claim.rows else {}
    same = [i for i in first.items() if all(i in row.context.items() for row in claim.rows)]
    return ', '.join(f'{words(name)} {value}' for name, value in same)


def _tables(claim: ClaimResult) -> list[str]:
    """A table of differences with their parts, and one of the other values."""
    titles: list[Heading] = [*((title, False) for title in PARTS.values()), ('verdict', True)]
    titles += _OF_STATE
    firsts = []
    cells = []
    for parts in compared(claim.rows):
        firsts.append(next(iter(parts.values())))
        shown = [parts[kind] for kind in PARTS if kind in parts]
        decisions = dict.fromkeys(row.decision for row in shown if row.decision)
        numbers = [amount(parts[kind], False) if kind in parts else NONE for kind in PARTS]
        state = _state(shown)
        cells.append([*numbers, ' / '.join(decisions) or NONE, *state, _spoken(parts.values())])
    others = [row for row in claim.rows if row.kind not in PARTS]
    values = [
        [amount(row), _expected(row), row.decision or NONE, *_state([row]), _spoken([row])]
        for row in others
    ]
    first = 'arm' if any(row.decision for row in others) else 'quantity'
    of_values = [('value', False), ('expected', False), ('verdict', True), *_OF_STATE]
    tables = (
        ('arm', titles, firsts, cells),
        (first, of_values, others, values),
    )
    return [_table(*table) for table in tables if table[-1]]


def _state(rows: Sequence[Row]) -> list[str]:
    """Length, tokens, loss and yardstick of the arm whose verdict it is."""
    deciding = [row for row in rows if row.speaks != Speaks.BESIDE] or [*rows]
    row = next((row for row in deciding if row.loss is not None), deciding[-1])
    tokens = NONE if row.tokens is None else si(row.tokens)
    loss = NONE if row.loss is None else f'{row.loss:.3f}{"†" * row.is_short}'
    return [row.length or NONE, tokens, loss, row.yardstick or NONE]


def _table(
    first: str, titles: Sequence[Heading], rows: Sequence[Row], cells: Sequence[Sequence[str]]
) -> str:
    """What is compared, the contexts that differ, and the cells; without columns of NONE alone."""
    names = varying(rows)
    contexts = [(words(name), True) for name in names]
    lines = [
        [row.quantity, *(row.context.get(name, NONE) for name in names), *more]
        for row, more in zip(rows, cells, strict=True)
    ]
    titles = [(first, True), *contexts, *titles, ('for or against|the claim', True)]
    filled = [any(cell != NONE for cell in column) for column in zip(*lines, strict=True)]
    return markdown_table(
        list(compress(titles, filled)), [list(compress(line, filled)) for line in lines]
    )


def _spoken(rows: Iterable[Row]) -> str:
    """'for'; 'for "worse", open "not better"' of several that decide."""
    texts = [
        f'{row.speaks} "{words(row.relation)}"' if row.relation else str(row.speaks)
        for row in rows
        if row.speaks != Speaks.BESIDE
    ]
    return ', '.join(dict.fromkeys(texts)) or NONE


def has_figure(claim: ClaimResult) -> bool:
    """Whether it has differences; other rows have tables alone."""
    return any(row.kind in SHAPES for row in claim.rows)


def claim_figure(claim: ClaimResult) -> Drawing:
    """A panel at the baseline's shape and one at equal parameter count, with the decisions."""
    lines = compared(claim.rows)
    firsts = [next(iter(parts.values())) for parts in lines]
    quantities = {row.quantity for row in firsts}
    # Contexts tell lines apart, unless what is compared does.
    contexts = [] if len(quantities) == len(lines) else varying(firsts)
    panels: dict[str, list[Line]] = {}
    for kind in SHAPES:
        drawn = []
        for row in (parts[kind] for parts in lines if kind in parts):
            names = located(row, contexts)
            if len(quantities) > 1 or not names:
                names = [short(row.quantity, _QUANTITY), *names]
            texts = {'name': ', '.join(names), 'right': row.decision or ''}
            is_decided = row.speaks in (Speaks.FOR, Speaks.AGAINST)
            drawn.append(_line(row, row.quantity, is_decided, **texts))
        if drawn:
            panels[SHAPES[kind][0]] = drawn
    return _drawing(f'{claim.name.lower()}_differences', panels)


def answers_figure(answers: Sequence[export.Answer]) -> Drawing | None:
    """The difference of each change in a decoder at equal parameter count; None without any."""
    judged = map(_judged, answers)
    pairs = [(answer.name, row) for answer in judged if (row := answer.row(*DECIDED_IN))]
    decided = [decision.value for decision in DECIDED]
    lines = [
        _line(row, row.decision or '', row.decision in decided, name=f'{name}: {row.decision}')
        for name, row in pairs
    ]
    panels = {SHAPES[Kind.MATCHED][0]: lines}
    return _drawing('answers', panels, Decision.NO_VERDICT.value, far=math.inf) if lines else None


def _line(row: Row, arm: str, is_decided: bool, **texts: Any) -> Line:
    """The line of a difference in the style of `arm`."""
    reported = None
    is_beside = row.speaks == Speaks.BESIDE  # of another shape than what is reported
    if not is_beside and row.expected is not None and row.tolerance is not None:
        reported = row.expected - row.tolerance, row.expected + row.tolerance
    numbers = row.value, row.low, row.high
    return Line(arm, *numbers, is_decided=is_decided, reported=reported, **texts)


def _drawing(stem: str, panels: Panels, black: str = '', **options: float) -> Drawing:
    """A forest whose lines of the arm `black` are black."""
    arms = dict.fromkeys(line.arm for lines in panels.values() for line in lines)
    styles_of_arms = styles(list(arms), black)
    with style_sheet():
        figure = forest(panels, f'difference ({UNIT})', styles_of_arms, longest=_LONGEST, **options)
    return Drawing(figure, stem)
