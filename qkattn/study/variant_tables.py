"""The stored catalogue of Scores and Values as text and tables, without JAX."""

import json
from pathlib import Path
from typing import Any

STORED = Path(__file__).with_name('variant_catalogue.json')
Catalogue = dict[str, dict[str, dict[str, Any]]]


def stored() -> Catalogue:
    """The output of `qkattn.study.variant_catalogue.measured`, as stored in the package."""
    return json.loads(STORED.read_text('utf-8'))


def text(catalogue: Catalogue) -> str:
    """The whole catalogue for a terminal, a paragraph per Score or Value."""
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
    titles = [kind, 'A[n]' if is_score else 'B[n]', 'parameters', 'cache, floats per token']
    if is_score:
        titles.append('RoPE')
    rows = [titles]
    for name, entry in catalogue[kind].items():
        row = [f'`{name}`', entry['equation'], entry['parameters'], entry['cache']]
        if is_score:
            row.append('yes' if entry['rope'] else 'no')
        rows.append(row)
    lines = [f'| {" | ".join(cells)} |' for cells in rows]
    lines.insert(1, '|---' * len(titles) + '|')  # Markdown needs a rule below the titles
    return '\n'.join(lines).replace('*', '·')


def markdown(catalogue: Catalogue) -> str:
    """The tables of all Scores and all Values."""
    return f'{table(catalogue, "Score")}\n\n{table(catalogue, "Value")}\n'
