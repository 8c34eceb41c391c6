"""The key of an arm in its study: its variant, size, corpus and control."""

import re
from typing import NamedTuple

from qkattn.errors import ConfigError

# Controls: a saving variant that stays at the baseline's shape, and an arm that is trained longer.
# Settings and stored results call the first one `equal_shape`.
SAME_SHAPE = 'equal_shape'
LONGER = 'longer'
CONTROLS = (SAME_SHAPE, LONGER)
# The decisions that a positive control may expect.
EXPECTED = ('better', 'worse', 'not better', 'not worse')


class ArmKey(NamedTuple):
    """Identifies an arm within its study."""

    # Its label, with ' [destination]' if the study has several; a same-shape control has no
    # destination, so its label is the variant alone.
    variant: str
    size: str  # as written in the study
    corpus: str  # data.name
    control: str | None = None  # None for a primary arm, or one of CONTROLS

    @property
    def declared(self) -> 'ArmKey':
        """The key in study.json, which has no control for arms that are trained longer."""
        return self._replace(control=None) if self.control == LONGER else self

    def __str__(self) -> str:
        control = f' ({self.control})' if self.control else ''
        return f'{self.variant!r} at {self.size!r} on {self.corpus!r}{control}'


class Expected(NamedTuple):
    """A positive control: the expected decision on a variant with a known effect."""

    variant: str  # its label
    decision: str  # one of EXPECTED
    same_shape: bool  # whether the variant at the baseline's shape is meant, not the matched one


def parse_expected(text: str) -> Expected:
    """'VARIANT is DECISION' or 'VARIANT is DECISION at equal shape'; ConfigError otherwise."""
    pattern = rf'(\S+(?: \[\w+\])?) is ({"|".join(EXPECTED)})( at equal shape)?'
    if (match := re.fullmatch(pattern, text)) is None:
        raise ConfigError(
            f'expected={text!r} must be a variant and a decision, {", ".join(EXPECTED)}, as in '
            "'qk/vo?num_heads=1 is worse' or 'shared_qk/vo is worse at equal shape'"
        )
    return Expected(match[1], match[2], match[3] is not None)
