"""How attention variants are written: `score/value`, as in `low_rank(rank=8)/vo`."""

from typing import NamedTuple

from qkattn.errors import SpecError


class Variant(NamedTuple):
    """One way to write attention: a Score and a Value by name, each perhaps with options."""

    score: str
    value: str

    @classmethod
    def parse(cls, text: str) -> 'Variant':
        """The variant of 'score/value'; SpecError for text without a slash."""
        score, slash, value = text.partition('/')
        if not slash:
            raise SpecError(f'variant {text!r} must be written score/value, e.g. qk/vo')
        return cls(score, value)

    def __str__(self) -> str:
        return f'{self.score}/{self.value}'


def split_pattern(text: str) -> list[str]:
    """The variants of a pattern, which commas outside of parentheses separate.

    'qk/vo, low_rank(rank=8)/vo' -> ['qk/vo', 'low_rank(rank=8)/vo']
    """
    variants = ['']
    depth = 0
    for character in text:
        if character == '(':
            depth += 1
        elif character == ')':
            depth -= 1
        if character == ',' and depth == 0:
            variants.append('')
        else:
            variants[-1] += character
    # The first is not stripped, so that it equals the variant of the model only if written like it.
    return [variants[0], *(variant.lstrip() for variant in variants[1:])]
