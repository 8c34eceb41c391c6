"""The stored catalogue of Scores and Values as text and tables, without JAX."""

import json
from pathlib import Path
from typing import Any

STORED = Path(__file__).with_name('variant_catalogue.json')
Catalogue = dict[str, dict[str, dict[str, Any]]]


def stored() -> Catalogue:
    """Returns the catalogue that the package contains."""
    return json.loads(STORED.read_text('utf-8'))


def text(catalogue: Catalogue) -> str:
    """Returns the catalogue as plain text, with a paragraph for each Score and Value."""
    paragraphs = ['cache: floats per token; of a Value, those beyond what its Score caches']
    for kind, entries in catalogue.items():
        for name, entry in entries.items():
            lines = [f'{kind} {name}']
            for field, value in entry.items():
                lines.append(f'  {field:<11} {value}')
            paragraphs.append('\n'.join(lines))
    return '\n\n'.join(paragraphs)


def table(catalogue: Catalogue, kind: str) -> str:
    """Returns a Markdown table of all Scores (kind 'Score') or all Values ('Value')."""
    is_score = kind == 'Score'
    matrix = 'A[n]' if is_score else 'B[n]'
    titles = [kind, matrix, 'parameters', 'cache, floats per token']
    if is_score:
        titles.append('RoPE')
    rows = [titles]
    for name, entry in catalogue[kind].items():
        row = [f'`{name}`', entry['equation'], entry['parameters'], entry['cache']]
        if is_score:
            row.append('yes' if entry['rope'] else 'no')
        rows.append(row)
    lines = [f'| {" | ".join(cells)} |' for cells in rows]
    rule_below_titles = '|---' * len(titles) + '|'
    lines.insert(1, rule_below_titles)
    text_of_table = '\n'.join(lines)
    return text_of_table.replace('*', '·')  # '*' is markup in Markdown


def markdown(catalogue: Catalogue) -> str:
    """Returns Markdown tables of all Scores and all Values."""
    return f'{table(catalogue, "Score")}\n\n{table(catalogue, "Value")}\n'
