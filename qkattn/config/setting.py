"""Declares and checks settings.

    num_heads: int = setting(4, 'N, query heads.', least=1, most=2**14)

A class of settings is a frozen dataclass. Its fields are settings or other such classes, called
sections. `check_section` raises an error for the first invalid field.
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

# The exclusive upper bound of integers, which are int32 in compiled programs.
INT_END = 2**31
# The largest float32, as floats are float32 in compiled programs.
FLOAT_MAX = 3.4028234e38
# The exclusive upper bound of the bytes of a text or path.
TEXT_END = 4096
# The exclusive upper bound of the bytes of each part of a path.
PART_END = 256
# Error messages show at most this many characters of a value,
SHOWN = 200
# or this many of the start and the end of a longer value.
_SHOWN_START = 100
_SHOWN_END = 50
# Marks a frozen object whose fields have been checked, so that they are not checked again.
PASSED = '_passed'

# The comparisons of a number with a limit, by their name in error messages.
COMPARISONS = {
    'at least': operator.ge,
    'above': operator.gt,
    'at most': operator.le,
    'below': operator.lt,
}


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The valid values of a field, in addition to its type.

    For a tuple, the bounds apply to each entry. All integers are below 2**31, all floats are finite
    in float32, and all texts are Unicode without null characters and below 4,096 bytes.
    """

    least: float | None = None  # inclusive
    most: float | None = None  # inclusive
    above: float | None = None  # exclusive
    below: float | None = None  # exclusive
    # Whether a text is a path: one line that is not empty, with parts below 256 bytes.
    path: bool = False
    # Whether a tuple needs at least one entry.
    filled: bool = False

    def admit(self, kind: type, value: Any) -> bool:
        """Returns whether `value`, which has type `kind`, is within the bounds."""
        if kind is bool:
            return True  # both bools are valid
        if kind is str:
            return self._admit_text(value)
        limits = self._limits(kind)  # such as {'at least': 0, 'below': 2**31}
        for comparison, limit in limits.items():
            compare = COMPARISONS[comparison]
            if not compare(value, limit):
                return False
        is_finite = abs(value) <= FLOAT_MAX  # False for NaN
        return is_finite

    def _admit_text(self, text: str) -> bool:
        """Returns whether a text is valid."""
        encoded = os.fsencode(text)
        if len(encoded) >= TEXT_END or '\0' in text:
            return False
        if not self.path:
            return True
        is_one_line = len(text.splitlines()) == 1
        longest_part = max(len(part) for part in encoded.split(b'/'))
        return is_one_line and longest_part < PART_END

    def _limits(self, kind: type) -> dict[str, float]:
        """Returns the limits of a number of type `kind`, such as {'at least': 0, 'below': 1}."""
        limits = {
            'at least': self.least,
            'above': self.above,
            'at most': self.most,
            'below': self.below,
        }
        has_upper_bound = self.most is not None or self.below is not None
        if kind is int and not has_upper_bound:
            limits['below'] = INT_END
        return {comparison: limit for comparison, limit in limits.items() if limit is not None}

    def describe(self, kind: type) -> str:
        """Describes the valid values of type `kind`, such as 'at least 0 and below 1'."""
        if kind is str:
            return self._describe_text()
        limits = self._limits(kind)
        parts = [f'{comparison} {_number_text(limit)}' for comparison, limit in limits.items()]
        has_upper_bound = 'at most' in limits or 'below' in limits
        if not has_upper_bound:
            parts.append('finite in float32')
        return ' and '.join(parts)

    def _describe_text(self) -> str:
        text = f'Unicode text without null characters, below {TEXT_END} bytes'
        if self.path:
            text += f', one line that is not empty, parts below {PART_END} bytes'
        return text


def _number_text(number: float) -> str:
    """Returns a number as text, with large powers of two as '2**31'."""
    if isinstance(number, int) and number >= 2**16:
        exponent = number.bit_length() - 1
        if number == 2**exponent:
            return f'2**{exponent}'
    return f'{number}'


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting as declared, for help texts and generated tests."""

    name: str  # the dotted name, such as 'model.d_model'
    kind: Any  # the type annotation
    default: Any
    doc: str
    bounds: Bounds
    # Import paths of dicts whose keys are valid values.
    registries: tuple[str, ...]

    def registered_names(self) -> list[str]:
        """Imports the registries and returns their keys."""
        names: list[str] = []
        for path in self.registries:
            registry = import_object(path, self.name)
            names += registry.keys()
        return names


def setting(default: Any, doc: str, registries: tuple[str, ...] = (), **bounds: Any) -> Any:
    """Declares a dataclass field that is a setting.

    Args:
        default: The default of the field.
        doc: The description in --help.
        registries: Import paths of dicts whose keys are valid values. --help lists the keys.
        **bounds: The arguments of `Bounds`.
    """
    metadata = {'doc': doc, 'bounds': Bounds(**bounds), 'registries': registries}
    return dataclasses.field(default=default, metadata=metadata)


def settings(cls: Any, prefix: str = '') -> dict[str, Setting]:
    """Returns the settings of a class and its sections, by dotted name such as 'model.d_model'.

    `prefix` is put before each name.
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
            # The metadata are `doc`, `bounds` and `registries`.
            declared[name] = Setting(name, annotation, field.default, **field.metadata)
    return declared


def concrete_types(annotation: Any) -> list[type]:
    """Returns the types of an annotation's values: [int, NoneType] for `int | None`.

    For example, [str] for `Literal['a', 'b']` and [tuple] for `tuple[int, ...]`.
    """
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        all_types: list[type] = []
        for member in arguments:
            all_types += concrete_types(member)
        return all_types
    if origin is Literal:
        first_value = arguments[0]
        return [type(first_value)]
    if origin is not None:  # a generic type, such as tuple[int, ...]
        return [origin]
    return [annotation]


def is_optional(annotation: Any) -> bool:
    """Returns whether an annotation admits None."""
    return type(None) in concrete_types(annotation)


def check_section(prefix: str, section: Any) -> None:
    """Raises ConfigError for the first invalid field of a section or its sections.

    A section that has passed is not checked again.

    Args:
        prefix: The prefix of field names in error messages, such as 'model.' for the section model.
        section: The section.
    """
    was_checked = PASSED in vars(section)
    if was_checked:
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
    vars(section)[PASSED] = True  # a frozen dataclass refuses setattr


def _check_value(name: str, value: Any, annotation: Any, bounds: Bounds) -> None:
    """Raises ConfigError if `value` is not valid for the setting `name`."""
    if value is None and is_optional(annotation):
        return
    if typing.get_origin(annotation) is tuple:
        entry_annotation = typing.get_args(annotation)[0]
        requirement = _unmet_requirement_of_tuple(value, entry_annotation, bounds)
    else:
        requirement = _unmet_requirement(value, annotation, bounds)
    if requirement is None:
        return
    if is_optional(annotation):
        requirement += ', or None'
    raise ConfigError(f'{name}={_shorten_value(value)} must {requirement}')


def _unmet_requirement(value: Any, annotation: Any, bounds: Bounds) -> str | None:
    """Returns what a value must do to be valid, such as 'be at least 0'; None if it is valid."""
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
    """Returns what a tuple must do to be valid, such as 'hold no value twice'; None if it is valid.

    `entry_annotation` and `bounds` are for each entry.
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
    """Returns whether a value is of type `kind`. An int is a float, but a bool is not an int."""
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float)
    return isinstance(value, kind)


def _literal_values(annotation: Any) -> Iterator[Any]:
    """Yields the values of all Literals in an annotation."""
    if typing.get_origin(annotation) is Literal:
        yield from typing.get_args(annotation)
        return
    for member in typing.get_args(annotation):
        yield from _literal_values(member)


def _shorten_value(value: Any) -> str:
    """Returns a value as text, without the middle of a long value."""
    text = repr(value)
    if len(text) <= SHOWN:
        return text
    return f'{text[:_SHOWN_START]}...{text[-_SHOWN_END:]}'
