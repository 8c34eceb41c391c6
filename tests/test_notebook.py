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

NOTEBOOK = Path(__file__).parents[1] / 'docs/notebook.ipynb'


def run(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The outputs of every code cell, run from first to last in one namespace."""
    namespace: dict[str, Any] = {}
    cells = [cell for cell in notebook['cells'] if cell['cell_type'] == 'code']
    return [_outputs(''.join(cell['source']), namespace, n) for n, cell in enumerate(cells, 1)]


def _outputs(source: str, namespace: dict[str, Any], number: int) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    if isinstance(last := tree.body[-1], ast.Expr):
        tree.body[-1] = ast.Assign([ast.Name('_', ast.Store())], last.value)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.fix_missing_locations(tree), f'cell {number}', 'exec'), namespace)
    value = namespace.pop('_', None)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({'output_type': 'stream', 'name': 'stdout', 'text': _lines(text)})
    if plt.get_fignums():
        plt.savefig(png := io.BytesIO(), dpi=80, metadata={'Software': None})
        plt.close('all')
        image = {'image/png': base64.b64encode(png.getvalue()).decode()}
        outputs.append({'output_type': 'display_data', 'data': image, 'metadata': {}})
    elif value is not None:
        result = {'output_type': 'execute_result', 'execution_count': number, 'metadata': {}}
        outputs.append({**result, 'data': {'text/plain': _lines(repr(value))}})
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def without_images(outputs: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    return [[o for o in cell if o['output_type'] != 'display_data'] for cell in outputs]


def test_the_notebook_runs_and_its_text_is_what_is_stored():
    notebook = json.loads(NOTEBOOK.read_text())
    stored = [cell['outputs'] for cell in notebook['cells'] if cell['cell_type'] == 'code']
    assert without_images(run(notebook)) == without_images(stored)
    assert any('image/png' in output.get('data', {}) for output in stored[-1])


def main() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in notebook['cells'] if cell['cell_type'] == 'code']
    for number, (cell, outputs) in enumerate(zip(cells, run(notebook), strict=True), 1):
        cell.update(execution_count=number, outputs=outputs)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + '\n')


if __name__ == '__main__':
    main()
