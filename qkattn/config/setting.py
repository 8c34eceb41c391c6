"""How a field of the settings is declared: its default, its description, and what it may hold."""

import dataclasses
import typing
from typing import Any

# Sizes, steps and seeds are int32 in compiled programs; rates and factors are float32.
INT_END, FLOAT_MAX = 2**31, 3.4028234e38
# Of a path, and of each part of it, in bytes: the limits of Linux and macOS.
TEXT_END, PART_END = 4096, 256


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What a field may hold beyond its type; in a tuple, what each entry may.

    Integers without an upper bound are below 2**31, floats without one are finite in float32, and
    texts are Unicode without null characters, of less than 4,096 bytes.

    Attributes:
      least, most, above, below: of numbers.
      path: the text is a path on one line, each part of which has less than 256 bytes.
      filled: a tuple has at least one entry. No tuple has an entry twice.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    path: bool = False
    filled: bool = False

    def admit(self, kind: type, value: Any) -> bool:
        """Whether a value of type `kind` is valid."""
        if kind is str:
            return self._admit_text(value)
        most = FLOAT_MAX if self.most is None else self.most
        return kind is bool or (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self._end(kind) is None or value < self._end(kind))
            and -most <= value <= most
        )

    def _admit_text(self, text: str) -> bool:
        try:
            parts = [part.encode() for part in text.split('/')]
        except UnicodeEncodeError:  # half of a surrogate pair
            return False
        one_line = len(text.splitlines()) <= 1
        fits = not self.path or (one_line and max(map(len, parts)) < PART_END)
        return fits and len(b'/'.join(parts)) < TEXT_END and '\0' not in text

    def _end(self, kind: type) -> float | None:
        return INT_END if kind is int and self.most is self.below is None else self.below

    def words(self, kind: type) -> str:
        """What is valid for values of type `kind`, e.g. 'at least 0 and below 1'."""
        if kind is str:
            words = ['Unicode text without null characters', f'below {TEXT_END} bytes']
            return ', '.join(words + [f'one line, parts below {PART_END} bytes'] * self.path)
        low = {'at least': self.least, 'above': self.above}
        bounds = low | {'at most': self.most, 'below': self._end(kind)}
        words = [f'{word} {_number(end)}' for word, end in bounds.items() if end is not None]
        return ' and '.join(words + ['finite in float32'] * (self.most is self._end(kind) is None))


@dataclasses.dataclass(frozen=True)
class Setting:
    """A field of the settings.

    Attributes:
      kind: its annotation.
      doc: its description; the first sentence stands alone.
    """

    name: str
    kind: Any
    default: Any
    doc: str
    bounds: Bounds


def setting(default: Any, doc: str, **bounds: Any) -> Any:
    """A dataclass field with a default, a description, and the `Bounds` of its values."""
    return dataclasses.field(default=default, metadata={'doc': doc, 'bounds': Bounds(**bounds)})


def settings(cls: Any, prefix: str = '') -> dict[str, Setting]:
    """The fields of a class of settings and of its sections, by dotted name."""
    kinds = typing.get_type_hints(cls)
    found: dict[str, Setting] = {}
    for field in dataclasses.fields(cls):
        name, kind = f'{prefix}{field.name}', kinds[field.name]
        if dataclasses.is_dataclass(kind):
            found |= settings(kind, f'{name}.')
        else:
            found[name] = Setting(name, kind, field.default, **field.metadata)
    return found


def _number(end: Any) -> str:
    power = isinstance(end, int) and end >= 2**16 and end.bit_count() == 1
    return f'2**{end.bit_length() - 1}' if power else f'{end}'
