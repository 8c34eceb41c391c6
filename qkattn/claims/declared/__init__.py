"""The declared claims: all in the files of this package, and any import path."""

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Iterable

from qkattn.claims.claim import Claim
from qkattn.config.calls import resolve
from qkattn.errors import ConfigError


@functools.cache
def claims() -> dict[str, Claim]:
    """The claims by name, in the order of their names; ConfigError if one is declared twice."""
    known: dict[str, Claim] = {}
    for module in pkgutil.iter_modules(__path__, f'{__name__}.'):
        for claim in vars(importlib.import_module(module.name)).values():
            if isinstance(claim, Claim) and known.setdefault(claim.name, claim) is not claim:
                raise ConfigError(f'claim {claim.name!r} is declared twice, also in {module.name}')
    return dict(sorted(known.items()))


def chosen(names: Iterable[str]) -> list[Claim]:
    """The claims of these names or import paths, in their order; all of them for no names.

    ConfigError for an unknown name, with the one most like it, or an import path of something else.
    """
    known, picked = claims(), []
    for name in dict.fromkeys(names):
        if ':' in name:
            needs = 'a qkattn.claims.claim.Claim'
            given = resolve(
                name, {}, 'claim', needs=needs, fits=lambda value: isinstance(value, Claim)
            )
            picked.append(given[0])
        elif name.upper() in known:
            picked.append(known[name.upper()])
        else:
            near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.4)
            hint = f', did you mean {near[0]!r}?' if near else ';'
            raise ConfigError(
                f'unknown claim {name!r}{hint} known are {", ".join(known)}, '
                'or an import path package.module:name'
            )
    return picked or list(known.values())
