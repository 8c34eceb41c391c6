"""The declared claims: all in the files of `qkattn.claims.declared`, and any import path."""

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Iterable

from qkattn.claims import declared as directory
from qkattn.claims.claim import Claim
from qkattn.config.calls import resolve
from qkattn.errors import ConfigError


@functools.cache
def declared() -> dict[str, Claim]:
    """The claims by name, in the order of their names; ConfigError if one is declared twice."""
    claims: dict[str, Claim] = {}
    for module in pkgutil.iter_modules(directory.__path__, f'{directory.__name__}.'):
        for claim in vars(importlib.import_module(module.name)).values():
            if isinstance(claim, Claim) and claims.setdefault(claim.name, claim) is not claim:
                raise ConfigError(f'claim {claim.name!r} is declared twice, also in {module.name}')
    return dict(sorted(claims.items()))


def chosen(names: Iterable[str]) -> list[Claim]:
    """The claims of these names or import paths, in their order; all of them for no names.

    ConfigError for an unknown name, with the one most like it, or an import path of something else.
    """
    known = declared()
    return [_find(name, known) for name in dict.fromkeys(names)] or list(known.values())


def _find(name: str, known: dict[str, Claim]) -> Claim:
    if ':' in name:
        return resolve(
            name,
            {},
            'claim',
            needs='a qkattn.claims.claim.Claim',
            fits=lambda given: isinstance(given, Claim),
        )[0]
    if name.upper() not in known:
        near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.4)
        hint = f', did you mean {near[0]!r}?' if near else ';'
        raise ConfigError(
            f'unknown claim {name!r}{hint} known are {", ".join(known)}, '
            'or an import path package.module:name'
        )
    return known[name.upper()]
