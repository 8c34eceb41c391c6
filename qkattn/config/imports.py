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

# Names before a colon that are no module, by the field of the data that has them: a corpus before
# its path, and a library before the name of its vocabulary.
NOT_MODULES = {'evaluate': ('text', 'tokens'), 'tokenizer': ('tiktoken',)}
# 'package.module:name'
IMPORT_PATH = re.compile(r'[^\W\d][\w.]*:[^\W\d]\w*')


def import_object(path: str, field: str, error: type[ValueError] = ConfigError) -> Any:
    """Imports the object of an import path 'package.module:name', which the setting `field` holds.

    Raises `error` if the path is malformed, if the module cannot be imported, or if it does not
    have the name.
    """
    module_name, _, name = path.partition(':')
    parts = [*module_name.split('.'), name]
    if not all(part.isidentifier() for part in parts):
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
        near = difflib.get_close_matches(name, vars(module), n=1)
        if near:
            message += f'; did you mean {near[0]!r}?'
        raise error(message)
    return getattr(module, name)


def describe_failure(failure: Exception) -> str:
    """Describes an exception of code from outside the package in one line.

    The line reads 'KeyError in my_file.py, line 9: ...'. If a library has raised the exception, it
    names the line of the code that calls the library. An exception without a text, such as
    NotImplementedError, is described by the name of the function that has raised it.
    """
    frames = traceback.extract_tb(failure.__traceback__)
    frames_outside_libraries = [frame for frame in frames if 'site-packages' not in frame.filename]
    last_frame = frames_outside_libraries[-1] if frames_outside_libraries else frames[-1]
    error_name = type(failure).__name__
    reason = ' '.join(str(failure).split())  # on one line
    if not reason:
        reason = f'raised by {last_frame.name}'
    return f'{error_name} in {last_frame.filename}, line {last_frame.lineno}: {reason}'


def import_paths(config_json: Any) -> list[str]:
    """Returns the import paths in a config as JSON, without options, in alphabetical order."""
    text = json.dumps(_drop_data_names(config_json), ensure_ascii=False)
    paths = set(IMPORT_PATH.findall(text))
    # The names of data sets in catalogues have the same form, as in 'tfds:lm1b'.
    return sorted(path for path in paths if not path.startswith(('tfds:', 'hf:')))


def _drop_data_names(config_json: Any) -> Any:
    """Drops the names of data that look like import paths from a config as JSON.

    For example, {'tokenizer': 'tiktoken:gpt2', 'score': 'my_file:MyScore'} becomes
    {'tokenizer': [], 'score': ['my_file:MyScore']}. NOT_MODULES lists the fields that have such
    names. The value of every field becomes a list.
    """
    if isinstance(config_json, list):
        return [_drop_data_names(item) for item in config_json]
    if not isinstance(config_json, dict):
        return config_json
    kept: dict[str, list[Any]] = {}
    for field, value in config_json.items():
        kept[field] = []
        data_prefixes = tuple(f'{name}:' for name in NOT_MODULES.get(field, ()))
        items = value if isinstance(value, list) else [value]
        for item in items:
            is_data_name = isinstance(item, str) and item.startswith(data_prefixes)
            if not is_data_name:
                kept[field].append(_drop_data_names(item))
    return kept


def source_hashes(config_json: Any) -> dict[str, str | None]:
    """Returns {import path: sha256 of its source file} for imported code that a config names.

    A run records the hashes, because code from outside the package is not part of its commit. Paths
    whose module is not imported are left out.
    """
    digest_by_path = {}
    for path in import_paths(config_json):
        module_name, _, _ = path.partition(':')
        if module_name in sys.modules:
            digest_by_path[path] = _source_sha256(path)
    return digest_by_path


def require_named(config_json: Any, named: Collection[str], source: object, remedy: str) -> None:
    """Raises ConfigError if a config has an import path that the user has not named.

    A config may come from anybody, and importing code runs it. So the user must also name the code.

    Args:
      config_json: the config as JSON.
      named: the import paths that the user has named.
      source: the file that the config was read from, for the error.
      remedy: the end of the error, which says how to name a path; {} stands for the path.
    """
    for path in import_paths(config_json):
        if path not in named:
            raise ConfigError(
                f'{source} names {path}, code that is imported only if you name it too; '
                f'{remedy.format(path)}'
            )


def source_digest(call: str) -> str:
    """Returns a hash that identifies an imported object, its options and its source file.

    `call` is the import path, with the options if there are any: 'my_file:MyScore(rank=2)'.
    """
    text = f'{call} {_source_sha256(call)}'
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _source_sha256(path: str) -> str | None:
    """Returns the sha256 of the source file of an import path; None if its module has no file."""
    module_name, _, _ = path.partition(':')
    module = sys.modules[module_name]
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
