"""The place of an arm in its study: which variant, at which size, on which corpus, and what for."""

import re
from typing import NamedTuple

from qkattn.errors import ConfigError

# Controls: a saving variant that stays at the baseline's shape, and an arm that is trained longer.
EQUAL_SHAPE, LONGER = 'equal_shape', 'longer'
CONTROLS = (EQUAL_SHAPE, LONGER)


class Place(NamedTuple):
    """Identifies an arm within its study.

    Attributes:
      variant: its label, with ' [destination]' if the study has several; an equal-shape control has
        no destination, so its label is the variant alone.
      size: as written in the study.
      corpus: data.name.
      control: None for a primary arm, or one of CONTROLS.
    """

    variant: str
    size: str
    corpus: str
    control: str | None = None

    @property
    def declared(self) -> 'Place':
        """As study.json declares it: without the control for an arm that is trained longer."""
        return self._replace(control=None) if self.control == LONGER else self


# Words of a positive control.
EXPECTED = ('better', 'worse', 'not better', 'not worse')


class Expected(NamedTuple):
    """A positive control: the word that a variant gets if the study finds a known effect.

    Attributes:
      variant: its label.
      word: one of EXPECTED.
      equal_shape: whether the variant at the baseline's shape is meant, not the matched one.
    """

    variant: str
    word: str
    equal_shape: bool


def parse_expected(text: str) -> Expected:
    """'VARIANT is WORD' or 'VARIANT is WORD at equal shape'; ConfigError for anything else."""
    pattern = rf'(\S+(?: \[\w+\])?) is ({"|".join(EXPECTED)})( at equal shape)?'
    if (found := re.fullmatch(pattern, text)) is None:
        raise ConfigError(
            f'expected={text!r} must be a variant and a word, {", ".join(EXPECTED)}, as in '
            "'qk/vo?num_heads=1 is worse' or 'shared_qk/vo is worse at equal shape'"
        )
    return Expected(found[1], found[2], found[3] is not None)
