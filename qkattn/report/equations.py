"""The two matrices of an attention variant, by the names of its Score and its Value.

equations.json is generated from the registries: python -m experiments.variants --equations
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qkattn.config.calls import parse_call


class Form(NamedTuple):
    """How a variant writes A[n] and B[n].

    Attributes:
      name: score/value, each with all of its options, those at their defaults included.
      score, value: equations of A[n] and of B[n]; None for a class outside the package.
    """

    name: str
    score: str | None
    value: str | None


def form(model: Mapping[str, Any]) -> Form:
    """The form of the attention of a model's config."""
    score, value = (_part(kind, model[kind.lower()]) for kind in ('Score', 'Value'))
    return Form(f'{score[0]}/{value[0]}', score[1], value[1])


def _part(kind: str, text: str) -> tuple[str, str | None]:
    name, options = parse_call(text, kind)
    known = _known()[kind].get(name)
    if known is None:
        return text, None
    listed = ', '.join(f'{key}={value!r}' for key, value in (known['options'] | options).items())
    return name + (f'({listed})' if listed else ''), known['equation']


@functools.cache
def _known() -> dict[str, dict[str, dict[str, Any]]]:
    return json.loads(Path(__file__).with_suffix('.json').read_text('utf-8'))
