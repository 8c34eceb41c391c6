"""How a field of the settings is declared: its default, its description, and what it may hold."""

import dataclasses
import types
import typing
from typing import Any, Literal

from qkattn.errors import ConfigError

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
    fields: dict[str, Setting] = {}
    for field in dataclasses.fields(cls):
        name, kind = f'{prefix}{field.name}', kinds[field.name]
        if dataclasses.is_dataclass(kind):
            fields |= settings(kind, f'{name}.')
        else:
            fields[name] = Setting(name, kind, field.default, **field.metadata)
    return fields


def concrete_types(annotation: Any) -> list[type]:
    """The concrete types that a field may hold; a Literal counts as the type of its values."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return [o for arm in typing.get_args(annotation) for o in concrete_types(arm)]
    if typing.get_origin(annotation) is Literal:
        return [type(typing.get_args(annotation)[0])]
    return [typing.get_origin(annotation) or annotation]


def check_section(where: str, section: Any) -> None:
    """Raises ConfigError where a field, or one of a nested section, is not what it declares.

    Args:
      where: the prefix of the fields' names in messages, as in 'model.'.
    """
    kinds = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        name, value, kind = f'{where}{field.name}', getattr(section, field.name), kinds[field.name]
        if 'bounds' in field.metadata:
            if expected := _expected(value, kind, field.metadata['bounds']):
                optional = ', or None' if type(None) in concrete_types(kind) else ''
                raise ConfigError(f'{name}={_shown(value)} must {expected}{optional}')
        elif isinstance(value, kind):
            check_section(f'{name}.', value)
        else:
            raise ConfigError(f'{name}={_shown(value)} must be a {kind.__name__}')


def _expected(value: Any, kind: Any, bounds: Bounds) -> str | None:
    """What a field must do that `value` does not, as in 'be at least 0'; None if it is valid."""
    several, options = typing.get_origin(kind) is tuple, concrete_types(kind)
    if value is None and type(None) in options:
        return None
    if several and isinstance(value, tuple):
        options = concrete_types(typing.get_args(kind)[0])
    entries, entry_type = value if several and isinstance(value, tuple) else (value,), options[0]
    if not all(_is_a(entry_type, entry) for entry in entries):
        name = entry_type.__name__
        return f'hold {name} values' if several else f'be of type {name}'
    literals = _literals(kind)
    if literals and not set(entries) <= set(literals):
        return f'{"hold" if several else "be one of"} {", ".join(literals)}'
    if not all(bounds.admit(entry_type, entry) for entry in entries):
        return f'{"hold values that are" if several else "be"} {bounds.words(entry_type)}'
    if bounds.filled and not entries:
        return 'hold at least one value, none twice'
    return 'hold no value twice' if len(set(entries)) < len(entries) else None


def _literals(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    return tuple(v for arm in typing.get_args(annotation) for v in _literals(arm))


def _is_a(kind: type, value: Any) -> bool:
    """Whether `value` is of this type; an int counts as a float, True and False as no number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _shown(value: Any) -> str:
    """The value in a message, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python prints integers of up to 4,300 digits
        return 'an integer of over 4,300 digits'
    return text if len(text) <= 200 else f'{text[:100]}...{text[-50:]}'


def _number(end: Any) -> str:
    power = isinstance(end, int) and end >= 2**16 and end.bit_count() == 1
    return f'2**{end.bit_length() - 1}' if power else f'{end}'
