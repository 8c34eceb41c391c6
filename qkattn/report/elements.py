"""Pieces of HTML: figures, tables and lists; all text is escaped here."""

from collections.abc import Sequence
from html import escape

from qkattn.report.figures.style import Rendered

# Letters of a name from which on it is broken into lines.
LONG = 36


def figure_html(figure: Rendered, heading: bool = True) -> str:
    """A figure with its inline SVG in a container that scrolls by itself when narrow."""
    title = f'<h3>{escape(figure.title)}</h3>' if heading else ''
    return (
        f'<figure>{title}<div class="scroll" tabindex="0" role="img" '
        f'aria-label="{escape(figure.title)}">{figure.svg}</div>'
        f'<figcaption>{escape(figure.caption)}</figcaption></figure>'
    )


def figures_html(figures: Sequence[Rendered], kind: str = 'pair', heading: bool = True) -> str:
    """Figures side by side where there is room ('pair') or one below the other ('stack')."""
    return f'<div class="{kind}">{"".join(figure_html(f, heading) for f in figures)}</div>'


def table(head: str, body: Sequence[str], kind: str = '') -> str:
    """A table that scrolls by itself, from the runs of its head and its whole rows (HTML)."""
    heading = f'<thead><tr>{head}</tr></thead>' if head else ''
    kind = f' class="{kind}"' if kind else ''
    rows = ''.join(body)
    whole = f'<table{kind}>{heading}<tbody>{rows}</tbody></table>'
    return f'<div class="scroll" tabindex="0">{whole}</div>'


def heading(name: str, left: bool = False, small: str = '') -> str:
    """One run of a table's head, `small` set lighter below the name."""
    lighter = f' <span>{escape(small)}</span>' if small else ''
    return f'<th scope="col"{left_class(left)}>{escape(name)}{lighter}</th>'


def row(name: str, runs: Sequence[str], left: Sequence[int] = (), kind: str = '') -> str:
    """One row from texts; runs at the places in `left` are aligned to the left."""
    kind = f' class="{kind}"' if kind else ''
    rest = ''.join(f'<td{left_class(i in left)}>{escape(text)}</td>' for i, text in enumerate(runs))
    return f'<tr{kind}>{name_html(name)}{rest}</tr>'


def name_html(name: str) -> str:
    """The first run of a row; a long name is broken into lines of its own width."""
    text = escape(name)
    whole = text if len(name) <= LONG else f'<span class="long">{text}</span>'
    return f'<th scope="row">{whole}</th>'


def left_class(left: bool) -> str:
    return ' class="left"' if left else ''


def items(sentences: Sequence[str], kind: str) -> str:
    """A list of sentences; nothing where there are none."""
    found = ''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)
    return f'<ul class="{kind}">{found}</ul>' if found else ''
