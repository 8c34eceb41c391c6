"""The notations `name(option=value, ...)` and `score/value`."""

import ast
from typing import Any

from qkattn.errors import SpecError


def parse_call(text: str, kind: str) -> tuple[str, dict[str, Any]]:
    """Splits 'name(option=literal, ...)' into name and options; SpecError names the `kind`."""
    name, parenthesis, _ = text.partition('(')
    if not parenthesis:
        return name, {}
    try:
        call = ast.parse('f' + text[len(name) :], mode='eval').body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        return name, {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError):
        raise SpecError(
            f'{kind.lower()} {text!r} must be written name(option=value, ...) with literal values'
        ) from None


def split_variant(text: str) -> tuple[str, str]:
    """'score/value' -> (score, value)."""
    score, slash, value = text.partition('/')
    if not slash:
        raise SpecError(f'variant {text!r} must be written score/value, e.g. qk/vo')
    return score, value
