"""One self-contained HTML page: no scripts, no network; light, dark, narrow and printed."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from qkattn.report.load import Study
from qkattn.report.notes import notes
from qkattn.report.page import STYLESHEET
from qkattn.report.records import corpora
from qkattn.report.style import Rendered
from qkattn.report.summary import Row
from qkattn.report.tables import columns_of, si

# A value that differs in every cell, such as a starting time, is not listed for every one.
MAX_VALUES = 3


@dataclasses.dataclass(frozen=True)
class Section:
    """One part of the page: its anchor, heading (text) and body (HTML)."""

    anchor: str
    heading: str
    body: str


def report_page(study: Study, rows: Sequence[Row], figures: Sequence[Rendered]) -> str:
    """The whole report as an HTML document."""
    main = [figure for figure in figures if figure.stem in ('scores', 'losses', 'differences')]
    others = [figure for figure in figures if figure not in main]
    several = len(study.sizes) > 1
    sections = [
        Section(
            'results',
            'Results',
            f'<div class="{"stack" if several else "pair"}">{"".join(map(figure_html, main))}</div>'
            if main
            else '<p>No trial has finished.</p>',
        ),
        Section('table', 'Table', table_html(rows) + _list(notes(study, rows), 'notes')),
    ]
    curves = [figure for figure in others if figure.stem.startswith('curves')]
    scatter = [figure for figure in others if figure not in curves]
    if curves:
        body = ''.join(figure_html(figure, heading=several) for figure in curves)
        sections.append(Section('curves', 'Learning curves', f'<div class="pair">{body}</div>'))
    if scatter:
        body = ''.join(figure_html(figure, heading=False) for figure in scatter)
        sections.append(Section('weights', 'Loss against weights', body))
    sections.append(Section('groups', 'Weights by group', weights_html(rows)))
    sections.append(Section('provenance', 'Provenance', provenance_html(study)))
    sections.append(Section('missing', 'Missing cells', missing_html(study)))
    return page(study.name, _lead(study, rows), sections)


def page(title: str, lead: str, sections: Iterable[Section]) -> str:
    """A document from a title (text), the HTML above the first section, and the sections."""
    sections = list(sections)
    links = ''.join(f'<a href="#{s.anchor}">{escape(s.heading)}</a>' for s in sections)
    bodies = ''.join(
        f'<section id="{s.anchor}"><h2>{escape(s.heading)}</h2>{s.body}</section>\n'
        for s in sections
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<title>{escape(title)}</title>\n<style>{STYLESHEET}</style>\n</head>\n<body>\n'
        f'<header><h1>{escape(title)}</h1>{lead}</header>\n<nav>{links}</nav>\n'
        f'<main>\n{bodies}</main>\n</body>\n</html>\n'
    )


def _lead(study: Study, rows: Sequence[Row]) -> str:
    question = f'<p class="question">{escape(study.question)}</p>' if study.question else ''
    facts = ''.join(
        f'<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>'
        for name, value in key_facts(study, rows)
    )
    warning = _list(study.problems, 'problems')
    return f'{question}<dl class="facts">{facts}</dl>{warning}'


def key_facts(study: Study, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What a reader wants to know first, as (name, value) text."""
    trials = study.trials

    def each(values: Iterable[object]) -> str:
        return ', '.join(dict.fromkeys(str(value) for value in values))

    def span(values: Iterable[float]) -> str:
        values = sorted(values)
        ends = dict.fromkeys((si(values[0]), si(values[-1])))
        return '–'.join(ends)

    done = len(study.cells) - len(study.missing)
    weights = span(row.example.weights['total'] for row in rows)
    matching = 'not matched' if study.matched is None else f'{study.matched} matched'
    finished = [trial for trial in trials if trial.finished] or trials
    facts = [
        ('baseline', study.baseline or 'none'),
        ('grid', f'{done} of {len(study.cells)} cells, {len(trials)} trials'),
        ('data', each(data_name(t.data) for t in trials)),
        ('weights', f'{weights}, {matching.replace("_", "-")}'),
        (
            'training',
            f'{span(t.num_steps for t in finished)} steps, '
            f'{span(t.num_tokens for t in finished)} tokens a trial',
        ),
        ('learning rates', each(f'{rate:g}' for rate in sorted({t.learning_rate for t in trials}))),
        ('seeds', each(sorted({t.seed for t in trials}))),
        ('device', each(_device(t.provenance) for t in trials)),
    ]
    diverged = sum(not trial.finished for trial in trials)
    return facts + ([('diverged', f'{diverged} of {len(trials)} trials')] if diverged else [])


def data_name(data: Mapping[str, object]) -> str:
    """'stdlib 3.11', 'copy 1 (length=16)' or, for parallel text, 'a/de -> a/en 1.0'."""
    sides = corpora(data)
    versions = dict.fromkeys(str(side['version']) for side in sides)
    name = f'{" → ".join(side["name"] for side in sides)} {" → ".join(versions)}'
    match data:
        case {'options': {**options}} if options:
            return f'{name} ({", ".join(f"{k}={_plain(v)}" for k, v in options.items())})'
    return name


def _device(provenance: Mapping[str, object]) -> str:
    match provenance:
        case {'devices': {'kind': kind, 'count': count}}:
            return f'{count} x {kind}'
        case {'device': device}:
            return _plain(device)
    return 'not recorded'


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _flat(record: Mapping[str, object], prefix: str = '') -> Iterator[tuple[str, str]]:
    """(name, text) of every value, 'outer: inner' for nested mappings."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f'{prefix}{name}: ')
        else:
            yield f'{prefix}{name}', _plain(value)


def figure_html(figure: Rendered, heading: bool = True) -> str:
    """A figure with its inline SVG in a container that scrolls by itself when narrow."""
    title = f'<h3>{escape(figure.title)}</h3>' if heading else ''
    return (
        f'<figure>{title}<div class="scroll" tabindex="0" role="img" '
        f'aria-label="{escape(figure.title)}">{figure.svg}</div>'
        f'<figcaption>{escape(figure.caption)}</figcaption></figure>'
    )


def table_html(rows: Sequence[Row]) -> str:
    """The summary table; the first column stays in sight when it scrolls."""
    columns = columns_of(rows)
    head = ''.join(
        f'<th scope="col"{_left(column.left)}>{escape(column.heading[0])} '
        f'<span>{escape(column.heading[1])}</span></th>'
        for column in columns
    )
    body = []
    for row in rows:
        cells = [f'<th scope="row">{escape(columns[0].text(row))}</th>']
        cells += [f'<td{_left(c.left)}>{escape(c.text(row))}</td>' for c in columns[1:]]
        body.append(f'<tr{" class=baseline" if row.is_baseline else ""}>{"".join(cells)}</tr>')
    return _table(head, body)


def _table(head: str, body: Sequence[str]) -> str:
    return _scrolling(
        f'<table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    )


def _left(left: bool) -> str:
    return ' class="left"' if left else ''


def _scrolling(table: str) -> str:
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _list(sentences: Sequence[str], kind: str) -> str:
    items = ''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)
    return f'<ul class="{kind}">{items}</ul>' if items else ''


def weights_html(rows: Sequence[Row]) -> str:
    """Weights of each row by group: counts and a bar, to one scale at each size."""
    groups = list(dict.fromkeys(g for row in rows for g in row.example.weights if g != 'total'))
    largest = {
        size: max(r.example.weights['total'] for r in rows if r.size == size)
        for size in dict.fromkeys(row.size for row in rows)
    }
    legend = ''.join(
        f'<span><i class="group-{i % 6}"></i>{escape(group)}</span>'
        for i, group in enumerate(groups)
    )
    head = ''.join(f'<th scope="col">{escape(group)}</th>' for group in (*groups, 'total'))
    body = []
    for row in rows:
        weights = row.example.weights
        bars = ''.join(
            f'<i class="group-{i % 6}" '
            f'style="width:{100 * weights[group] / largest[row.size]:.2f}%"></i>'
            for i, group in enumerate(groups)
            if group in weights
        )
        counts = ''.join(
            f'<td>{weights[group]:,}</td>' if group in weights else '<td>-</td>'
            for group in (*groups, 'total')
        )
        body.append(
            f'<tr><th scope="row">{escape(row.variant)}</th>'
            f'<td class="left">{escape(row.size)}</td>{counts}'
            f'<td><div class="bar">{bars}</div></td></tr>'
        )
    names = [f'<th scope="col" class="left">{name}</th>' for name in ('variant', 'size', 'share')]
    return f'<p class="legend">{legend}</p>' + _table(f'{names[0]}{names[1]}{head}{names[2]}', body)


def provenance_html(study: Study) -> str:
    """What ran where: each recorded value, with the number of cells when they differ."""
    facts: dict[str, dict[str, set[str]]] = {}
    for trial in study.trials:
        recorded = {
            'data': trial.data,
            'eval tokens': trial.eval_tokens,
            'trials run as': trial.lifting,
            **trial.provenance,
        }
        for name, text in _flat(recorded):
            facts.setdefault(name, {}).setdefault(text, set()).add(trial.cell)
    done = {trial.cell for trial in study.trials}
    lines = [('command', escape(study.command))] if study.command else []
    for name, values in facts.items():
        if name == 'command' and study.command:
            continue
        texts = [
            escape(text)
            + (f' <small>({len(cells)} of {len(done)} cells)</small>' if len(values) > 1 else '')
            for text, cells in list(values.items())[:MAX_VALUES]
        ]
        texts += [f'and {len(values) - MAX_VALUES} more'] if len(values) > MAX_VALUES else []
        lines.append((name, '<br>'.join(texts)))
    body = ''.join(
        f'<tr><th scope="row">{escape(name)}</th><td class="left wrap">{text}</td></tr>'
        for name, text in lines
    )
    return _scrolling(f'<table class="plain"><tbody>{body}</tbody></table>')


def missing_html(study: Study) -> str:
    """The cells of the declared grid without results, and how far each has come."""
    if not study.missing:
        return f'<p>None: all {len(study.cells)} cells have results.</p>'
    body = [
        f'<tr><th scope="row">{escape(cell.name)}</th>'
        + ''.join(
            f'<td class="left">{escape(text)}</td>'
            for text in (cell.variant, cell.size, cell.progress)
        )
        + '</tr>'
        for cell in study.missing
    ]
    head = ''.join(
        f'<th scope="col" class="left">{name}</th>' for name in ('cell', 'variant', 'size', 'state')
    )
    return _table(head, body)
