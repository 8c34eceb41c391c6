"""Settings that name code, with options: `low_rank(rank=8)`, `my_package.my_file:MyScore`."""

import ast
import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from qkattn.config.imports import describe_failure, import_object
from qkattn.errors import ConfigError, ReadError

T = TypeVar('T')


def resolve(
    text: str,
    known: Mapping[str, Any],
    field: str,
    *,
    needs: str = 'a class or function',
    is_valid: Callable[[Any], bool] = callable,
    call: Callable[[Any], Callable[..., Any]] = lambda target: target,
    error: type[ValueError] = ConfigError,
) -> tuple[Any, dict[str, Any]]:
    """Returns the object that a setting names, and its options.

    For example, `resolve('low_rank(rank=8)', SCORES, 'score')` returns (LowRank, {'rank': 8}).

    Args:
        text: A registered name or an import path, with options in parentheses if there are any.
        known: The registered objects by name.
        field: The name of the setting, for error messages.
        needs: What an imported object must be, for error messages.
        is_valid: Checks an imported object.
        call: Maps the object to the class or function that takes the options. By default, this is
            the object itself.
        error: The exception class to raise.

    Returns:
        The object and its options.

    Raises:
        error: The name is malformed or unknown, the import fails, or the object is not valid or
            does not take the options.
    """
    name, options = parse_call(text, field, error)
    if ':' in name:
        target = import_object(name, field, error)
        if not is_valid(target):
            raise error(f'{field}={name!r} is not {needs}')
    elif name in known:
        target = known[name]
    else:
        raise error(_unknown_name_message(name, known, field))

    if options:
        function_with_options = call(target)
        accepted_options = options_of(function_with_options)
        for option in options:
            if option not in accepted_options:
                names = ', '.join(accepted_options) or 'none'
                raise error(f'{name} has no option {option!r}; it takes {names}')
    return target, options


def _unknown_name_message(name: str, known: Mapping[str, Any], field: str) -> str:
    """Returns the error message for a name that is not in `known`."""
    if not known:
        return f'{field}={name!r} must be an import path, as in package.module:name'
    close_names = difflib.get_close_matches(name, known, n=1)
    hint = f', did you mean {close_names[0]!r}?' if close_names else ';'
    return (
        f'unknown {field} {name!r}{hint} known: {", ".join(known)}, '
        'or an import path package.module:name'
    )


def parse_call(
    text: str, field: str, error: type[ValueError] = ConfigError
) -> tuple[str, dict[str, Any]]:
    """Parses a name with options: 'low_rank(rank=8)' -> ('low_rank', {'rank': 8}).

    Raises:
        error: The value `text` of the setting `field` has another form.
    """
    name, parenthesis, _ = text.partition('(')
    if not parenthesis:
        return name, {}
    arguments = text[len(name) :]  # such as '(rank=8)'
    try:
        return name, _keyword_literals(arguments)
    except (SyntaxError, ValueError, TypeError):
        form = 'name(option=value, ...) with literal values'
        raise error(f'{field}={text!r} must be written {form}') from None


def _keyword_literals(arguments: str) -> dict[str, Any]:
    """Parses keyword arguments: '(a=1, b=(2, 3))' -> {'a': 1, 'b': (2, 3)}.

    Raises:
        SyntaxError, ValueError, TypeError: The text has another form.
    """
    call = ast.parse(f'f{arguments}', mode='eval').body  # 'f' is any name
    if not isinstance(call, ast.Call):
        raise ValueError('not a call')
    if not isinstance(call.func, ast.Name):  # as in 'f(a=1)(b=2)'
        raise ValueError('more than one call')
    if call.args:
        raise ValueError('an argument has no name')

    options = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError('an argument is given as **mapping')
        if keyword.arg in options:
            raise ValueError('an argument is given twice')
        options[keyword.arg] = ast.literal_eval(keyword.value)
    return options


def options_of(target: Callable[..., Any]) -> dict[str, Any]:
    """Returns the defaults of a class's or function's options, by name.

    Options are its keyword-only parameters except `key`, which is a random key of JAX.
    """
    function = target.__init__ if inspect.isclass(target) else target
    options = {}
    for parameter in inspect.signature(function).parameters.values():
        is_keyword_only = parameter.kind is parameter.KEYWORD_ONLY
        if is_keyword_only and parameter.name != 'key':
            options[parameter.name] = parameter.default
    return options


def accepts_arguments(*arguments: str) -> Callable[[Any], bool]:
    """Returns a check whether an object takes that many positional arguments, for `resolve`.

    For example, `accepts_arguments('directory', 'config')` checks for two arguments. Their names do
    not matter.
    """

    def is_valid(target: Any) -> bool:
        try:
            inspect.signature(target).bind(*arguments)  # raises TypeError if they do not fit
        except (TypeError, ValueError):
            return False
        return True

    return is_valid


def call_with_config_errors(field: str, text: str, call: Callable[[], T]) -> T:
    """Calls code from outside the package, and turns its exceptions into ConfigErrors.

    Args:
        field: The setting that names the code, for the error message.
        text: The value of the setting, for the error message.
        call: The code, without arguments.

    Raises:
        ConfigError: The code failed. The message names the setting and the line that failed.
        ReadError: The system failed to read a file.
    """
    try:
        return call()
    except (ConfigError, ReadError):
        raise
    except Exception as failure:
        raise ConfigError(f'{field}={text!r} fails, {describe_failure(failure)}') from failure
