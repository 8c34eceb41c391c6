"""The key of an arm in its study: its variant, size, corpus and control."""

import re
from typing import NamedTuple

from qkattn.errors import ConfigError

# A control that stays at the baseline's shape, where it has fewer parameters. Settings and stored
# results call it `equal_shape`.
SAME_SHAPE = 'equal_shape'
# A control that is trained longer.
LONGER = 'longer'
CONTROLS = (SAME_SHAPE, LONGER)
# The decisions that a positive control may expect.
EXPECTED = ('better', 'worse', 'not better', 'not worse')


class ArmKey(NamedTuple):
    """Identifies an arm within its study."""

    # The label: the variant, followed by ' [destination]' if the study has several destinations of
    # saved parameters. A control at the baseline's shape saves none, so its label is the variant.
    variant: str
    size: str  # as written in the study, such as 'd_model=128'
    corpus: str  # data.name
    control: str | None = None  # None for a primary arm, or one of CONTROLS

    @property
    def declared(self) -> 'ArmKey':
        """The key in study.json, which has no control for arms that are trained longer."""
        if self.control == LONGER:
            return self._replace(control=None)
        return self

    def __str__(self) -> str:
        text = f'{self.variant!r} at {self.size!r} on {self.corpus!r}'
        if self.control is None:
            return text
        return f'{text} ({self.control})'


class Expected(NamedTuple):
    """A positive control: the expected decision on a variant with a known effect."""

    variant: str  # its label
    decision: str  # one of EXPECTED
    same_shape: bool  # whether the variant at the baseline's shape is meant, not the matched one


def parse_expected(text: str) -> Expected:
    """Parses a positive control, which states the decision on a variant with a known effect.

    'qk/vo is worse' -> Expected('qk/vo', 'worse', same_shape=False)
    'qk/no_o [d_ff] is not better at equal shape' -> Expected('qk/no_o [d_ff]', 'not better', True)

    The brackets hold the destination of the saved parameters. 'at equal shape' means the variant
    with the sizes of the baseline. Raises ConfigError for any other text.
    """
    label = r'\S+(?: \[\w+\])?'
    decision = '|'.join(EXPECTED)
    match = re.fullmatch(rf'({label}) is ({decision})( at equal shape)?', text)
    if match is None:
        raise ConfigError(
            f'expected={text!r} must be a variant and a decision, {", ".join(EXPECTED)}, as in '
            "'qk/vo?num_heads=1 is worse' or 'shared_qk/vo is worse at equal shape'"
        )
    variant, decision, shape = match.groups()
    return Expected(variant, decision, same_shape=shape is not None)
