"""Settings that name code, with options: `low_rank(rank=8)`, `my_package.my_file:MyScore`."""

import ast
import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from qkattn.config.imports import describe_failure, import_object
from qkattn.errors import ConfigError

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
    """The object that a setting names, and the options behind the name.

    `resolve('low_rank(rank=8)', SCORES, 'score')` returns (LowRank, {'rank': 8}).

    Args:
      text: a key of `known` or an import path, either perhaps with options.
      known: the registered objects by name.
      field: the setting that holds `text`, for errors.
      needs: what an imported object has to be, in words.
      fits: whether an imported object is that.
      call: the callable whose keyword-only parameters are the options of an object; by default the
        object itself.
      error: the exception to raise.

    Raises `error` for a malformed or unknown name, a module that cannot be imported, an imported
    object of another kind, and an option that the object does not take.
    """
    name, options = parse_call(text, field, error)
    if ':' in name:
        target = import_object(name, field, error)
        if not fits(target):
            raise error(f'{field}={name!r} is not {needs}')
    elif name in known:
        target = known[name]
    else:
        raise error(_unknown_name(name, known, field))
    if options:
        accepted = options_of(call(target))
        for option in options:
            if option not in accepted:
                names = ', '.join(accepted) or 'none'
                raise error(f'{name} has no option {option!r}; it takes {names}')
    return target, options


def _unknown_name(name: str, known: Mapping[str, Any], field: str) -> str:
    """What is wrong with a name that is neither registered nor an import path."""
    if not known:
        return f'{field}={name!r} must be an import path, as in package.module:name'
    near = difflib.get_close_matches(name, known, n=1)
    hint = f', did you mean {near[0]!r}?' if near else ';'
    return (
        f'unknown {field} {name!r}{hint} known: {", ".join(known)}, '
        'or an import path package.module:name'
    )


def parse_call(
    text: str, field: str, error: type[ValueError] = ConfigError
) -> tuple[str, dict[str, Any]]:
    """Splits 'name(option=literal, ...)' into the name and its options.

    Raises `error`, which names the setting `field`, for anything that is not written so.
    """
    name, parenthesis, _ = text.partition('(')
    if not parenthesis:
        return name, {}
    try:
        return name, _keyword_literals(text[len(name) :])
    except (SyntaxError, ValueError, TypeError):
        form = 'name(option=value, ...) with literal values'
        raise error(f'{field}={text!r} must be written {form}') from None


def _keyword_literals(arguments: str) -> dict[str, Any]:
    """The arguments of '(a=1, b=(2, 3))' by name; any of several exceptions for other text."""
    call = ast.parse('f' + arguments, mode='eval').body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError('not one call with keyword arguments alone')
    options = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in options:
            raise ValueError('an argument is given twice, or as **mapping')
        options[keyword.arg] = ast.literal_eval(keyword.value)
    return options


def options_of(target: Callable[..., Any]) -> dict[str, Any]:
    """The options of a class or function and their defaults: its keyword-only parameters.

    The parameter `key`, from which random numbers are drawn, is no option.
    """
    function = target.__init__ if inspect.isclass(target) else target
    options = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name != 'key':
            options[parameter.name] = parameter.default
    return options


def takes(*arguments: str) -> Callable[[Any], bool]:
    """A check for `resolve`: whether an object can be called with these positional arguments."""

    def fits(target: Any) -> bool:
        try:
            inspect.signature(target).bind(*arguments)
        except (TypeError, ValueError):
            return False
        return True

    return fits


def called(field: str, text: str, call: Callable[[], T]) -> T:
    """The result of a call into code that the setting `field` names with `text`.

    Raises ConfigError in place of the code's exception, with the line that raises it.
    """
    try:
        return call()
    except ConfigError:
        raise
    except Exception as failure:
        raise ConfigError(f'{field}={text!r} fails, {describe_failure(failure)}') from failure
