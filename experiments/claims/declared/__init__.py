"""The declared claims: all in the files of this package, and any import path."""

import functools
import importlib
import pkgutil
from collections.abc import Iterable

from experiments.claims.claim import Claim
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

    ConfigError for an unknown name, with the one most like it, an import path of something else, or
    of a claim with the name of a declared one.
    """
    known = claims()
    kind = 'a experiments.claims.claim.Claim'
    texts = dict.fromkeys(name if ':' in name else name.upper() for name in names)
    found = []
    for text in texts or known:
        claim, _ = resolve(text, known, 'claim', needs=kind, fits=lambda x: isinstance(x, Claim))
        if known.get(claim.name, claim) is not claim:
            raise ConfigError(f'claim={text!r} has the name {claim.name!r} of a declared claim')
        found.append(claim)
    return found
