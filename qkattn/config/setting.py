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
    texts are Unicode without null characters, of less than 4,096 bytes; a path is one line that is
    not empty, each part of less than 256 bytes. A tuple that is filled has an entry; none has one
    twice.
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
            try:
                parts = [part.encode() for part in value.split('/')]
            except UnicodeEncodeError:  # half of a surrogate pair
                return False
            is_path = len(value.splitlines()) == 1 and max(map(len, parts)) < PART_END
            sound = len(b'/'.join(parts)) < TEXT_END and '\0' not in value
            return sound and (is_path or not self.path)
        most, end = FLOAT_MAX if self.most is None else self.most, self._end(kind)
        return kind is bool or (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (end is None or value < end)
            and -most <= value <= most
        )

    def _end(self, kind: type) -> float | None:
        return INT_END if kind is int and self.most is self.below is None else self.below

    def words(self, kind: type) -> str:
        """What is valid for values of type `kind`, e.g. 'at least 0 and below 1'."""
        if kind is str:
            words = ['Unicode text without null characters', f'below {TEXT_END} bytes']
            return ', '.join(
                words + [f'one line that is not empty, parts below {PART_END} bytes'] * self.path
            )
        low, end = {'at least': self.least, 'above': self.above}, self._end(kind)
        words = []
        for word, bound in (low | {'at most': self.most, 'below': end}).items():
            power = isinstance(bound, int) and bound >= 2**16 and bound.bit_count() == 1
            number = f'2**{int(bound).bit_length() - 1}' if power else f'{bound}'
            words += [] if bound is None else [f'{word} {number}']
        return ' and '.join(words + ['finite in float32'] * (self.most is end is None))


@dataclasses.dataclass(frozen=True)
class Setting:
    """A field of the settings: its annotation, default, description and bounds."""

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
    """Raises ConfigError if a field, nested or not, is invalid; `where` ('model.') prefixes it."""
    kinds = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        name, value, kind = f'{where}{field.name}', getattr(section, field.name), kinds[field.name]
        if 'bounds' not in field.metadata and isinstance(value, kind):
            check_section(f'{name}.', value)
            continue
        expected: str | None = f'be a {getattr(kind, "__name__", "")}'
        if 'bounds' in field.metadata:
            expected = _expected(value, kind, field.metadata['bounds'])
        if expected:
            try:
                shown = repr(value)
            except ValueError:  # Python prints integers of up to 4,300 digits
                shown = 'an integer of over 4,300 digits'
            shown = shown if len(shown) <= 200 else f'{shown[:100]}...{shown[-50:]}'
            optional = ', or None' if type(None) in concrete_types(kind) else ''
            raise ConfigError(f'{name}={shown} must {expected}{optional}')


def _expected(value: Any, kind: Any, bounds: Bounds) -> str | None:
    """What a field must do that `value` does not, as in 'be at least 0'; None if it is valid."""
    several, options = typing.get_origin(kind) is tuple, concrete_types(kind)
    if value is None and type(None) in options:
        return None
    entries = (value,)
    if several and isinstance(value, tuple):
        entries, options = value, concrete_types(typing.get_args(kind)[0])
    for entry in entries:  # an int counts as a float, True and False as no number
        types_of_entry = (int, float) if options[0] is float else options[0]
        if isinstance(entry, bool) != (options[0] is bool) or not isinstance(entry, types_of_entry):
            name = options[0].__name__
            return f'hold {name} values' if several else f'be of type {name}'
    literals = _literals(kind)
    if literals and not set(entries) <= set(literals):
        return f'{"hold only" if several else "be one of"} {", ".join(literals)}'
    if not all(bounds.admit(options[0], entry) for entry in entries):
        return f'{"hold values that are" if several else "be"} {bounds.words(options[0])}'
    if bounds.filled and not entries:
        return 'hold at least one value, none twice'
    return 'hold no value twice' if len(set(entries)) < len(entries) else None


def _literals(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    return tuple(v for arm in typing.get_args(annotation) for v in _literals(arm))
