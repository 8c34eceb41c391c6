"""The claims of a directory as Markdown, from claims.json and the scaling study alone."""

import datetime
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from qkattn.claims import rules
from qkattn.claims.claim import ClaimResult, ClaimVerdict, Kind, Row, Speaks
from qkattn.claims.export import ANSWERS, CLAIMS, MODELS, SCALING, read_answers, read_claims
from qkattn.claims.figures import (
    PARTS,
    Compared,
    answers_figure,
    claim_figure,
    compared,
    has_figure,
    located,
    varying,
)
from qkattn.claims.studies import UNIT
from qkattn.report.figures import figures
from qkattn.report.figures.style import Drawing, write_plots
from qkattn.report.page import described
from qkattn.report.prose import NONE, environment, words
from qkattn.report.sheets import Heading, sheets
from qkattn.report.tables import markdown_table
from qkattn.report.verify import Block
from qkattn.stats.decision import Decision
from qkattn.storage.files import write_atomic
from qkattn.verdict import Findings, Study, load_findings

PAGE = 'claims.md'
GROUPS = {
    'a': 'Why two matrices?',
    'b': 'Is W_Q needed?',
    'c': 'Why not Q Q^T?',
    'd': 'One projection or two?',
    'e': 'What the literature adds',
}
# By verdict: its mark, and what one claim does, and several do.
PHRASES = {
    ClaimVerdict.HOLDS: ('●', 'holds', 'hold'),
    ClaimVerdict.HOLDS_HERE: ('◉', 'holds in one setting', 'hold in one setting'),
    ClaimVerdict.HOLDS_ONLY_IF: ('◐', 'holds under a condition', 'hold under a condition'),
    ClaimVerdict.FAILS: ('✕', 'fails', 'fail'),
    ClaimVerdict.FAILS_HERE: ('⊗', 'fails in one setting', 'fail in one setting'),
    ClaimVerdict.UNDECIDED: ('○', 'is undecided', 'are undecided'),
}
_SPOKEN = ('for or against|the claim', True)
_DIFFERENCES: list[Heading] = [
    (f'removed, {UNIT}|same shape', False),
    (f'reinvested, {UNIT}|matched - same shape', False),
    (f'both, {UNIT}|equal parameter count', False),
    *(('verdict', True), _SPOKEN),
]
_VALUES: list[Heading] = [('value', False), ('expected', False), _SPOKEN]
_SHAPES = {Kind.REMOVED: 'same shape', Kind.MATCHED: 'equal count'}


def write_page(directory: str | Path) -> Path:
    """Writes plots/ and claims.md beside a claims.json; returns the path of the page.

    ReportError if claims.json or the scaling study cannot be read; RunDirectoryError if claims.json
    was edited.
    """
    directory = Path(directory)
    drawn = [claim_figure(claim) for claim in read_claims(directory) if has_figure(claim)]
    if figure := answers_figure(read_answers(directory)):
        drawn.append(figure)
    scaling = _scaling(directory)
    drawn += [Drawing(f.figure, f'{SCALING}_{f.stem}') for f in _laws(*scaling)] if scaling else []
    write_plots(directory / 'plots', drawn, kinds=('png',))
    blocks = [claims_markdown(directory, '.', part, '') for part in ('verdicts', *GROUPS, 'laws')]
    return write_atomic(directory / PAGE, '# Claims\n\n' + '\n'.join(blocks))


def claims_markdown(directory: Path, base: str, part: str, page: str = 'claims_{}.md') -> str:
    """A part of the page: the verdicts, the claims of a group, or the scaling laws.

    Links to files of the directory begin with `base`; those to claims are to the `page` of a group.
    """
    claims, scaling = read_claims(directory), _scaling(directory) if part == 'laws' else None
    counts = {v: [claim.verdict for claim in claims].count(v) for v in PHRASES}
    return _template('claims.md.j2').render(
        part=part,
        base=base,
        claims=[claim for claim in claims if part in (claim.name[0].lower(), 'verdicts')],
        group=GROUPS.get(part),
        scales=list(dict.fromkeys(claim.scale for claim in claims)),
        counts=[f'{n} {PHRASES[v][1 if n == 1 else 2]}' for v, n in counts.items() if n],
        missing=list(dict.fromkeys(text for claim in claims for text in claim.missing)),
        verdicts=_md(_verdicts(claims, page)),
        laws=[described(*scaling, f) for f in _laws(*scaling)] if scaling else [],
        law_tables=[s for s in sheets(*scaling) if s.name == 'laws'] if scaling else [],
    )


def answers_markdown(directory: Path, base: str) -> str:
    """The table of what each matrix is worth, with its sources and figure."""
    made = read_answers(directory)
    columns = [(model, kind) for model in MODELS for kind in _SHAPES]
    decided = columns.index(('decoder', Kind.MATCHED))
    titles: list[Heading] = [(f'{model}, {_SHAPES[kind]}', False) for model, kind in columns]
    titles.insert(decided + 1, ('verdict', True))
    rows: list[list[str]] = []
    sources: dict[str, dict[tuple, Mapping[str, str]]] = {}
    others: list[str | None] = []
    for answer in made:
        parts = [answer.row(model, kind) for model, kind in columns]
        cells, row = [*map(_cell, parts)], parts[decided]
        cells.insert(decided + 1, row.decision or NONE if row else NONE)
        share = NONE
        if answer.attention is not None:
            share = f'{answer.attention:+.0%}'.replace('+0%', '0%').replace('%', ' %')
        rows.append([answer.name, share, *cells])
        for row in filter(None, parts):
            where = row.study, row.context['size'], row.context['corpus']
            if row.decision == Decision.NO_VERDICT.value:
                others.append(row.study)
            else:
                sources.setdefault(row.context['model'], {})[where] = row.context
    return _template('answers.md.j2').render(
        table=markdown_table([('', True), ('size of attention', False), *titles], rows),
        sources=sources,
        others=list(dict.fromkeys(others)),
        figure=f'{base}/plots/answers.png' if answers_figure(made) else None,
    )


def _cell(row: Row | None) -> str:
    """A difference and the longer side of its interval; a dagger where there is no verdict."""
    if row is None:
        return NONE
    value = f'{row.value:+.3f}' + '†' * (row.decision == Decision.NO_VERDICT.value)
    if row.low is None or row.high is None:
        return value
    return Markup('<br>').join([value, f'±{max(row.value - row.low, row.high - row.value):.3f}'])


def _block(made: Any, file: str, **arguments: str) -> Block:
    """A block of results, which is empty where the directory lacks the file."""
    return Block(
        lambda directory, base: (
            made(directory, base, **arguments) if (directory / file).is_file() else ''
        ),
        SCALING,
    )


BLOCKS: Mapping[str, Block] = {  # blocks of `report.verify.check_page`
    'answers': _block(answers_markdown, ANSWERS),
    **{
        f'claims_{part}': _block(claims_markdown, CLAIMS, part=part)
        for part in ('verdicts', *GROUPS, 'laws')
    },
}


def _scaling(directory: Path) -> tuple[Study, Findings] | None:
    path = directory / SCALING
    return load_findings(path) if (path / 'study.json').is_file() else None


def _laws(study: Study, findings: Findings) -> list[Drawing]:
    return [figure for figure in figures(study, findings) if figure.stem == 'loss_parameters']


@functools.cache
def _template(name: str) -> jinja2.Template:
    """A template of claims, with the functions of this module as globals."""
    made = environment(html=False).overlay(loader=jinja2.PackageLoader('qkattn.claims'))
    made.globals |= {
        'phrases': PHRASES,
        'facts': _facts,
        'decisive': decisive,
        'table': markdown_table,
        'has_figure': has_figure,
        'tables_of': _tables,
        'shared': _shared,
    }
    made.filters['md'] = _md
    return made.get_template(name)


def _md(text: str) -> str:
    """Text that Markdown shows as it is."""
    return text.replace('<', '&lt;').replace('*', r'\*')


def _verdicts(claims: Sequence[ClaimResult], page: str) -> str:
    """A row for each claim: title, verdict and number, with links to `page`."""
    titles: list[Heading] = [(n, True) for n in ('', 'claim', 'verdict', 'number [95 % interval]')]
    rows = []
    for claim in claims:
        link = f'{page.format(claim.name[0].lower())}#{claim.name.lower()}'
        verdict = f'{PHRASES[ClaimVerdict(claim.verdict)][0]} {claim.verdict}'
        if claim.verdict == ClaimVerdict.HOLDS_ONLY_IF:
            verdict += f' {claim.condition}'
        elif claim.needed:
            verdict += f', needs {claim.needed.partition(", ")[0]}'
        row = rules.decisive(claim)
        number = f'{amount(row)} {row.unit}'.strip() + f', {row.quantity}' if row else NONE
        rows.append([Markup(f'[{claim.name}]({link})'), claim.title, verdict, number])
    return markdown_table(titles, rows)


def decisive(claim: ClaimResult) -> str:
    """The decisive number with its unit, quantity and context."""
    if (row := rules.decisive(claim)) is None:
        return ''
    where = ', '.join(dict.fromkeys([row.quantity, *located(row, row.context)]))
    return f'{amount(row)} {row.unit}'.strip() + f' ({where})'


def _facts(claim: ClaimResult) -> dict[str, str]:
    """Source, rule and provenance of a claim."""
    command = f'python -m experiments.claims {claim.name}'
    facts = {
        'source': claim.source,
        'reported': claim.reported,
        'decided by': claim.rule,
        'command': f'`{command} --scale={claim.scale} --workdir=runs/{claim.scale}`',
        'commit': claim.commit,
        'hardware': claim.hardware,
        'time': str(datetime.timedelta(seconds=round(claim.seconds or 0))),
        'studies': ', '.join(claim.studies),
        'baselines': '; '.join(claim.models),
        'missing': '; '.join(claim.missing),
    }
    return {name: value for name, value in facts.items() if value}


def amount(row: Row | None) -> str:
    """'+0.0102 [+0.0062, +0.0154]', '16', '3.1e-16': the value, with its interval if it has one.

    Differences have a sign, losses four decimals.
    """
    if row is None:
        return NONE
    sign = '+' * (row.kind in PARTS)

    def number(value: float) -> str:
        if row.unit.startswith('nats'):
            return f'{value:{sign}.4f}'
        whole = value == round(value) and abs(value) < 1e12
        return f'{value:{sign},.0f}' if whole else f'{value:{sign}.4g}'

    if row.low is None or row.high is None:
        return number(row.value)
    return f'{number(row.value)} [{number(row.low)}, {number(row.high)}]'


def _expected(row: Row) -> str:
    """'16', '0 ± 1e-12', '-' where nothing is expected."""
    if row.expected is None:
        return NONE
    value = Row(row.quantity, row.kind, {}, row.expected, row.speaks, row.unit)
    return amount(value) + (f' ± {row.tolerance:.3g}' if row.tolerance else '')


def _shared(claim: ClaimResult) -> str:
    """'model decoder, steps 500': the factors that all contexts share."""
    first = claim.rows[0].context if claim.rows else {}
    same = [i for i in first.items() if all(i in row.context.items() for row in claim.rows)]
    return ', '.join(f'{words(name)} {value}' for name, value in same)


def _tables(claim: ClaimResult) -> list[str]:
    """A table of differences with their parts, and one of the other values."""
    lines, others = compared(claim.rows), [row for row in claim.rows if row.kind not in PARTS]
    parts = [
        [*(amount(line.rows.get(kind)) for kind in PARTS), line.decision or NONE]
        + [_spoken(line.rows.values())]
        for line in lines
    ]
    values = [[f'{amount(r)} {r.unit}'.strip(), _expected(r), _spoken([r])] for r in others]
    made = [_table('arm', _DIFFERENCES, lines, parts)] if lines else []
    return made + ([_table('quantity', _VALUES, others, values)] if others else [])


def _table(
    first: str,
    columns: Sequence[Heading],
    rows: Sequence[Row | Compared],
    cells: Sequence[Sequence[str]],
) -> str:
    """What is compared, the contexts that differ, and the cells of each row in these columns."""
    names = varying(rows)
    titles = [(first, True), *((words(name), True) for name in names), *columns]
    lines = [
        [row.quantity, *(row.context.get(name, NONE) for name in names), *more]
        for row, more in zip(rows, cells, strict=True)
    ]
    return markdown_table(titles, lines)


def _spoken(rows: Iterable[Row]) -> str:
    """'for'; 'for "worse", open "not better"' of several that decide."""
    texts = [
        f'{row.speaks} "{words(row.relation)}"' if row.relation else str(row.speaks)
        for row in rows
        if row.speaks != Speaks.BESIDE
    ]
    return ', '.join(dict.fromkeys(texts)) or NONE
