"""How a setting is declared and checked.

    num_heads: int = setting(4, 'N, query heads.', least=1, most=2**14)

A class of settings is a frozen dataclass whose fields are such settings or further classes of
settings, its sections. `check_section` refuses the first field whose value is not valid.

Settings are checked once, where they enter: a run or a study where its config is read, a model or
an attention layer where it is built from settings of one's own. Frozen settings that have passed
carry the mark PASSED, so that whatever is built from them later takes them as they are.
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

# Sizes, steps and seeds are int32 in compiled programs.
INT_END = 2**31
# Rates and factors are float32 in compiled programs.
FLOAT_MAX = 3.4028234e38
# Bytes in a path and in each part of it: the limits of Linux and macOS.
TEXT_END = 4096
PART_END = 256
# Characters of a refused value that an error shows whole.
SHOWN = 200
# The attribute of a frozen object whose fields have been checked.
PASSED = '_passed'

COMPARISONS = {
    'at least': operator.ge,
    'above': operator.gt,
    'at most': operator.le,
    'below': operator.lt,
}


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The values that a field may hold, beyond its type.

    Bounds of a tuple hold for each of its entries. Integers without an upper bound are below 2**31,
    floats without one are finite in float32. Text is Unicode without null characters, of fewer than
    4,096 bytes.
    """

    least: float | None = None  # inclusive
    most: float | None = None  # inclusive
    above: float | None = None  # exclusive
    below: float | None = None  # exclusive
    # Text that names a file or directory: one line that is not empty, each part of the path of
    # fewer than 256 bytes.
    path: bool = False
    # A tuple that has at least one entry.
    filled: bool = False

    def admit(self, kind: type, value: Any) -> bool:
        """Whether `value`, which is of type `kind`, is valid."""
        if kind is bool:
            return True
        if kind is str:
            return self._admit_text(value)
        for words, limit in self._limits(kind).items():
            if not COMPARISONS[words](value, limit):
                return False
        return abs(value) <= FLOAT_MAX  # False for NaN

    def _admit_text(self, text: str) -> bool:
        encoded = os.fsencode(text)
        if len(encoded) >= TEXT_END or '\0' in text:
            return False
        if not self.path:
            return True
        is_one_line = len(text.splitlines()) == 1
        longest_part = max(len(part) for part in encoded.split(b'/'))
        return is_one_line and longest_part < PART_END

    def _limits(self, kind: type) -> dict[str, float]:
        """The limits of a number by the words that describe them, as in {'at least': 0}."""
        limits = {
            'at least': self.least,
            'above': self.above,
            'at most': self.most,
            'below': self.below,
        }
        if kind is int and self.most is None and self.below is None:
            limits['below'] = INT_END
        return {words: limit for words, limit in limits.items() if limit is not None}

    def describe(self, kind: type) -> str:
        """The valid values of type `kind` in words, e.g. 'at least 0 and below 1'."""
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
    """A number as errors print it; large powers of two as such, e.g. '2**31'."""
    if isinstance(number, int) and number >= 2**16 and number.bit_count() == 1:
        return f'2**{number.bit_length() - 1}'
    return f'{number}'


@dataclasses.dataclass(frozen=True)
class Setting:
    """A declared setting, as help texts and generated tests read it."""

    name: str  # with its sections: 'model.d_model'
    kind: Any  # the annotation of the field
    default: Any
    doc: str
    bounds: Bounds
    # Import paths of the registries whose keys the setting may name.
    registries: tuple[str, ...]

    def registered_names(self) -> list[str]:
        """The names in its registries, which are imported; empty for a setting without any."""
        names: list[str] = []
        for path in self.registries:
            names += import_object(path, self.name)
        return names


def setting(default: Any, doc: str, registries: tuple[str, ...] = (), **bounds: Any) -> Any:
    """A dataclass field with a default, a description, and the `Bounds` of its values.

    `registries` are import paths of the dicts whose keys it may name; --help lists the keys.
    """
    metadata = {'doc': doc, 'bounds': Bounds(**bounds), 'registries': registries}
    return dataclasses.field(default=default, metadata=metadata)


def settings(cls: Any, prefix: str = '') -> dict[str, Setting]:
    """The settings of a class and of its sections, by dotted name."""
    annotations = typing.get_type_hints(cls)
    declared: dict[str, Setting] = {}
    for field in dataclasses.fields(cls):
        name = f'{prefix}{field.name}'
        annotation = annotations[field.name]
        if _is_section(annotation):
            declared |= settings(annotation, f'{name}.')
        else:
            declared[name] = Setting(name, annotation, field.default, **field.metadata)
    return declared


def concrete_types(annotation: Any) -> list[type]:
    """The types that an annotation admits: [int, NoneType] for `int | None`.

    A Literal counts as the type of its values, `tuple[int, ...]` as tuple.
    """
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        members: list[type] = []
        for member in typing.get_args(annotation):
            members += concrete_types(member)
        return members
    if origin is Literal:
        return [type(typing.get_args(annotation)[0])]
    return [origin or annotation]


def is_optional(annotation: Any) -> bool:
    """Whether an annotation admits None."""
    return type(None) in concrete_types(annotation)


def check_section(prefix: str, section: Any) -> None:
    """Raises ConfigError for the first invalid field of a section or of the sections in it.

    `prefix` is what names of fields begin with in the error, 'model.' for the section model. A
    section that has passed before is not checked again.
    """
    if PASSED in vars(section):
        return
    annotations = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        name = f'{prefix}{field.name}'
        value = getattr(section, field.name)
        annotation: Any = annotations[field.name]
        if not _is_section(annotation):
            _check_value(name, value, annotation, field.metadata['bounds'])
        elif isinstance(value, annotation):
            check_section(f'{name}.', value)
        else:
            raise ConfigError(f'{name}={_shown(value)} must be a {annotation.__name__}')
    vars(section)[PASSED] = True


def _is_section(annotation: Any) -> bool:
    """Whether a field holds settings of its own rather than a value."""
    return dataclasses.is_dataclass(annotation)


def _check_value(name: str, value: Any, annotation: Any, bounds: Bounds) -> None:
    """Raises ConfigError unless the setting `name` may hold `value`."""
    if value is None and is_optional(annotation):
        return
    if typing.get_origin(annotation) is tuple:
        requirement = _unmet_by_tuple(value, typing.get_args(annotation)[0], bounds)
    else:
        requirement = _unmet_by_value(value, annotation, bounds)
    if requirement is None:
        return
    if is_optional(annotation):
        requirement += ', or None'
    raise ConfigError(f'{name}={_shown(value)} must {requirement}')


def _unmet_by_value(value: Any, annotation: Any, bounds: Bounds) -> str | None:
    """What a value must do that it does not, e.g. 'be at least 0'; None if it is valid."""
    kind = concrete_types(annotation)[0]
    if not _has_type(value, kind):
        return f'be of type {kind.__name__}'
    literals = tuple(_literals(annotation))
    if literals and value not in literals:
        return f'be one of {", ".join(literals)}'
    if not bounds.admit(kind, value):
        return f'be {bounds.describe(kind)}'
    return None


def _unmet_by_tuple(value: Any, entry_annotation: Any, bounds: Bounds) -> str | None:
    """As `_unmet_by_value`, for a field that holds a tuple."""
    kind = concrete_types(entry_annotation)[0]
    if not isinstance(value, tuple):
        return f'be a tuple of {kind.__name__} values'
    if not all(_has_type(entry, kind) for entry in value):
        return f'hold {kind.__name__} values'
    literals = tuple(_literals(entry_annotation))
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
    """Whether a value has a type; an int counts as a float, True and False as no number."""
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float)
    return isinstance(value, kind)


def _literals(annotation: Any) -> Iterator[Any]:
    """The values of the Literals in an annotation; nothing for one without a Literal."""
    if typing.get_origin(annotation) is Literal:
        yield from typing.get_args(annotation)
        return
    for member in typing.get_args(annotation):
        yield from _literals(member)


def _shown(value: Any) -> str:
    """The value as an error shows it, cut in the middle where it is long."""
    text = repr(value)
    if len(text) <= SHOWN:
        return text
    return f'{text[:100]}...{text[-50:]}'
