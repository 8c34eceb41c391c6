"""docs/notebook.ipynb runs, and prints what is stored in it. Jupyter stores outputs."""

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

NOTEBOOK = Path(__file__).parents[1] / 'docs/notebook.ipynb'


def printed(source: str, namespace: dict[str, Any]) -> list[str]:
    """The lines that a cell prints, with the value of its last expression."""
    tree = ast.parse(source)
    if isinstance(last := tree.body[-1], ast.Expr):
        tree.body[-1] = ast.Assign([ast.Name('value', ast.Store())], last.value)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        exec(compile(ast.fix_missing_locations(tree), 'cell', 'exec'), namespace)
        if isinstance(last, ast.Expr) and (value := namespace.pop('value')) is not None:
            print(repr(value))
    return text.getvalue().splitlines()


@pytest.mark.slow
@pytest.mark.stored
def test_the_notebook_runs_and_its_text_is_what_is_stored():
    namespace: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text())['cells']:
        if cell['cell_type'] == 'code':
            texts = (o.get('text') or o['data'].get('text/plain', []) for o in cell['outputs'])
            stored = [line.rstrip('\n') for text in texts for line in text]
            assert printed(''.join(cell['source']), namespace) == stored
    assert plt.get_fignums(), 'the last cell draws'
    plt.close('all')
