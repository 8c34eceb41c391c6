"""How a setting is declared and checked.

    num_heads: int = setting(4, 'N, query heads.', least=1, most=2**14)

A class of settings is a frozen dataclass. Its fields are settings, or further classes of settings,
which are called its sections. `check_section` raises an error for the first field whose value is
not valid.

Settings are checked once, where they come from the user: when a config is read, or when a model or
an attention layer is built from settings that were written in Python. Settings that have passed get
the attribute PASSED and are not checked again.
"""

import dataclasses
import operator
import os
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from qkattn.config.imports import import_object
from qkattn.errors import ConfigError

# Integers are below this: sizes, steps and seeds are int32 in compiled programs.
INT_END = 2**31
# The largest float32: rates and factors are float32 in compiled programs.
FLOAT_MAX = 3.4028234e38
# Texts and paths have fewer bytes than this, the limit of Linux for a path.
TEXT_END = 4096
# Each part of a path has fewer bytes than this, the limit of Linux and macOS.
PART_END = 256
# An error shows a refused value of more characters than this without its middle.
SHOWN = 200
# Of a longer value, an error shows this many characters of its start and of its end.
_SHOWN_START = 100
_SHOWN_END = 50
# The attribute of a frozen object whose fields have been checked.
PASSED = '_passed'

# The comparison of a value with a limit, by the words that describe it.
COMPARISONS = {
    'at least': operator.ge,
    'above': operator.gt,
    'at most': operator.le,
    'below': operator.lt,
}


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The values that a field may hold, besides being of its type.

    The bounds of a tuple apply to each of its entries. An integer without an upper bound must be
    below 2**31, a float without one must be finite in float32. Text must be Unicode without null
    characters and have fewer than 4,096 bytes.
    """

    least: float | None = None  # inclusive
    most: float | None = None  # inclusive
    above: float | None = None  # exclusive
    below: float | None = None  # exclusive
    # Whether text names a file or directory. It must be one line that is not empty, and each part
    # of the path must have fewer than 256 bytes.
    path: bool = False
    # Whether a tuple must have an entry.
    filled: bool = False

    def admit(self, kind: type, value: Any) -> bool:
        """Whether a value of type `kind` is valid."""
        if kind is bool:
            return True
        if kind is str:
            return self._admit_text(value)
        # The value is a number. A limit {'at least': 0} requires that operator.ge(value, 0).
        for words, limit in self._limits(kind).items():
            compare = COMPARISONS[words]
            if not compare(value, limit):
                return False
        return abs(value) <= FLOAT_MAX  # False for NaN, too

    def _admit_text(self, text: str) -> bool:
        """Whether a text, or a path if the setting is one, is valid."""
        encoded = os.fsencode(text)
        if len(encoded) >= TEXT_END or '\0' in text:
            return False
        if not self.path:
            return True
        is_one_line = len(text.splitlines()) == 1
        longest_part = max(len(part) for part in encoded.split(b'/'))
        return is_one_line and longest_part < PART_END

    def _limits(self, kind: type) -> dict[str, float]:
        """Returns the limits of a number of type `kind`, with the keys of COMPARISONS.

        They are {'at least': 0, 'below': 1} for a number x with 0 <= x < 1.
        """
        limits = {
            'at least': self.least,
            'above': self.above,
            'at most': self.most,
            'below': self.below,
        }
        # Every integer has an upper bound, because compiled programs hold it in 32 bits.
        has_upper_bound = self.most is not None or self.below is not None
        if kind is int and not has_upper_bound:
            limits['below'] = INT_END
        return {words: limit for words, limit in limits.items() if limit is not None}

    def describe(self, kind: type) -> str:
        """Returns the valid values of type `kind` in words, such as 'at least 0 and below 1'."""
        if kind is str:
            return self._describe_text()
        limits = self._limits(kind)
        parts = [f'{words} {_number_text(limit)}' for words, limit in limits.items()]
        if 'at most' not in limits and 'below' not in limits:
            parts.append('finite in float32')
        return ' and '.join(parts)

    def _describe_text(self) -> str:
        text = f'Unicode text without null characters, below {TEXT_END} bytes'
        if self.path:
            text += f', one line that is not empty, parts below {PART_END} bytes'
        return text


def _number_text(number: float) -> str:
    """Returns a number as errors print it; a large power of two is written as '2**31'."""
    if isinstance(number, int) and number >= 2**16:
        exponent = number.bit_length() - 1
        if number == 2**exponent:
            return f'2**{exponent}'
    return f'{number}'


@dataclasses.dataclass(frozen=True)
class Setting:
    """A declared setting, for help texts and generated tests."""

    name: str  # with the names of its sections: 'model.d_model'
    kind: Any  # the annotation of the field
    default: Any
    doc: str
    bounds: Bounds
    # Import paths of the registries whose keys the setting may name.
    registries: tuple[str, ...]

    def registered_names(self) -> list[str]:
        """Returns the names that its registries list; empty for a setting without registries.

        The registries are imported.
        """
        names: list[str] = []
        for path in self.registries:
            registry = import_object(path, self.name)
            names += registry
        return names


def setting(default: Any, doc: str, registries: tuple[str, ...] = (), **bounds: Any) -> Any:
    """Declares a dataclass field with a default, a description, and the `Bounds` of its values.

    `registries` are import paths of dicts whose keys the field may name. --help lists the keys.
    """
    metadata = {'doc': doc, 'bounds': Bounds(**bounds), 'registries': registries}
    return dataclasses.field(default=default, metadata=metadata)


def settings(cls: Any, prefix: str = '') -> dict[str, Setting]:
    """Returns the settings of a class and of its sections, by dotted name.

    `prefix` is the beginning of every name, 'model.' for the section model.
    """
    annotations = typing.get_type_hints(cls)
    declared: dict[str, Setting] = {}
    for field in dataclasses.fields(cls):
        name = f'{prefix}{field.name}'
        annotation = annotations[field.name]
        is_section = dataclasses.is_dataclass(annotation)
        if is_section:
            declared |= settings(annotation, f'{name}.')
        else:
            declared[name] = Setting(name, annotation, field.default, **field.metadata)
    return declared


def concrete_types(annotation: Any) -> list[type]:
    """Returns the types that an annotation admits: [int, NoneType] for `int | None`.

    A Literal counts as the type of its values, and `tuple[int, ...]` as tuple.
    """
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        types_of_members: list[type] = []
        for member in arguments:
            types_of_members += concrete_types(member)
        return types_of_members
    if origin is Literal:
        first_value = arguments[0]
        return [type(first_value)]
    return [origin or annotation]


def is_optional(annotation: Any) -> bool:
    """Whether an annotation admits None."""
    return type(None) in concrete_types(annotation)


def check_section(prefix: str, section: Any) -> None:
    """Raises ConfigError for the first invalid field of a section or of the sections in it.

    `prefix` is the beginning of names of fields in the error, 'model.' for the section model. A
    section that has passed before is not checked again.
    """
    if PASSED in vars(section):  # it was checked before
        return
    annotations = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        name = f'{prefix}{field.name}'
        value = getattr(section, field.name)
        annotation: Any = annotations[field.name]
        is_section = dataclasses.is_dataclass(annotation)
        if not is_section:
            _check_value(name, value, annotation, field.metadata['bounds'])
        elif isinstance(value, annotation):
            check_section(f'{name}.', value)
        else:
            raise ConfigError(f'{name}={_shorten_value(value)} must be a {annotation.__name__}')
    vars(section)[PASSED] = True


def _check_value(name: str, value: Any, annotation: Any, bounds: Bounds) -> None:
    """Raises ConfigError unless the setting `name` may hold `value`."""
    if value is None and is_optional(annotation):
        return
    if typing.get_origin(annotation) is tuple:
        requirement = _unmet_requirement_of_tuple(value, typing.get_args(annotation)[0], bounds)
    else:
        requirement = _unmet_requirement(value, annotation, bounds)
    if requirement is None:
        return
    if is_optional(annotation):
        requirement += ', or None'
    raise ConfigError(f'{name}={_shorten_value(value)} must {requirement}')


def _unmet_requirement(value: Any, annotation: Any, bounds: Bounds) -> str | None:
    """Returns the requirement that a value does not meet, e.g. 'be at least 0'; None if valid."""
    kind = concrete_types(annotation)[0]
    if not _has_type(value, kind):
        return f'be of type {kind.__name__}'
    literals = tuple(_literal_values(annotation))
    if literals and value not in literals:
        return f'be one of {", ".join(literals)}'
    if not bounds.admit(kind, value):
        return f'be {bounds.describe(kind)}'
    return None


def _unmet_requirement_of_tuple(value: Any, entry_annotation: Any, bounds: Bounds) -> str | None:
    """Returns the requirement that a tuple does not meet, 'hold no value twice'; None if valid.

    `entry_annotation` is the type of an entry, and `bounds` are those of each entry.
    """
    kind = concrete_types(entry_annotation)[0]
    if not isinstance(value, tuple):
        return f'be a tuple of {kind.__name__} values'
    if not all(_has_type(entry, kind) for entry in value):
        return f'hold {kind.__name__} values'
    literals = tuple(_literal_values(entry_annotation))
    if literals and not set(value) <= set(literals):
        return f'hold only {", ".join(literals)}'
    if not all(bounds.admit(kind, entry) for entry in value):
        return f'hold values that are {bounds.describe(kind)}'
    if bounds.filled and not value:
        return 'hold at least one value, none twice'
    if len(set(value)) < len(value):
        return 'hold no value twice'
    return None


def _has_type(value: Any, kind: type) -> bool:
    """Whether a value is of type `kind`: an int also fits float, a bool only fits bool."""
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float)
    return isinstance(value, kind)


def _literal_values(annotation: Any) -> Iterator[Any]:
    """Yields the values that the Literals in an annotation allow; none without a Literal."""
    if typing.get_origin(annotation) is Literal:
        yield from typing.get_args(annotation)
        return
    for member in typing.get_args(annotation):
        yield from _literal_values(member)


def _shorten_value(value: Any) -> str:
    """Returns a value as an error shows it; the middle of a long value is left out."""
    text = repr(value)
    if len(text) <= SHOWN:
        return text
    return f'{text[:_SHOWN_START]}...{text[-_SHOWN_END:]}'
