"""Code from outside the package: objects by import path, their source files, optional packages."""

import difflib
import hashlib
import importlib
import json
import re
import sys
import traceback
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any

from qkattn.errors import ConfigError

IMPORT_PATH = re.compile(r'[^\W\d][\w.]*:[^\W\d]\w*')


def import_object(path: str, field: str, error: type[ValueError] = ConfigError) -> Any:
    """The object of an import path 'package.module:name', which the setting `field` holds.

    Raises `error` where the path is malformed, the module cannot be imported or lacks the name.
    """
    module_name, _, name = path.partition(':')
    if not all(part.isidentifier() for part in [*module_name.split('.'), name]):
        raise error(f'{field}={path!r} must be written package.module:name to be an import path')
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        raise error(f'{field}={path!r}: no module named {missing.name!r}') from missing
    except Exception as failure:
        raise error(
            f'{field}={path!r}: {module_name} cannot be imported, {describe_failure(failure)}'
        ) from failure
    if not hasattr(module, name):
        message = f'{field}={path!r}: {module_name} has no {name!r}'
        if near := difflib.get_close_matches(name, vars(module), n=1):
            message += f'; did you mean {near[0]!r}?'
        raise error(message)
    return getattr(module, name)


def describe_failure(failure: Exception) -> str:
    """The exception of code from outside in one line: 'KeyError in my_file.py, line 9: ...'.

    Where a library raises it, the line is that of the code which calls the library.
    """
    frames = traceback.extract_tb(failure.__traceback__)
    outside_libraries = [frame for frame in frames if 'site-packages' not in frame.filename]
    last = outside_libraries[-1] if outside_libraries else frames[-1]
    reason = ' '.join(str(failure).split())
    return f'{type(failure).__name__} in {last.filename}, line {last.lineno}: {reason}'


def import_paths(config_json: Any) -> list[str]:
    """The import paths in a config as JSON, without their options, in alphabetical order."""
    paths = set(IMPORT_PATH.findall(json.dumps(config_json, ensure_ascii=False)))
    # Sets of these catalogues are written alike.
    return sorted(path for path in paths if not path.startswith(('tfds:', 'hf:')))


def imported(config_json: Any) -> dict[str, str | None]:
    """The import paths in a config as JSON whose modules are imported, with their sources' sha256.

    A run records them, because a variant from outside is not part of the commit.
    """
    paths = import_paths(config_json)
    return {path: _source_sha256(path) for path in paths if path.split(':')[0] in sys.modules}


def require_named(config_json: Any, named: Collection[str], source: object, remedy: str) -> None:
    """Raises ConfigError for an import path in a config that is not among those `named`.

    What a file names is data, and is imported only where the user names it, too. `source` is where
    the config was read from; `remedy` says how to name a path, with {} in its place.
    """
    for path in import_paths(config_json):
        if path not in named:
            raise ConfigError(
                f'{source} names {path}, code that is imported only if you name it too; '
                f'{remedy.format(path)}'
            )


def digest(call: str) -> str:
    """Identifies an imported object with its options, by its text and its source file.

    `call` is an import path, perhaps with options: 'my_file:MyScore(rank=2)'.
    """
    return hashlib.sha256(f'{call} {_source_sha256(call)}'.encode()).hexdigest()[:12]


def _source_sha256(path: str) -> str | None:
    """The sha256 of the source file of an import path; None for a module without a file."""
    module = sys.modules[path.partition(':')[0]]
    file = getattr(module, '__file__', None)
    if not file:
        return None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def load_extra(package: str, extra: str) -> ModuleType:
    """Imports a package of an extra of pyproject.toml; ConfigError says how to install it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as missing:
        install = f"pip install -e '.[{extra}]'"
        raise ConfigError(f'{extra} needs the package {missing.name}: {install}') from missing
