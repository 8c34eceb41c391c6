"""The place of an arm in its study: which variant, at which size, on which corpus, and what for."""

from typing import NamedTuple

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
