"""The claims of a directory as Markdown: claims.json, the scaling laws beside it, nothing else."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from qkattn.claims.answers import MODELS, Answer, read_answers
from qkattn.claims.answers import NAME as ANSWERS
from qkattn.claims.decided import NAME as CLAIMS
from qkattn.claims.decided import ClaimResult, ClaimVerdict, Kind, Row, read_claims
from qkattn.claims.figures import answers_figure, claim_figures, overview
from qkattn.claims.shown import amount, claim_sheets, described_row, macros
from qkattn.report.figures import figures
from qkattn.report.figures.style import Drawing, write_plots
from qkattn.report.page import described
from qkattn.report.prose import END, NONE, environment, tidy
from qkattn.report.sheets import Heading, sheets
from qkattn.report.tables import markdown_table
from qkattn.report.verify import Block
from qkattn.stats.decision import Decision
from qkattn.storage.files import write_atomic
from qkattn.verdict import Findings, Study, load_findings

PAGE = 'claims.md'
SCALING = 'scaling'
_LAWS = ('loss_parameters', 'multipliers')
PARTS = ('verdicts', 'a', 'b', 'c', 'd', 'e', 'laws')  # of the page, each a block of its own
_PAGE = 'claims_{}.md'  # of a group, beside the page of all
_SHAPES = {Kind.REMOVED: 'same shape', Kind.MATCHED: 'equal count'}


def write_page(directory: str | Path) -> Path:
    """Writes plots/ and claims.md beside a claims.json; returns the path of the page.

    ReportError if claims.json or the scaling study cannot be read; RunDirectoryError if claims.json
    was edited.
    """
    directory = Path(directory)
    drawn = drawings(read_claims(directory), _scaling(directory), read_answers(directory))
    write_plots(directory / 'plots', drawn, kinds=('png',))
    return write_atomic(directory / PAGE, f'# Claims\n\n{claims_markdown(directory, ".")}')


def drawings(
    claims: Sequence[ClaimResult],
    scaling: tuple[Study, Findings] | None = None,
    answers: Sequence[Answer] = (),
) -> list[Drawing]:
    """The figures of the answers and of all claims, those of each, and of the scaling laws."""
    drawn = [figure for figure in (answers_figure(answers), overview(claims)) if figure]
    drawn += [drawing for claim in claims for drawing in claim_figures(claim)]
    if scaling is None:
        return drawn
    study, found = scaling
    return drawn + [
        Drawing(law.figure, f'{SCALING}_{law.stem}', described(study, found, law))
        for law in figures(study, found)
        if law.stem in _LAWS
    ]


def claims_markdown(directory: str | Path, base: str, parts: str | None = None) -> str:
    """The claims of a directory; links to its files begin with `base`. Raises as `write_page`.

    `parts` is one of PARTS, which is then a page of its own beside those of the others; None is all
    on one page.
    """
    claims, scaling = read_claims(directory), _scaling(Path(directory))
    about = macros()
    page = '' if parts is None else _PAGE
    missing = [sentence for claim in claims for sentence in claim.missing]
    templates = environment(html=False).overlay(loader=jinja2.PackageLoader('qkattn.claims'))
    scales = list(dict.fromkeys(claim.scale for claim in claims))
    return templates.get_template('claims.md.j2').render(
        base=base,
        parts=PARTS if parts is None else (parts,),
        heading='##' if parts is None or parts == 'laws' else '#',
        table=markdown_table,
        md=_md,
        claims=claims,
        grouped=_grouped(claims),
        groups=about.groups,
        marks=about.marks,
        summary=tidy(about.summary(claims, scales)),
        legend=tidy(about.legend()),
        missing=list(dict.fromkeys(missing)),
        verdicts=_md(_verdicts(claims, about, page)),
        figures=list(map(_described, drawings(claims, scaling))),
        decisive={claim.name: _decisive(claim) for claim in claims},
        more={claim.name: tidy(about.more(claim)) for claim in claims},
        facts={claim.name: _facts(claim) for claim in claims},
        sheets={claim.name: claim_sheets(claim) for claim in claims},
        laws=[sheet for sheet in sheets(*scaling) if sheet.name == 'laws'] if scaling else [],
    )


def _verdicts(claims: Sequence[ClaimResult], about: Any, page: str) -> str:
    """A row for each claim: what it says in short, the verdict, its number; links to `page`."""
    titles: list[Heading] = [('', True), ('claim', True), ('verdict', True)]
    titles.append(('number [95 % interval]', True))
    rows = []
    for claim in claims:
        link = f'{page.format(claim.name[0].lower())}#{claim.name.lower()}'
        number, what = _decisive(claim).values()
        verdict = f'{about.marks[ClaimVerdict(claim.verdict)]} {tidy(about.in_short(claim))}'
        row = claim.decisive_row
        cells = [claim.title, verdict, f'{number}, {row.what}' if row else number]
        rows.append([Markup(f'[{claim.name}]({link})'), *cells])
    return markdown_table(titles, rows)


def answers_markdown(directory: str | Path, base: str) -> str:
    """The table of what each matrix is worth, what it is from, and its figure."""
    made, about = read_answers(directory), macros()
    columns = [(model, kind) for model in MODELS for kind in (Kind.REMOVED, Kind.MATCHED)]
    titles: list[Heading] = [('', True), ('size of attention', False)]
    for model, kind in columns:
        titles.append((f'{model}, {_SHAPES[kind]}', False))
        titles += [('verdict', True)] * ((model, kind) == ('decoder', Kind.MATCHED))
    rows: list[list[str]] = []
    sources: dict[str, dict[tuple, Mapping[str, str]]] = {}
    others: list[str | None] = []
    for answer in made:
        share = (
            NONE if answer.attention is None else f'{answer.attention:+.0%}'.replace('+0%', '0%')
        )
        cells = [answer.what, share.replace('%', ' %')]
        for model, kind in columns:
            row = answer.row(model, kind)
            cells.append(_cell(row))
            if (model, kind) == ('decoder', Kind.MATCHED):
                cells.append(row.word or NONE if row else NONE)
            if row and row.word == Decision.NO_VERDICT.value:
                others.append(row.study)
            elif row:
                where = row.study, row.context['size'], row.context['corpus']
                sources.setdefault(model, {})[where] = row.context
        rows.append(cells)
    legend = tidy(about.answers_legend(sources, dict.fromkeys(others)))
    has_figure = answers_figure(made) is not None
    figure = f'\n![Differences at equal parameter count]({base}/plots/answers.png)\n'
    return f'{markdown_table(titles, rows)}\n\n{legend}\n{figure * has_figure}' if made else ''


def _cell(row: Row | None) -> str | Markup:
    """A difference and the longer side of its interval; a dagger where there is no verdict."""
    if row is None:
        return NONE
    dagger = '†' * (row.word == Decision.NO_VERDICT.value)
    sides = [] if row.low is None else [row.value - row.low, row.high - row.value]
    return Markup('<br>').join([f'{row.value:+.3f}{dagger}', *[f'±{max(sides):.3f}'] * bool(sides)])


def _block(made: Callable[..., str], file: str, *arguments: str) -> Block:
    """A block of results, which is empty where the directory lacks the file."""

    def text(directory: Path, base: str) -> str:
        return made(directory, base, *arguments) if (directory / file).is_file() else ''

    return Block(text, SCALING)


BLOCKS: Mapping[str, Block] = {  # blocks of `report.verify.check_page`
    'answers': _block(answers_markdown, ANSWERS),
    'claims': _block(claims_markdown, CLAIMS),
    **{f'claims_{part}': _block(claims_markdown, CLAIMS, part) for part in PARTS},
}


def _scaling(directory: Path) -> tuple[Study, Findings] | None:
    path = directory / SCALING
    return load_findings(path) if (path / 'study.json').is_file() else None


def _md(text: str) -> str:
    """Text that Markdown shows as it is."""
    return text.replace('<', '&lt;').replace('*', r'\*')


def _grouped(claims: Sequence[ClaimResult]) -> dict[str, list[ClaimResult]]:
    groups = itertools.groupby(claims, key=lambda claim: claim.name[0].lower())
    return {letter: list(group) for letter, group in groups}


def _decisive(claim: ClaimResult) -> dict[str, str]:
    """The number with its unit, and what and where it was measured."""
    row = claim.decisive_row
    if row is None:
        return {'number': NONE, 'what': ''}
    return {'number': f'{amount(row)} {row.unit}'.strip(), 'what': described_row(row)}


def _facts(claim: ClaimResult) -> list[tuple[str, str]]:
    """Name and value of who says it, how it is decided, and what ran where."""
    facts = {
        'source': claim.source,
        'reported': claim.reported,
        'decided by': claim.rule,
        'command': claim.command,
        'commit': claim.commit,
        'hardware': claim.hardware,
        'time': None if claim.seconds is None else duration(claim.seconds),
        'studies': ', '.join(claim.studies),
        'baselines': '; '.join(claim.models),
    }
    return [(name, value) for name, value in facts.items() if value]


def duration(seconds: float) -> str:
    """'1 h 24 min', '12 min', '3 s', '< 1 s'."""
    if seconds < 60:
        return f'{seconds:.0f} s' if seconds >= 1 else '< 1 s'
    hours, minutes = divmod(round(seconds / 60), 60)
    return f'{hours:,} h {minutes} min' if hours else f'{minutes} min'


def _described(drawing: Drawing) -> dict[str, Any]:
    """A figure as a page shows it, with the name of its claim."""
    values = dict(drawing.values)
    claim = values.pop('claim', None)
    if 'title' not in values:
        macro = getattr(macros(), values.pop('kind'))
        values['title'], values['caption'] = map(tidy, macro(values.pop('about', {})).split(END))
    return values | {'stem': drawing.stem, 'claim': claim.name if claim else None}
