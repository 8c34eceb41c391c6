"""The claims of a directory as Markdown: claims.json, the scaling laws beside it, nothing else."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from qkattn.claims.decided import NAME, ClaimResult, ClaimVerdict, read_claims
from qkattn.claims.figures import claim_figures, overview
from qkattn.claims.shown import amount, claim_sheets, described_row, macros
from qkattn.report.figures import figures
from qkattn.report.figures.style import Drawing, write_plots
from qkattn.report.page import described
from qkattn.report.prose import END, NONE, environment, tidy
from qkattn.report.sheets import Heading, sheets
from qkattn.report.tables import markdown_table
from qkattn.report.verify import Block
from qkattn.storage.files import write_atomic
from qkattn.verdict import Findings, Study, load_findings

PAGE = 'claims.md'
SCALING = 'scaling'
_LAWS = ('loss_parameters', 'multipliers')


def write_page(directory: str | Path) -> Path:
    """Writes plots/ and claims.md beside a claims.json; returns the path of the page.

    ReportError if claims.json or the scaling study cannot be read; RunDirectoryError if claims.json
    was edited.
    """
    directory = Path(directory)
    drawn = drawings(read_claims(directory), _scaling(directory))
    write_plots(directory / 'plots', drawn, kinds=('png',))
    return write_atomic(directory / PAGE, f'# Claims\n\n{claims_markdown(directory, ".")}')


def drawings(
    claims: Sequence[ClaimResult], scaling: tuple[Study, Findings] | None = None
) -> list[Drawing]:
    """The figure of all claims, those of each, and those of the scaling laws."""
    first = overview(claims)
    drawn = [first] if first else []
    drawn += [drawing for claim in claims for drawing in claim_figures(claim)]
    if scaling is None:
        return drawn
    study, found = scaling
    return drawn + [
        Drawing(law.figure, f'{SCALING}_{law.stem}', described(study, found, law))
        for law in figures(study, found)
        if law.stem in _LAWS
    ]


def claims_markdown(directory: str | Path, base: str) -> str:
    """The claims of a directory; links to its files begin with `base`. Raises as `write_page`."""
    claims, scaling = read_claims(directory), _scaling(Path(directory))
    about, decisive = macros(), {claim.name: _decisive(claim) for claim in claims}
    titles = ('claim', 'statement', 'verdict', 'decisive number [95 % interval]', 'scale')
    rows: dict[bool, list[list[str]]] = {True: [], False: []}
    for claim in claims:
        verdict = ClaimVerdict(claim.verdict)
        name = Markup(f'[{claim.name}](#{claim.name.lower()})')
        cells = [claim.statement, f'{about.marks[verdict]} {verdict}']
        cells += [decisive[claim.name]['number'], claim.scale]
        rows[claim.is_theorem].append([name, *cells])
    missing = [sentence for claim in claims for sentence in claim.missing]
    templates = environment(html=False).overlay(loader=jinja2.PackageLoader('qkattn.claims'))
    scales = list(dict.fromkeys(claim.scale for claim in claims))
    return templates.get_template('claims.md.j2').render(
        base=base,
        table=markdown_table,
        md=_md,
        claims=claims,
        grouped=_grouped(claims),
        groups=about.groups,
        marks=about.marks,
        kinds=about.kinds,
        summary=tidy(about.summary(claims, scales)),
        legend=tidy(about.legend()),
        missing=list(dict.fromkeys(missing)),
        verdicts={
            theorems: _md(markdown_table([(title, True) for title in titles], cells))
            for theorems, cells in rows.items()
            if cells
        },
        figures=list(map(_described, drawings(claims, scaling))),
        decisive=decisive,
        more={claim.name: tidy(about.more(claim)) for claim in claims},
        facts={claim.name: _facts(claim) for claim in claims},
        sheets={claim.name: claim_sheets(claim) for claim in claims},
        laws=[sheet for sheet in sheets(*scaling) if sheet.name == 'laws'] if scaling else [],
    )


def verdicts_markdown(directory: str | Path, base: str) -> str:
    """A row for each group of claims, theorems first, the marks of verdicts, and their figure."""
    claims, about = read_claims(directory), macros()
    undecided = ClaimVerdict.UNDECIDED
    kinds: dict[str, Callable[[ClaimResult], bool]] = {
        'theorems': lambda claim: claim.is_theorem,
        'experiments, decided': lambda claim: not claim.is_theorem and claim.verdict != undecided,
        'experiments, undecided': lambda c: not c.is_theorem and c.verdict == undecided,
    }
    titles: list[Heading] = [('question', True), *((kind, True) for kind in kinds)]
    rows = []
    for letter, group in _grouped(claims).items():
        by_kind = [
            [_entry(claim, about.marks) for claim in group if belongs(claim)]
            for belongs in kinds.values()
        ]
        cells = [Markup('<br>').join(entries) or NONE for entries in by_kind]
        rows.append([f'{letter}. {about.groups[letter]}', *cells])
    used = [word for word in ClaimVerdict if any(claim.verdict == word for claim in claims)]
    legend = ', '.join(f'{about.marks[word]} {word}' for word in used)
    figure = f'\n![Decisive differences of the claims]({base}/plots/verdicts.png)\n'
    has_figure = overview(claims) is not None
    return f'{markdown_table(titles, rows)}\n\n{legend}\n{figure * has_figure}'


def _block(made: Callable[[Path, str], str]) -> Block:
    """A block of results, which is empty where the directory has no claims.json."""

    def text(directory: Path, base: str) -> str:
        return made(directory, base) if (directory / NAME).is_file() else ''

    return Block(text, SCALING)


BLOCKS: Mapping[str, Block] = {  # blocks of `report.verify.check_page`
    'claims': _block(claims_markdown),
    'verdicts': _block(verdicts_markdown),
}


def _scaling(directory: Path) -> tuple[Study, Findings] | None:
    path = directory / SCALING
    return load_findings(path) if (path / 'study.json').is_file() else None


def _md(text: str) -> str:
    """Text that Markdown shows as it is."""
    return text.replace('<', '&lt;').replace('*', r'\*')


def _entry(claim: ClaimResult, marks: Mapping[str, str]) -> Markup:
    mark = marks[ClaimVerdict(claim.verdict)]
    return Markup(f'{mark} [{claim.name}](docs/claims.md#{claim.name.lower()}) {_md(claim.title)}')


def _grouped(claims: Sequence[ClaimResult]) -> dict[str, list[ClaimResult]]:
    groups = itertools.groupby(claims, key=lambda claim: claim.name[0])
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
