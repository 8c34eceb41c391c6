"""Code from outside the package: import paths, hashes of source files, optional packages."""

import difflib
import hashlib
import importlib
import json
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any

from qkattn.errors import ConfigError

# Settings of the data with values that look like import paths, such as 'tiktoken:gpt2', and the
# names before the colon.
NOT_MODULES = {'evaluate': ('text', 'tokens'), 'tokenizer': ('tiktoken',)}
# 'package.module:name'
IMPORT_PATH = re.compile(r'[^\W\d][\w.]*:[^\W\d]\w*')
# The folders of the package's own code. In a checkout, experiments/ is beside qkattn/.
_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (f'{_PACKAGE}{os.sep}', f'{_PACKAGE.parent / "experiments"}{os.sep}')


def import_object(path: str, field: str, error: type[ValueError] = ConfigError) -> Any:
    """Imports an object by its import path 'package.module:name'.

    Args:
        path: The import path.
        field: The setting that holds the path, for error messages.
        error: The exception class to raise.

    Raises:
        error: The path is malformed, the module cannot be imported, or the module lacks the name.
    """
    module_name, _, name = path.partition(':')
    if module_name.endswith('.py'):
        module_of_file = _module_of_file(module_name)
        raise error(
            f'{field}={path!r} names a file; name its module, as in {module_of_file}:{name}'
        )
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
        close_names = difflib.get_close_matches(name, vars(module), n=1)
        if close_names:
            message += f'; did you mean {close_names[0]!r}?'
        raise error(message)
    return getattr(module, name)


def _module_of_file(file: str) -> str:
    """Returns the module name of a Python file: 'scores.mine' for 'scores/mine.py'.

    Without its folders if they cannot be packages, as in '/home/me/mine.py'.
    """
    path = Path(file)
    folders = path.parent.parts
    if all(folder.isidentifier() for folder in folders):
        return '.'.join([*folders, path.stem])
    return path.stem


def describe_failure(failure: Exception) -> str:
    """Describes an exception in one line, such as 'KeyError in my_file.py, line 9: ...'.

    The line is that of a syntax error, or the last one of the user's code: outside of this package,
    installed libraries and Python's own. Without such a line, it is the last one of this package.
    """
    if isinstance(failure, SyntaxError) and failure.filename is not None:
        return f'SyntaxError in {failure.filename}, line {failure.lineno}: {failure.msg}'
    frames = traceback.extract_tb(failure.__traceback__)  # the frame that raised is last
    non_library_frames = [frame for frame in frames if not _is_of_library(frame.filename)]
    user_frames = [frame for frame in non_library_frames if not _is_of_package(frame.filename)]
    raising_frame = non_library_frames[-1] if non_library_frames else frames[-1]
    shown_frame = user_frames[-1] if user_frames else raising_frame

    reason = ' '.join(str(failure).split())  # without line breaks
    if not reason and isinstance(failure, NotImplementedError):
        # The method of a base class, which the user's code may have called.
        reason = f'a subclass must define {raising_frame.name}'
    elif not reason:
        reason = f'raised by {raising_frame.name}'
    error_name = type(failure).__name__
    return f'{error_name} in {shown_frame.filename}, line {shown_frame.lineno}: {reason}'


def _is_of_library(filename: str) -> bool:
    """Whether a file belongs to an installed library or to Python's standard library."""
    standard_library = sysconfig.get_path('stdlib') + os.sep
    # dataclasses generates methods in the file '<string>'.
    beginnings = (standard_library, '<frozen ', '<string>')
    return 'site-packages' in filename or filename.startswith(beginnings)


def _is_of_package(filename: str) -> bool:
    """Whether a file belongs to the package itself: to qkattn/ or experiments/."""
    return filename.startswith(_FOLDERS)


def import_paths(config_json: Any) -> list[str]:
    """Returns the import paths in a config as JSON, sorted and without options."""
    text = json.dumps(_drop_data_names(config_json), ensure_ascii=False)
    paths = set(IMPORT_PATH.findall(text))
    # Datasets such as 'tfds:lm1b' look like import paths.
    return sorted(path for path in paths if not path.startswith(('tfds:', 'hf:')))


def _drop_data_names(config_json: Any) -> Any:
    """Drops values that look like import paths, such as 'tiktoken:gpt2', from a config as JSON.

    The values of all fields become lists. For example,

        {'tokenizer': 'tiktoken:gpt2', 'score': 'my_file:MyScore'}

    becomes {'tokenizer': [], 'score': ['my_file:MyScore']}.
    """
    if isinstance(config_json, list):
        return [_drop_data_names(item) for item in config_json]
    if not isinstance(config_json, dict):
        return config_json
    kept: dict[str, list[Any]] = {}
    for field, value in config_json.items():
        kept[field] = []
        # ('tiktoken:',) for the field 'tokenizer', () for most fields.
        data_prefixes = tuple(f'{name}:' for name in NOT_MODULES.get(field, ()))
        items = value if isinstance(value, list) else [value]
        for item in items:
            is_data_name = isinstance(item, str) and item.startswith(data_prefixes)
            if not is_data_name:
                kept[field].append(_drop_data_names(item))
    return kept


def source_hashes(config_json: Any) -> dict[str, str | None]:
    """Returns the SHA-256 of the source files of code that a config names, by import path.

    Code that has not been imported is left out. The hash is None for a module without a file.
    """
    hash_by_path = {}
    for path in import_paths(config_json):
        module_name, _, _ = path.partition(':')
        is_imported = module_name in sys.modules
        if is_imported:
            hash_by_path[path] = _source_sha256(path)
    return hash_by_path


def require_named(config_json: Any, named: Collection[str], source: object, remedy: str) -> None:
    """Requires that the user has named the code that a config imports, because importing runs it.

    Args:
        config_json: The config as JSON.
        named: The import paths that the user has named.
        source: The file with the config, for the error message.
        remedy: How to name paths, for the error message; {} stands for all paths of the config,
            separated by commas.

    Raises:
        ConfigError: The config has import paths that the user has not named.
    """
    paths = import_paths(config_json)
    unnamed = [path for path in paths if path not in named]
    if unnamed:
        raise ConfigError(
            f'{source} names {", ".join(unnamed)}, code that is imported only if you name it too; '
            f'{remedy.format(",".join(paths))}'
        )


def source_digest(call: str) -> str:
    """Returns a hash of an imported object's path, options and source file.

    `call` is an import path with or without options, such as 'my_file:MyScore(rank=2)'.
    """
    text = f'{call} {_source_sha256(call)}'
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _source_sha256(path: str) -> str | None:
    """Returns the SHA-256 of an imported module's file; None if the module has no file."""
    module_name, _, _ = path.partition(':')
    module = sys.modules[module_name]
    source_file = getattr(module, '__file__', None)
    if not source_file:
        return None
    return hashlib.sha256(Path(source_file).read_bytes()).hexdigest()


def load_extra(package: str, extra: str) -> ModuleType:
    """Imports a package; ConfigError names the extra of pyproject.toml that installs it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as missing:
        install = f"pip install -e '.[{extra}]'"
        raise ConfigError(f'{extra} needs the package {missing.name}: {install}') from missing
