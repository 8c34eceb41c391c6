"""The gallery: the claims of a directory as one self-contained page and as Markdown.

Both show claims.json, and the scaling laws of the study beside it, and nothing else.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from qkattn.report.claim_results import ClaimResult, ClaimVerdict, read_claims
from qkattn.report.claim_sheets import amount, claim_sheets, described_row
from qkattn.report.figures import figures
from qkattn.report.figures.claim_figures import claim_figures, overview
from qkattn.report.figures.plots import write_plots
from qkattn.report.figures.style import Drawing
from qkattn.report.page import described, style
from qkattn.report.prose import END, NONE, environment, tidy
from qkattn.report.sheets import Heading, sheets
from qkattn.report.tables import markdown_table
from qkattn.storage.files import write_atomic
from qkattn.verdict import Findings, Study, load_findings

PAGE = 'claims.html'
SCALING = 'scaling'
_LAWS = ('loss_parameters', 'multipliers')


class Gallery(NamedTuple):
    """What a gallery shows: claims.json of a directory, and the scaling study if it is there."""

    directory: Path
    claims: Sequence[ClaimResult]
    scaling: tuple[Study, Findings] | None


def read_gallery(directory: str | Path) -> Gallery:
    """Reads what the gallery of a directory shows.

    Raises:
      ReportError: claims.json or the scaling study cannot be read.
      RunDirectoryError: claims.json was edited.
    """
    directory = Path(directory)
    claims, scaling = read_claims(directory), None
    if (directory / SCALING / 'study.json').is_file():
        scaling = load_findings(directory / SCALING)
    return Gallery(directory, claims, scaling)


def write_gallery(directory: str | Path) -> Path:
    """Writes plots/ and claims.html beside a claims.json; returns the path of the page."""
    gallery = read_gallery(directory)
    drawn = drawings(gallery)
    svg = write_plots(gallery.directory / 'plots', drawn, kinds=('png',))
    return write_atomic(gallery.directory / PAGE, gallery_page(gallery, drawn, svg))


def drawings(gallery: Gallery) -> list[Drawing]:
    """That of all claims, those of each, and those of the scaling laws."""
    first = overview(gallery.claims)
    of_claims = [of for claim in gallery.claims for of in claim_figures(claim)]
    return [*[first] * (first is not None), *of_claims, *_laws(gallery.scaling)]


def _laws(scaling: tuple[Study, Findings] | None) -> list[Drawing]:
    if scaling is None:
        return []
    study, found = scaling
    drawn = [of for of in figures(study, found) if of.stem in _LAWS]
    return [Drawing(of.figure, f'{SCALING}_{of.stem}', described(study, found, of)) for of in drawn]


def gallery_page(gallery: Gallery, drawn: Sequence[Drawing], svg: Mapping[str, str]) -> str:
    """The gallery as an HTML document; a figure without an SVG is left empty."""
    template = environment(html=True).get_template('gallery.html.j2')
    figures = [of | {'svg': svg.get(of['stem'], '')} for of in _described(drawn)]
    return template.render(_values(gallery, figures) | style('gallery.css'))


def claims_markdown(directory: str | Path, base: str) -> str:
    """The gallery as Markdown, whose links to files of the directory begin with `base`."""
    gallery = read_gallery(directory)
    claims, drawn = gallery.claims, drawings(gallery)
    template = environment(html=False).get_template('gallery.md.j2')
    values = _values(gallery, _described(drawn))
    titles = ('claim', 'statement', 'verdict', 'decisive number [95 % interval]', 'scale')
    rows: dict[bool, list[list[str]]] = {True: [], False: []}
    for claim in claims:
        number, verdict = values['decisive'][claim.name]['number'], ClaimVerdict(claim.verdict)
        word = f'{values["marks"][verdict]} {verdict}'
        name = Markup(f'[{claim.name}](#{claim.name.lower()})')
        rows[claim.is_theorem].append([name, claim.statement, word, number, claim.scale])
    tables = {
        theorems: _md(markdown_table([(title, True) for title in titles], of_kind))
        for theorems, of_kind in rows.items()
        if of_kind
    }
    more = {'base': base, 'table': markdown_table, 'md': _md, 'verdicts': tables}
    return template.render(values | more)


def _md(text: str) -> str:
    """Text that Markdown shows as it is."""
    return text.replace('<', '&lt;').replace('*', r'\*')


def verdicts_markdown(directory: str | Path, base: str) -> str:
    """A row for each group of claims, theorems first, the marks of verdicts, and their figure."""
    claims = read_claims(directory)
    macros = _macros()
    undecided = ClaimVerdict.UNDECIDED
    kinds: dict[str, Callable[[ClaimResult], bool]] = {
        'theorems': lambda claim: claim.is_theorem,
        'experiments, decided': lambda claim: not claim.is_theorem and claim.verdict != undecided,
        'experiments, undecided': lambda c: not c.is_theorem and c.verdict == undecided,
    }
    titles: list[Heading] = [('question', True), *((kind, True) for kind in kinds)]
    rows = []
    for letter, of_group in _grouped(claims).items():
        of_kinds = [[_entry(c, macros.marks) for c in of_group if of(c)] for of in kinds.values()]
        cells = [Markup('<br>').join(of_kind) or NONE for of_kind in of_kinds]
        rows.append([f'{letter}. {macros.groups[letter]}', *cells])
    used = [word for word in ClaimVerdict if any(claim.verdict == word for claim in claims)]
    legend = ', '.join(f'{macros.marks[word]} {word}' for word in used)
    figure = f'\n![Decisive differences of the claims]({base}/plots/verdicts.png)\n'
    has_figure = overview(claims) is not None
    return f'{markdown_table(titles, rows)}\n\n{legend}\n{figure * has_figure}'


def _entry(claim: ClaimResult, marks: Mapping[str, str]) -> Markup:
    mark = marks[ClaimVerdict(claim.verdict)]
    return Markup(f'{mark} [{claim.name}](docs/claims.md#{claim.name.lower()}) {_md(claim.title)}')


def _values(gallery: Gallery, figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    claims, scaling = gallery.claims, gallery.scaling
    missing = [sentence for claim in claims for sentence in claim.missing]
    macros = _macros()
    scales = list(dict.fromkeys(claim.scale for claim in claims))
    return {
        'claims': claims,
        'grouped': _grouped(claims),
        'groups': macros.groups,
        'marks': macros.marks,
        'kinds': macros.kinds,
        'scales': scales,
        'summary': tidy(macros.summary(claims, scales)),
        'legend': tidy(macros.legend()),
        'missing': list(dict.fromkeys(missing)),
        'figures': figures,
        'decisive': {claim.name: _decisive(claim) for claim in claims},
        'more': {claim.name: tidy(macros.more(claim)) for claim in claims},
        'facts': {claim.name: _facts(claim) for claim in claims},
        'sheets': {claim.name: claim_sheets(claim) for claim in claims},
        'laws': [of for of in sheets(*scaling) if of.name == 'laws'] if scaling else [],
        'reports': [
            name
            for name in dict.fromkeys(name for claim in claims for name in claim.studies)
            if (gallery.directory / name / 'report.html').is_file()
        ],
    }


def _grouped(claims: Sequence[ClaimResult]) -> dict[str, list[ClaimResult]]:
    of_letter = itertools.groupby(claims, key=lambda claim: claim.name[0])
    return {letter: list(of) for letter, of in of_letter}


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


def _described(drawn: Sequence[Drawing]) -> list[dict[str, Any]]:
    """Figures as pages show them, with the name of their claim."""
    made = []
    for of in drawn:
        values = dict(of.values)
        claim = values.pop('claim', None)
        if 'title' not in values:
            macro = getattr(_macros(), values.pop('kind'))
            title, caption = (tidy(part) for part in macro(values.pop('about', {})).split(END))
            values = {'title': title, 'caption': caption}
        made.append(values | {'stem': of.stem, 'claim': claim.name if claim else None})
    return made


def _macros() -> Any:
    return environment(html=False).get_template('claims.j2').make_module()
