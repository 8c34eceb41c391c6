"""docs/notebook.ipynb runs, and its stored text is what runs.

`python -m tests.test_notebook` runs it and stores the outputs.
"""

import ast
import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

NOTEBOOK = Path(__file__).parents[1] / 'docs/notebook.ipynb'


def executed(text: str) -> dict[str, Any]:
    """The notebook with the outputs of its cells, run from first to last in one namespace."""
    notebook, namespace = json.loads(text), {}
    cells = [cell for cell in notebook['cells'] if cell['cell_type'] == 'code']
    for number, cell in enumerate(cells, start=1):
        outputs = [*_outputs(''.join(cell['source']), namespace, number)]
        cell.update(execution_count=number, outputs=outputs)
    return notebook


def _outputs(source: str, namespace: dict[str, Any], number: int):
    tree = ast.parse(source)
    if isinstance(last := tree.body[-1], ast.Expr):
        tree.body[-1] = ast.Assign([ast.Name('_', ast.Store())], last.value)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.fix_missing_locations(tree), f'cell {number}', 'exec'), namespace)
    value = namespace.pop('_', None)
    if text := printed.getvalue().splitlines(keepends=True):
        yield {'output_type': 'stream', 'name': 'stdout', 'text': text}
    if plt.get_fignums():
        plt.savefig(png := io.BytesIO(), dpi=80, metadata={'Software': None})
        plt.close('all')
        data = {'image/png': base64.b64encode(png.getvalue()).decode()}
        yield {'output_type': 'display_data', 'data': data, 'metadata': {}}
    elif value is not None:
        data = {'text/plain': repr(value).splitlines(keepends=True)}
        result = {'output_type': 'execute_result', 'execution_count': number, 'metadata': {}}
        yield {**result, 'data': data}


@pytest.mark.slow
@pytest.mark.stored
def test_the_notebook_runs_and_its_text_is_what_is_stored():
    stored, again = json.loads(NOTEBOOK.read_text()), executed(NOTEBOOK.read_text())
    for notebook in (stored, again):
        (image,) = [o for o in notebook['cells'][-1]['outputs'] if 'image/png' in o['data']]
        assert base64.b64decode(image['data'].pop('image/png')).startswith(b'\x89PNG')
    assert again == stored


if __name__ == '__main__':
    made = json.dumps(executed(NOTEBOOK.read_text()), indent=1, ensure_ascii=False)
    NOTEBOOK.write_text(made + '\n')
