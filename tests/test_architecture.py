"""The rules of the house: which package may import which, where imports stand, one assignment each.

Packages ("rooms") are layers: a file imports from its own layer and from the ones below. That
excludes circles between packages; circles between files are looked for as well.
"""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import qkattn
from tests.processes import ROOT

FOLDERS = ('qkattn', 'experiments', 'examples')
FILES = sorted(path for folder in FOLDERS for path in ROOT.glob(f'{folder}/**/*.py'))
# Lowest first. Rooms of one layer do not import each other.
LAYERS = ['errors', 'config', 'metrics, stats', 'jobs', 'storage', 'attention', 'model']
LAYERS += ['data', 'analysis, decode', 'train', 'convert', 'study']
LAYERS += ['verdict', 'report', 'claims, explorer, benchmark']
LAYERS += ['experiments, examples, __main__']
LAYER = {room: number for number, layer in enumerate(LAYERS) for room in layer.split(', ')}

# Imported where it is used: only reading .pt files needs it.
OPTIONAL = {'torch'}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


MODULES = {module_of(path): path for path in FILES}
# The packages inside experiments/ are rooms of their own, below the scripts.
PACKAGES = {path.parent.name for path in ROOT.glob('experiments/*/__init__.py')}


def room_of(module: str) -> str | None:
    """Returns the room of a module of ours; None for the top of the package and for others."""
    top, *inside = module.split('.')
    if top == 'experiments':
        return inside[0] if inside and inside[0] in PACKAGES else top
    if top == 'examples':
        return top
    if top == 'qkattn' and inside:
        return inside[0]
    return None


def modules_imported_by(node: ast.AST) -> Iterator[str]:
    """The modules of ours that one import statement names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, 'imports are absolute'
        whole = [f'{node.module}.{alias.name}' for alias in node.names]
        names = [name if name in MODULES else str(node.module) for name in whole]
    else:
        return
    yield from (name for name in names if name.split('.')[0] in FOLDERS)


def upward_imports(path: Path) -> Iterator[str]:
    """Yields imports of packages that are not below that of the module."""
    room = room_of(module_of(path))
    if room is None:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        for other in {room_of(module) for module in modules_imported_by(node)} - {room, None}:
            if LAYER[other] >= LAYER[room]:
                yield f'{path.relative_to(ROOT)}: imports {other}'


def test_imports_point_down():
    assert not {problem for path in FILES for problem in upward_imports(path)}


def imports_in_blocks(path: Path) -> Iterator[str]:
    """Yields imports that are not at the top level of the module, but for optional packages."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and {alias.name for alias in node.names} <= OPTIONAL:
            continue
        if isinstance(node, ast.Import | ast.ImportFrom) and node not in tree.body:
            yield f'{path.relative_to(ROOT)}, line {node.lineno}'


def test_imports_stand_at_the_top():
    assert not {place for path in FILES for place in imports_in_blocks(path)}


def is_parallel(node: ast.AST) -> bool:
    """Whether a statement assigns several values to several names at once, as in `a, b = c, d`.

    Swaps and sizes, `T, D = 4, 16`, are none; nor is the unpacking of one value, `T, D = x.shape`.
    """
    if not isinstance(node, ast.Assign):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    names = {ast.unparse(element) for element in target.elts}
    values = {ast.unparse(element) for element in node.value.elts}
    are_sizes = all(len(name) == 1 and name.isupper() for name in names)
    return names != values and not are_sizes


@pytest.mark.parametrize(
    ('statement', 'parallel'),
    [
        ('a, b = c, d', True),
        ('self.a, b = 1, len(c)', True),
        ('a, b = b, a', False),
        ('N, H = spec.num_heads, spec.head_size', False),
        ('B, T = tokens_BT.shape', False),
        ('a = b, c', False),
    ],
)
def test_a_parallel_assignment_is_recognized(statement, parallel):
    assert is_parallel(ast.parse(statement).body[0]) == parallel


def test_no_statement_assigns_unrelated_values_at_once():
    parallel = {
        f'{path.relative_to(ROOT)}, line {node.lineno}'
        for path in [*FILES, *ROOT.glob('tests/**/*.py')]
        for node in ast.walk(ast.parse(path.read_text()))
        if is_parallel(node)
    }
    assert not parallel


@pytest.fixture(scope='module')
def imports_by_module():
    """The modules of ours that each of our modules imports, by name."""
    trees = {module: ast.parse(path.read_text()) for module, path in MODULES.items()}
    return {
        module: {other for node in tree.body for other in modules_imported_by(node)} - {module}
        for module, tree in trees.items()
    }


def test_imports_between_modules_form_no_circle(imports_by_module):
    tuple(
        graphlib.TopologicalSorter(imports_by_module).static_order()
    )  # raises CycleError, which shows it


def test_output_of_other_programs_is_decoded_by_one_function_that_accepts_any_bytes():
    """subprocess would raise an error for a file name or a message that is not UTF-8."""
    strict = {'text', 'universal_newlines', 'encoding'}
    helpers = {ROOT / 'qkattn/jobs/output.py', ROOT / 'launch/arguments.py'}
    places = []
    for path in {*FILES, *ROOT.glob('launch/*.py')} - helpers:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            of_subprocess = ast.unparse(node.func).startswith('subprocess.')
            if of_subprocess and strict & {keyword.arg for keyword in node.keywords}:
                places.append(f'{path.relative_to(ROOT)}, line {node.lineno}')
    assert not places


def loaded_by(module: str, imports_by_module: dict[str, set[str]]) -> set[str]:
    """The modules of ours that an import of the module loads, itself among them."""
    loaded: set[str] = set()
    pending = {module}
    while pending:
        loaded |= pending
        packages = {name.rpartition('.')[0] for name in pending} & imports_by_module.keys()
        pending = set().union(packages, *(imports_by_module[name] for name in pending)) - loaded
    return loaded


def test_attention_layers_need_few_packages(imports_by_module):
    packages = set()
    for module in loaded_by('qkattn.attention', imports_by_module):
        for node in ast.parse(MODULES[module].read_text()).body:
            if isinstance(node, ast.Import):
                packages |= {alias.name.partition('.')[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                packages.add(node.module.partition('.')[0])
    assert packages - sys.stdlib_module_names == {'flax', 'jax', 'numpy', 'qkattn', 'scipy'}


ENTRIES = {path.name for path in ROOT.glob('qkattn/*') if path.name != '__pycache__'}
TOP_FILES = {'__init__.py', '__main__.py', 'errors.py', 'py.typed'}


def test_modules_are_in_subpackages():
    assert {name for name in ENTRIES if '.' in name} == TOP_FILES


def test_every_package_has_a_layer():
    assert ENTRIES - TOP_FILES | PACKAGES <= LAYER.keys()


def test_packages_that_read_results_do_not_import_jax():
    names = ('config', 'metrics', 'stats', 'verdict', 'report.verify')
    rooms = [f'qkattn.{name}' for name in names]
    program = f"""
import sys, qkattn
dir(qkattn)
assert not {{'jax', 'numpy'}} & {{*sys.modules}}
import {', '.join(rooms)}
assert 'jax' not in sys.modules"""
    assert subprocess.run([sys.executable, '-c', program], cwd=ROOT).returncode == 0


def test_every_public_name_is_exported():
    for name in qkattn.__all__:
        assert callable(getattr(qkattn, name))
        assert not (ROOT / 'qkattn' / name).exists(), 'the name of a package'
    with pytest.raises(AttributeError, match="'qkattn' has no attribute 'biuld'"):
        _ = qkattn.biuld


def test_dir_lists_the_public_names_alone():
    assert dir(qkattn) == qkattn.__all__
