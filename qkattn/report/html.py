"""One self-contained HTML page: no scripts, no network; light, dark, narrow and printed."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from html import escape

from qkattn.report import sections
from qkattn.report.elements import figure_html, figures_html, items
from qkattn.report.facts import key_facts, provenance_html
from qkattn.report.figures.style import Rendered
from qkattn.report.notes import notes
from qkattn.report.page import STYLESHEET
from qkattn.report.sentences import NO_SCALING_LAW, found_in, held_equal, remark_text
from qkattn.stats.inference import Decision
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study

# The figure of the first screen is the first of these that was drawn.
FIRST = ('verdicts', 'differences', 'losses')
# Remarks that block a verdict shown on the first screen; the others are in their section.
MAX_BLOCKING = 4

# The words of verdicts where they are said, not where they are explained.
_SAID = re.compile(rf'\b(is|are) ({"|".join(d.value for d in Decision)})(?= than| to|[:;.])')
_NONE = re.compile(r'\b[Nn]o verdict\b(?! trials)')


@dataclasses.dataclass(frozen=True)
class Section:
    """One part of the page: its anchor, heading (text) and body (HTML)."""

    anchor: str
    heading: str
    body: str


def report_page(study: Study, found: Findings, figures: Sequence[Rendered]) -> str:
    """The whole report as an HTML document."""
    by_stem = {figure.stem: figure for figure in figures}
    first = next((by_stem[stem] for stem in FIRST if stem in by_stem), None)
    parts = [
        Section('results', 'Results', _results(found, figures, first)),
        Section(
            'table',
            'Table',
            sections.table_html(found) + items(_notes(study, found), 'notes'),
        ),
        _drawn(figures, 'tuning', 'Tuning', 'bowl', 'stack'),
        _drawn(figures, 'curves', 'Learning curves', 'curves', 'pair'),
        Section('scaling', 'Loss against parameters', _scaling(found, figures)),
        _drawn(figures, 'retrieval', 'Retrieval', 'retrieval', 'stack', heading=False),
        Section('groups', 'Parameters by group', sections.parameters_html(found.arms)),
        Section('costs', 'Costs', sections.costs_html(found.arms)),
        Section('hygiene', 'Hygiene', sections.hygiene_html(found)),
        Section('missing', 'Missing runs', sections.missing_html(study)),
        Section('provenance', 'Provenance', provenance_html(study)),
    ]
    lead = _lead(study, found, first)
    return page(study.name, lead, [part for part in parts if part.body])


def page(title: str, lead: str, parts: Iterable[Section]) -> str:
    """A document from a title (text), the HTML above the first section, and the sections."""
    parts = list(parts)
    links = ''.join(f'<a href="#{s.anchor}">{escape(s.heading)}</a>' for s in parts)
    bodies = ''.join(
        f'<section id="{s.anchor}"><h2>{escape(s.heading)}</h2>{s.body}</section>\n' for s in parts
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<title>{escape(title)}</title>\n<style>{STYLESHEET}</style>\n</head>\n<body>\n'
        f'<header><h1>{escape(title)}</h1>{lead}</header>\n<nav>{links}</nav>\n'
        f'<main>\n{bodies}</main>\n</body>\n</html>\n'
    )


def _lead(study: Study, found: Findings, first: Rendered | None) -> str:
    """The first screen: question, verdict, what stands in its way, the main figure, key facts."""
    question = f'<p class="question">{escape(study.question)}</p>' if study.question else ''
    sentences = found_in(study, found)
    said = ''.join(f'<p>{_stressed(sentence)}</p>' for sentence in sentences)
    facts = ''.join(
        f'<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>'
        for name, value in key_facts(study, found)
    )
    several = len(sentences) > 2
    wide = len(study.sizes) > 1 or first is None
    drawn = figure_html(first, heading=False) if first else '<p>No trial has finished.</p>'
    return (
        f'{question}<div class="verdict{" many" if several else ""}">{said}</div>{_blocking(found)}'
        f'{items(study.problems, "problems")}'
        f'<div class="screen{" wide" if wide else ""}"><div>{drawn}'
        f'<p class="equal">{escape(held_equal(study, found))}</p></div>'
        f'<dl class="facts">{facts}</dl></div>'
    )


def _stressed(sentence: str) -> str:
    """A sentence as HTML, the words of its verdicts set bold."""
    return _NONE.sub(
        r'<strong>\g<0></strong>', _SAID.sub(r'\g<1> <strong>\g<2></strong>', escape(sentence))
    )


def _blocking(found: Findings) -> str:
    texts = [remark_text(remark) for remark in found.remarks if remark.blocks]
    if not texts:
        return ''
    more = len(texts) - MAX_BLOCKING
    rest = f'<li><a href="#hygiene">and {more} more</a></li>' if more > 0 else ''
    shown = ''.join(f'<li>{escape(text)}</li>' for text in texts[:MAX_BLOCKING])
    head = '<strong>In the way of a verdict</strong>'
    return f'<div class="problems">{head}<ul>{shown}{rest}</ul></div>'


def _notes(study: Study, found: Findings) -> list[str]:
    """The notes of the table, without the remarks: they have a section."""
    remarks = {remark_text(remark) for remark in found.remarks}
    return [note for note in notes(study, found) if note not in remarks]


def _results(found: Findings, figures: Sequence[Rendered], first: Rendered | None) -> str:
    others = [f for f in figures if f.stem in ('scores', *FIRST) and f is not first]
    drawn = figures_html(others) if others else ''
    return drawn + sections.verdicts_html(found)


def _drawn(
    figures: Sequence[Rendered],
    anchor: str,
    name: str,
    stem: str,
    kind: str,
    heading: bool = True,
) -> Section:
    """The section of the figures whose names begin with `stem`."""
    own = [figure for figure in figures if figure.stem.startswith(stem)]
    return Section(anchor, name, figures_html(own, kind, heading) if own else '')


def _scaling(found: Findings, figures: Sequence[Rendered]) -> str:
    own = [figure for figure in figures if figure.stem in ('loss_parameters', 'multipliers')]
    drawn = figures_html(own, heading=len(own) > 1) if own else ''
    if found.lacks_scaling:
        drawn += items([NO_SCALING_LAW], 'notes')
    return drawn + (sections.scaling_html(found) if found.scaling else '')
