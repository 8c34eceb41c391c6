"""The notations `name(option=value, ...)`, `package.module:name` and `score/value`."""

import ast
import difflib
import hashlib
import importlib
import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from qkattn.errors import ConfigError, SpecError

T = TypeVar('T')


def resolve(
    text: str,
    known: Mapping[str, Any],
    field: str,
    *,
    needs: str = 'a class or function',
    fits: Callable[[Any], bool] = callable,
    call: Callable[[Any], Callable[..., Any]] = lambda target: target,
    error: type[ValueError] = ConfigError,
) -> tuple[Any, dict[str, Any]]:
    """The object that `text` names, a key of `known` or an import path, and the options behind it.

    `text` is 'name', 'package.module:name', or either with options, as in 'low_rank(rank=8)', and
    `field` the setting that holds it. An imported object has to be what `needs` says and `fits`
    checks; `call` gives the callable whose keyword-only parameters are the options. Raises `error`
    for a malformed or unknown name, a module that cannot be imported, an object of another kind, or
    an option that it does not take.
    """
    name, options = parse_call(text, field, error)
    if ':' in name:
        target = _import(name, field, error)
        if not fits(target):
            raise error(f'{field}={name!r} is not {needs}')
    elif name in known:
        target = known[name]
    elif not known:
        raise error(f'{field}={name!r} must be an import path, as in package.module:name')
    else:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f', did you mean {near[0]!r}?' if near else ';'
        raise error(
            f'unknown {field} {name!r}{hint} known: {", ".join(known)}, '
            'or an import path package.module:name'
        )
    accepted = options_of(call(target)) if options else ()
    for option in options:
        if option not in accepted:
            names = ', '.join(accepted) or 'none'
            raise error(f'{name} has no option {option!r}; it takes {names}')
    return target, options


def called(field: str, text: str, call: Callable[[], T]) -> T:
    """The result of a call into code that `text` names; ConfigError in place of an exception."""
    try:
        return call()
    except ConfigError:
        raise
    except Exception as failure:
        raise ConfigError(f'{field}={text!r} fails, {_at(failure)}') from failure


def options_of(target: Callable[..., Any]) -> dict[str, Any]:
    """The options of a class or function, its keyword-only parameters, and their defaults."""
    function = target.__init__ if inspect.isclass(target) else target
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != 'key'}


def takes(*arguments: str) -> Callable[[Any], bool]:
    """A check for `resolve`: whether an object can be called with these positional arguments."""

    def fits(target: Any) -> bool:
        try:
            return bool(inspect.signature(target).bind(*arguments))
        except (TypeError, ValueError):
            return False

    return fits


def _source_sha256(path: str) -> str | None:
    """The sha256 of the file of the imported module of an import path; None if it has no file."""
    file = getattr(sys.modules[path.partition(':')[0]], '__file__', None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None


def import_paths(values: Any) -> list[str]:
    """The import paths in a config as JSON, without their options."""
    # Sets of these catalogues are written alike.
    strings = re.findall(r'[^\W\d][\w.]*:[^\W\d]\w*', json.dumps(values, ensure_ascii=False))
    return sorted({path for path in strings if not path.startswith(('tfds:', 'hf:'))})


def imported(values: Any) -> dict[str, str | None]:
    """The import paths of imported modules in a config as JSON, and the sha256 of their files."""
    paths = import_paths(values)
    return {path: _source_sha256(path) for path in paths if path.split(':')[0] in sys.modules}


def require_named(values: Any, named: Collection[str], where: object, remedy: str) -> None:
    """Raises ConfigError for an import path in `values`, read from `where`, that is not `named`.

    What a file names is data, and is imported only where the user names it too; `remedy` says how,
    with {} for the path.
    """
    for path in import_paths(values):
        if path not in named:
            raise ConfigError(
                f'{where} names {path}, code that is imported only if you name it too; '
                f'{remedy.format(path)}'
            )


def digest(text: str) -> str:
    """Identifies the object and the options of an import path: its text and its source file."""
    return hashlib.sha256(f'{text} {_source_sha256(text)}'.encode()).hexdigest()[:12]


def parse_call(
    text: str, field: str, error: type[ValueError] = ConfigError
) -> tuple[str, dict[str, Any]]:
    """Splits 'name(option=literal, ...)' into name and options; `error` names the `field`."""
    name, parenthesis, _ = text.partition('(')
    if not parenthesis:
        return name, {}
    try:
        call = ast.parse('f' + text[len(name) :], mode='eval').body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)) or call.args:
            raise ValueError
        options = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords if k.arg}
        if len(options) < len(call.keywords):  # one twice, or **
            raise ValueError
        return name, options
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        form = 'name(option=value, ...) with literal values'
        raise error(f'{field}={text!r} must be written {form}') from None


class Variant(NamedTuple):
    """One way to write attention, as text `score/value`; each may have options."""

    score: str
    value: str

    @classmethod
    def parse(cls, text: str) -> 'Variant':
        """The variant of 'score/value'; SpecError where it is written otherwise."""
        score, slash, value = text.partition('/')
        if not slash:
            raise SpecError(f'variant {text!r} must be written score/value, e.g. qk/vo')
        return cls(score, value)

    def __str__(self) -> str:
        return f'{self.score}/{self.value}'


def _at(failure: Exception) -> str:
    frames = traceback.extract_tb(failure.__traceback__)
    # Where a library refuses what it is given, the line that calls it.
    last = next((f for f in reversed(frames) if 'site-packages' not in f.filename), frames[-1])
    reason = ' '.join(str(failure).split())
    return f'{type(failure).__name__} in {last.filename}, line {last.lineno}: {reason}'


def _import(path: str, field: str, error: type[ValueError]) -> Any:
    module, _, name = path.partition(':')
    if not all(part.isidentifier() for part in [*module.split('.'), name]):
        raise error(f'{field}={path!r} must be written package.module:name to be an import path')
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise error(f'{field}={path!r}: no module named {missing.name!r}') from missing
    except Exception as failure:
        raise error(f'{field}={path!r}: {module} cannot be imported, {_at(failure)}') from failure
    if not hasattr(imported, name):
        near = difflib.get_close_matches(name, vars(imported), n=1)
        hint = f'; did you mean {near[0]!r}?' if near else ''
        raise error(f'{field}={path!r}: {module} has no {name!r}{hint}')
    return getattr(imported, name)


def split_pattern(text: str) -> list[str]:
    """'qk/vo,low_rank(rank=8)/vo' -> the variants between the commas outside of parentheses."""
    parts, depth = [''], 0
    for character in text:
        depth += (character == '(') - (character == ')')
        if character == ',' and not depth:
            parts.append('')
        else:
            parts[-1] += character
    return [parts[0], *(part.lstrip() for part in parts[1:])]


def load_extra(package: str, extra: str) -> ModuleType:
    """Imports a package of an extra of pyproject.toml; ConfigError says how to install it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as missing:
        install = f"pip install -e '.[{extra}]'"
        raise ConfigError(f'{extra} needs the package {missing.name}: {install}') from missing
