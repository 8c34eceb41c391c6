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
            lines = (f'  {key:<11} {value}' for key, value in entry.items())
            paragraphs.append('\n'.join([f'{kind} {name}', *lines]))
    return '\n\n'.join(paragraphs)


def table(catalogue: Catalogue, kind: str) -> str:
    """A Markdown table of the Scores or the Values."""
    rows = [[kind, 'A[n]' if kind == 'Score' else 'B[n]', 'parameters', 'cache, floats per token']]
    rows[0] += ['RoPE'] * (kind == 'Score')
    for name, entry in catalogue[kind].items():
        rows.append([f'`{name}`', *(entry[key] for key in ('equation', 'parameters', 'cache'))])
        rows[-1] += ['yes' if entry['rope'] else 'no'] * (kind == 'Score')
    lines = [f'| {" | ".join(cells)} |' for cells in rows]
    lines.insert(1, '|---' * len(rows[0]) + '|')
    return '\n'.join(lines).replace('*', '·')


def markdown(catalogue: Catalogue) -> str:
    """The tables of all Scores and all Values."""
    return f'{table(catalogue, "Score")}\n\n{table(catalogue, "Value")}\n'
