"""The text form of attention variants: `score/value`, as in `low_rank(rank=8)/vo`."""

from typing import NamedTuple

from qkattn.errors import SpecError


class Variant(NamedTuple):
    """One way to write attention: the name of a Score and of a Value, with their options."""

    score: str
    value: str

    @classmethod
    def parse(cls, text: str) -> 'Variant':
        """Splits 'score/value'; raises SpecError for text without a slash, or with a file."""
        score, slash, value = text.partition('/')
        if not slash:
            raise SpecError(f'variant {text!r} must be written score/value, e.g. qk/vo')
        # In 'my_folder/my_file.py:MyScore/vo', the first slash is that of a folder.
        if '.py:' in value and text.count('/') > 1:
            raise SpecError(
                f'variant {text!r} names a file; name its module, as in my_folder.my_file:Mine/vo'
            )
        return cls(score, value)

    def __str__(self) -> str:
        return f'{self.score}/{self.value}'


def split_pattern(text: str) -> list[str]:
    """Splits a list of variants at the commas outside of parentheses.

    'qk/vo, low_rank(rank=8)/vo' -> ['qk/vo', 'low_rank(rank=8)/vo']
    """
    variants = ['']
    num_open_parentheses = 0
    for character in text:
        if character == '(':
            num_open_parentheses += 1
        elif character == ')':
            num_open_parentheses -= 1

        if character == ',' and num_open_parentheses == 0:
            variants.append('')
        else:
            variants[-1] += character

    # Spaces after commas are dropped. Leading spaces of the whole text are not valid, so they stay.
    first, *rest = variants
    return [first, *(variant.lstrip() for variant in rest)]
