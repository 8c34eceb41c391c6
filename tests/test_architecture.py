"""Rules on code: which package may import which, where imports are, and what one line assigns.

Each package ("room") is in a layer. A file may import from its own room and from lower layers, so
packages cannot form circles. Another test looks for circles between files.
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
LAYERS = [
    ['errors'],
    ['config'],
    ['metrics', 'stats'],
    ['jobs'],
    ['storage'],
    ['attention'],
    ['model'],
    ['data'],
    ['analysis', 'decode'],
    ['train'],
    ['convert'],
    ['study'],
    ['verdict'],
    ['report'],
    ['claims', 'explorer', 'benchmark'],
    ['experiments', 'examples', '__main__'],
]
LAYER = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}

# Imported where it is used: only reading .pt files needs it.
OPTIONAL = {'torch'}


def module_of(path: Path) -> str:
    """Returns the import path of a file, such as 'qkattn.train.loop'."""
    parts = path.relative_to(ROOT).with_suffix('').parts
    if parts[-1] == '__init__':
        parts = parts[:-1]
    return '.'.join(parts)


MODULES = {module_of(path): path for path in FILES}
# The packages inside experiments/ are rooms of their own, below the scripts.
PACKAGES = {path.parent.name for path in ROOT.glob('experiments/*/__init__.py')}


def room_of(module: str) -> str | None:
    """Returns the package of a module of this repository.

    For example:

        'qkattn.train.loop'          'train'
        'experiments.ablate'         'experiments'
        'experiments.claims.checks'  'claims'
        'qkattn', 'jax.numpy'        None
    """
    top, *inside = module.split('.')
    if top == 'experiments':
        # Packages inside experiments/ are rooms of their own.
        is_in_package = bool(inside) and inside[0] in PACKAGES
        return inside[0] if is_in_package else 'experiments'
    if top == 'examples':
        return 'examples'
    if top == 'qkattn' and inside:
        return inside[0]
    return None


def modules_imported_by(node: ast.AST) -> Iterator[str]:
    """Yields the modules of this repository that a statement imports, such as 'qkattn.config'.

    For any other statement, yields nothing.
    """
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, 'imports are absolute'
        for alias in node.names:
            # `from PACKAGE import NAME` imports the module PACKAGE.NAME if there is one.
            submodule = f'{node.module}.{alias.name}'
            names.append(submodule if submodule in MODULES else str(node.module))
    for name in names:
        if name.split('.')[0] in FOLDERS:
            yield name


def upward_imports(path: Path) -> list[str]:
    """Returns what is wrong with the imports of a file, such as '.../loop.py: imports study'.

    A file may import from its own room (package), and from rooms in lower layers.
    """
    room = room_of(module_of(path))
    if room is None:
        return []

    problems = []
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        for module in modules_imported_by(node):
            imported_room = room_of(module)
            if imported_room is None or imported_room == room:
                continue
            if LAYER[imported_room] >= LAYER[room]:
                problems.append(f'{path.relative_to(ROOT)}: imports {imported_room}')
    return problems


def test_imports_point_down():
    problems = [problem for path in FILES for problem in upward_imports(path)]
    assert problems == []


def imports_in_blocks(path: Path) -> list[str]:
    """Returns the places of imports that are not at the top level of a file.

    For example, a place is 'qkattn/train/loop.py, line 7'. The statement `import PACKAGE` is
    allowed anywhere for packages in `OPTIONAL`.
    """
    tree = ast.parse(path.read_text())
    places = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        is_at_top_level = node in tree.body
        if is_at_top_level:
            continue
        names = {alias.name for alias in node.names}
        if isinstance(node, ast.Import) and names <= OPTIONAL:
            continue
        places.append(f'{path.relative_to(ROOT)}, line {node.lineno}')
    return places


def test_imports_stand_at_the_top():
    places = [place for path in FILES for place in imports_in_blocks(path)]
    assert places == []


def is_parallel(node: ast.AST) -> bool:
    """Whether a statement assigns several values to several names at once, as in `a, b = c, d`.

    Three forms do not count:

        a, b = b, a        # a swap
        T, D = 4, 16       # sizes, whose names have one letter
        T, D = x.shape     # one value is unpacked
    """
    if not isinstance(node, ast.Assign):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False  # one name, or one value that is unpacked

    names = {ast.unparse(element) for element in target.elts}
    values = {ast.unparse(element) for element in node.value.elts}
    is_swap = names == values
    are_sizes = all(len(name) == 1 and name.isupper() for name in names)
    return not is_swap and not are_sizes


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
    places = []
    for path in [*FILES, *ROOT.glob('tests/**/*.py')]:
        for node in ast.walk(ast.parse(path.read_text())):
            if is_parallel(node):
                places.append(f'{path.relative_to(ROOT)}, line {node.lineno}')
    assert places == []


@pytest.fixture(scope='module')
def imports_by_module():
    """Maps each module of this repository to the other modules of the repository it imports."""
    imports = {}
    for module, path in MODULES.items():
        imports[module] = set()
        for node in ast.parse(path.read_text()).body:
            imports[module].update(modules_imported_by(node))
        imports[module].discard(module)
    return imports


def test_imports_between_modules_form_no_circle(imports_by_module):
    # If there is a circle, this raises CycleError, whose message names the circle.
    graphlib.TopologicalSorter(imports_by_module).prepare()


def test_output_of_programs_is_decoded_by_one_function():
    """Only two files of helpers decode what programs print.

    The helpers accept any bytes. If `subprocess` itself decodes, bytes that are not UTF-8 raise an
    error.
    """
    helpers = {ROOT / 'qkattn/jobs/output.py', ROOT / 'launch/arguments.py'}
    files = {*FILES, *ROOT.glob('launch/*.py')} - helpers
    # With any of these arguments, subprocess returns text instead of bytes.
    decoding_arguments = {'text', 'universal_newlines', 'encoding'}

    places = []
    for path in files:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            is_of_subprocess = ast.unparse(node.func).startswith('subprocess.')
            arguments = {keyword.arg for keyword in node.keywords}
            decodes = not arguments.isdisjoint(decoding_arguments)
            if is_of_subprocess and decodes:
                places.append(f'{path.relative_to(ROOT)}, line {node.lineno}')
    assert places == []


def loaded_by(module: str, imports_by_module: dict[str, set[str]]) -> set[str]:
    """Returns the modules of this repository that `import module` loads, directly or indirectly.

    The result includes `module`. `imports_by_module` has only direct imports.
    """
    loaded: set[str] = set()
    pending = [module]
    while pending:
        name = pending.pop()
        if name in loaded or name not in imports_by_module:
            continue
        loaded.add(name)
        package = name.rpartition('.')[0]  # Python loads 'qkattn.train' before 'qkattn.train.loop'
        pending += [package, *imports_by_module[name]]
    return loaded


def test_attention_layers_need_few_packages(imports_by_module):
    """`import qkattn.attention` loads only four packages that are not in the standard library."""
    packages = set()
    for module in loaded_by('qkattn.attention', imports_by_module):
        for node in ast.parse(MODULES[module].read_text()).body:
            if isinstance(node, ast.Import):
                packages |= {alias.name.partition('.')[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                packages.add(node.module.partition('.')[0])
    third_party = packages - sys.stdlib_module_names
    assert third_party == {'flax', 'jax', 'numpy', 'qkattn', 'scipy'}


# Files and folders of the package.
ENTRIES = {path.name for path in ROOT.glob('qkattn/*') if path.name != '__pycache__'}
TOP_FILES = {'__init__.py', '__main__.py', 'errors.py', 'py.typed'}


def test_modules_are_in_subpackages():
    files = {name for name in ENTRIES if '.' in name}
    assert files == TOP_FILES


def test_every_package_has_a_layer():
    packages = (ENTRIES - TOP_FILES) | PACKAGES
    assert packages <= LAYER.keys()


IMPORTS_WITHOUT_JAX = """
import sys
import qkattn

dir(qkattn)
assert 'jax' not in sys.modules
assert 'numpy' not in sys.modules

import qkattn.config
import qkattn.metrics
import qkattn.stats
import qkattn.verdict
import qkattn.report.verify

assert 'jax' not in sys.modules
"""


def test_packages_that_read_results_do_not_import_jax():
    done = subprocess.run([sys.executable, '-c', IMPORTS_WITHOUT_JAX], cwd=ROOT)
    assert done.returncode == 0


def test_every_public_name_is_exported():
    for name in qkattn.__all__:
        assert callable(getattr(qkattn, name))
        assert not (ROOT / 'qkattn' / name).exists(), 'the name of a package'


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="'qkattn' has no attribute 'biuld'"):
        _ = qkattn.biuld


def test_dir_lists_the_public_names_alone():
    assert dir(qkattn) == qkattn.__all__
