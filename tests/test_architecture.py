"""The rules of the house: which package may import which, where imports stand, how long files are.

Packages ("rooms") are layers: a file imports from its own layer and from the ones below. That
excludes circles between packages; circles between files are looked for as well.
"""

import ast
import graphlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import qkattn
from qkattn.train import loop, program, sharding, trials
from tests.processes import ROOT

FILES = sorted([*ROOT.glob('qkattn/**/*.py'), *ROOT.glob('experiments/**/*.py')])
MAX_LINES = 600

# What a reader of one optimizer step has before them.
STEP_MODULES, STEP_FILES = 45, 12
STEP_LINES = 660  # on which an expression begins; of 900 with code
STEP_ROOMS = ('train', 'model')

# Lowest first. Rooms of one layer do not import each other.
LAYERS = ['errors', 'config', 'metrics, stats', 'jobs', 'storage', 'attention', 'model']
LAYERS += ['data', 'analysis, decode', 'train', 'convert', 'study']
LAYERS += ['verdict', 'report', 'claims, explore']
LAYERS += ['experiments, __main__']
LAYER = {room: number for number, layer in enumerate(LAYERS) for room in layer.split(', ')}

# Imported where it is used: only reading .pt files needs it.
OPTIONAL = {'torch'}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


MODULES = {module_of(path): path for path in FILES}


def room_of(module: str) -> str | None:
    """Returns the package of a module of ours; None for the top of the package and for others."""
    first, *rest = module.split('.')
    return first if first == 'experiments' else (rest[0] if first == 'qkattn' and rest else None)


def imported(node: ast.AST) -> Iterator[str]:
    """The modules of ours that one import statement names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, 'imports are absolute'
        whole = [f'{node.module}.{alias.name}' for alias in node.names]
        names = [name if name in MODULES else str(node.module) for name in whole]
    else:
        return
    yield from (name for name in names if name.split('.')[0] in ('qkattn', 'experiments'))


def problems_of(path: Path) -> Iterator[str]:
    name, source = path.relative_to(ROOT), path.read_text()
    room, tree = room_of(module_of(path)), ast.parse(source)
    if len(source.splitlines()) > MAX_LINES:
        yield f'{name}: over {MAX_LINES} lines'
    for node in ast.walk(tree):
        optional = isinstance(node, ast.Import) and {a.name for a in node.names} <= OPTIONAL
        is_import = isinstance(node, ast.Import | ast.ImportFrom) and not optional
        if is_import and node not in tree.body:
            yield f'{name}: import inside a block'
        for there in {room_of(other) for other in imported(node)} - {room, None}:
            if room and LAYER[there] >= LAYER[room]:
                yield f'{name}: imports {there}'


def test_imports_point_down_and_stand_at_the_top_of_short_files():
    assert not {problem for path in FILES for problem in problems_of(path)}


@pytest.fixture(scope='module')
def graph():
    """The modules that each one imports."""
    trees = {module: ast.parse(path.read_text()) for module, path in MODULES.items()}
    return {
        module: {other for node in tree.body for other in imported(node)} - {module}
        for module, tree in trees.items()
    }


def test_no_circle_of_imports(graph):
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which shows it


def loaded_by(module: str, graph: dict[str, set[str]]) -> set[str]:
    """The modules of ours that an import of the module loads, itself among them."""
    loaded: set[str] = set()
    pending = {module}
    while pending:
        loaded |= pending
        packages = {name.rpartition('.')[0] for name in pending} & graph.keys()
        pending = set().union(packages, *(graph[name] for name in pending)) - loaded
    return loaded


def test_importing_a_training_step_loads_few_modules(graph):
    assert len(loaded_by('qkattn.train.step', graph)) <= STEP_MODULES


def test_attention_layers_need_few_packages(graph):
    packages = set()
    for module in loaded_by('qkattn.attention', graph):
        for node in ast.parse(MODULES[module].read_text()).body:
            if isinstance(node, ast.Import):
                packages |= {alias.name.partition('.')[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                packages.add(node.module.partition('.')[0])
    assert packages - sys.stdlib_module_names == {'flax', 'jax', 'numpy', 'qkattn', 'scipy'}


def test_every_room_has_its_layer_and_nothing_lies_flat():
    entries = {path.name for path in ROOT.glob('qkattn/*') if path.name != '__pycache__'}
    files = {name for name in entries if '.' in name}
    assert files == {'__init__.py', '__main__.py', 'errors.py', 'py.typed'}
    assert entries - files <= LAYER.keys()


def test_the_package_and_the_bottom_of_a_verdict_import_without_jax():
    names = ('config', 'metrics', 'stats', 'verdict', 'report.verify')
    rooms = [f'qkattn.{name}' for name in names]
    program = f"""
import sys, qkattn
dir(qkattn)
assert not {{'jax', 'numpy'}} & {{*sys.modules}}
import {', '.join(rooms)}
assert 'jax' not in sys.modules"""
    assert subprocess.run([sys.executable, '-c', program], cwd=ROOT).returncode == 0


def test_a_training_step_is_read_in_few_files_and_lines(tiny):
    """The functions of the loop, the stack and a step that are called from a batch to a gradient.

    What an attention layer computes, `qkattn.attention`, is another read.
    """
    config = tiny()
    mesh = sharding.make_mesh(config.mesh)
    inputs = program.abstract_inputs(config, mesh)
    run, stack = loop._Run, trials.Stack
    methods = (run.to_end, run._write, run._should_stop, stack.batches, stack.place, stack.train)
    codes = {inspect.unwrap(method).__code__ for method in methods}
    sys.setprofile(lambda frame, event, argument: codes.add(frame.f_code))
    try:
        program.lower(config, 'map', mesh, *inputs)
    finally:
        sys.setprofile(None)
    rooms = tuple(f'{ROOT}/qkattn/{room}/' for room in STEP_ROOMS)
    lines = {
        (code.co_filename, line)
        for code in codes
        if code.co_filename.startswith(rooms)
        for *_, line in code.co_lines()
    }
    files = {file for file, _ in lines}
    assert len(files) <= STEP_FILES and len(lines) <= STEP_LINES, (len(lines), sorted(files))


def test_every_name_of_the_package_is_exported_and_listed():
    for name in qkattn.__all__:
        assert callable(getattr(qkattn, name)) and name in dir(qkattn)
        assert not (ROOT / 'qkattn' / name).exists(), 'the name of a package'
    with pytest.raises(AttributeError, match="'qkattn' has no attribute 'biuld'"):
        _ = qkattn.biuld
