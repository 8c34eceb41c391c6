"""Packages that only some settings need: extras of pyproject.toml."""

import importlib
from types import ModuleType

from qkattn.errors import ConfigError


def load_extra(package: str, extra: str) -> ModuleType:
    """Imports `package`; raises ConfigError with what to install where it is absent."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"{extra} needs the package {missing.name}: pip install -e '.[{extra}]'"
        ) from missing
