"""The key of an arm in its study: its variant, size, corpus and control."""

import re
from typing import NamedTuple

from qkattn.errors import ConfigError

# A control that keeps the baseline's shape and so has fewer parameters.
SAME_SHAPE = 'equal_shape'
# A control that is trained longer.
LONGER = 'longer'
CONTROLS = (SAME_SHAPE, LONGER)
# The decisions that a positive control may expect.
EXPECTED = ('better', 'worse', 'not better', 'not worse')


class ArmKey(NamedTuple):
    """Identifies an arm within its study."""

    # The label, such as 'qk/no_o'. If the study spends saved parameters in several ways, the label
    # names the dimension that gets them, as in 'qk/no_o [d_ff]'.
    variant: str
    size: str  # as written in the study, such as 'd_model=128'
    corpus: str  # data.name
    control: str | None = None  # None for a primary arm, or one of CONTROLS

    @property
    def declared(self) -> 'ArmKey':
        """The key in study.json. An arm that is trained longer has the key of the usual length."""
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

    variant: str  # the label of an arm
    decision: str  # one of EXPECTED
    same_shape: bool  # whether the arm has the baseline's shape, instead of the baseline's cost


def parse_expected(text: str) -> Expected:
    """Parses a positive control: a variant with a known effect, and the expected decision.

    For example:

        'qk/no_o [d_ff] is worse' -> Expected('qk/no_o [d_ff]', 'worse', same_shape=False)
        'qk/vo is worse at equal shape' -> Expected('qk/vo', 'worse', same_shape=True)

    Raises:
        ConfigError: The text does not have this form.
    """
    variant_pattern = '(?P<variant>.+?)'  # may have spaces, as 'qk/no_o [d_ff]' has
    decision_pattern = f'(?P<decision>{"|".join(EXPECTED)})'
    ending_pattern = '(?P<ending> at equal shape)?'
    match = re.fullmatch(f'{variant_pattern} is {decision_pattern}{ending_pattern}', text)
    if match is None:
        raise ConfigError(
            f'expected={text!r} must be a variant and a decision, {", ".join(EXPECTED)}, as in '
            "'qk/vo?num_heads=1 is worse' or 'shared_qk/vo is worse at equal shape'"
        )
    has_ending = match['ending'] is not None
    return Expected(match['variant'], match['decision'], same_shape=has_ending)
