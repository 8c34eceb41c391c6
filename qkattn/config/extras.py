"""Packages that only some settings need: extras of pyproject.toml."""

import importlib
import importlib.util
from types import ModuleType

from qkattn.errors import ConfigError


def load_extra(package: str, extra: str) -> ModuleType:
    """Imports `package`; raises ConfigError with what to install where it is absent."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as missing:
        raise _error(str(missing.name), extra) from missing


def missing_extra(package: str, extra: str) -> ConfigError | None:
    """What load_extra would raise for a package at the top level, without importing it."""
    return None if importlib.util.find_spec(package) else _error(package, extra)


def _error(package: str, extra: str) -> ConfigError:
    return ConfigError(f"{extra} needs the package {package}: pip install -e '.[{extra}]'")
