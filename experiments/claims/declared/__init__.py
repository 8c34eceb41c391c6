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
    """Returns the declared claims by name, in the order of their names.

    Raises ConfigError if two claims have the same name.
    """
    by_name: dict[str, Claim] = {}
    for module_info in pkgutil.iter_modules(__path__, f'{__name__}.'):
        module = importlib.import_module(module_info.name)
        for value in vars(module).values():
            if not isinstance(value, Claim):
                continue
            first = by_name.setdefault(value.name, value)
            if first is not value:
                raise ConfigError(
                    f'claim {value.name!r} is declared twice, also in {module_info.name}'
                )
    return dict(sorted(by_name.items()))


def chosen(names: Iterable[str]) -> list[Claim]:
    """Returns the claims with some names or import paths, each once; all claims for no names.

    ['b2', 'my_claims:CLAIM'] are claim B2 and the one that the module my_claims holds as CLAIM.

    Raises ConfigError for an unknown name, for an import path of something that is not a claim, and
    for an imported claim that has the name of a declared one.
    """
    declared = claims()
    # Each once, and names of declared claims in upper case. An import path has a colon.
    texts = dict.fromkeys(name if ':' in name else name.upper() for name in names)
    selected = []
    for text in texts or declared:
        claim, _ = resolve(
            text,
            declared,
            'claim',
            needs='a claim (experiments.claims.claim.Claim)',
            is_valid=lambda value: isinstance(value, Claim),
        )
        declared_claim = declared.get(claim.name)
        if declared_claim is not None and declared_claim is not claim:
            raise ConfigError(f'claim={text!r} has the name {claim.name!r} of a declared claim')
        selected.append(claim)
    return selected
