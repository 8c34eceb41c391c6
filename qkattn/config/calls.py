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
    """Returns the object that a setting names, and the options that follow the name.

    `resolve('low_rank(rank=8)', SCORES, 'score')` returns (LowRank, {'rank': 8}).

    Args:
      text: the value of the setting: a registered name or an import path. Options may follow in
        parentheses.
      known: the registered objects by name.
      field: the name of the setting, for errors.
      needs: what an imported object must be, for errors: 'a class or function'.
      is_valid: whether an imported object is what `needs` says.
      call: a function of the object that returns the class or function which takes the options, as
        keyword-only parameters. By default this is the object itself.
      error: the class of the exceptions below.

    Raises `error` for a malformed or unknown name, a module that cannot be imported, an imported
    object that does not fit, and an option that the object does not take.
    """
    # Find the object.
    name, options = parse_call(text, field, error)
    if ':' in name:
        target = import_object(name, field, error)
        if not is_valid(target):
            raise error(f'{field}={name!r} is not {needs}')
    elif name in known:
        target = known[name]
    else:
        raise error(_unknown_name(name, known, field))

    # Check that it takes the options.
    if options:
        accepted_options = options_of(call(target))
        for option in options:
            if option not in accepted_options:
                names = ', '.join(accepted_options) or 'none'
                raise error(f'{name} has no option {option!r}; it takes {names}')
    return target, options


def _unknown_name(name: str, known: Mapping[str, Any], field: str) -> str:
    """Returns a sentence on a name that is neither registered nor an import path."""
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

    Raises `error`, which names the setting `field`, for text of another form.
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
    """Parses '(a=1, b=(2, 3))' into {'a': 1, 'b': (2, 3)}.

    Raises SyntaxError, ValueError or TypeError for text of another form.
    """
    # With a name before it, the text is a call in Python: 'f(a=1, b=(2, 3))'.
    call = ast.parse(f'f{arguments}', mode='eval').body
    if not isinstance(call, ast.Call):
        raise ValueError('not a call')
    # Text such as '(a=1)(b=2)' makes two calls: the second calls the result of the first.
    if not isinstance(call.func, ast.Name):
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
    """Returns the options of a class or function, {name: default}: its keyword-only parameters.

    The parameter `key`, a random key of jax, does not count as an option.
    """
    function = target.__init__ if inspect.isclass(target) else target
    options = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name != 'key':
            options[parameter.name] = parameter.default
    return options


def accepts_arguments(*arguments: str) -> Callable[[Any], bool]:
    """Returns a check for `resolve`: whether an object takes this many positional arguments.

    `accepts_arguments('directory', 'config')` checks for two. The names only tell readers what they
    are.
    """

    def is_valid(target: Any) -> bool:
        try:
            inspect.signature(target).bind(*arguments)
        except (TypeError, ValueError):
            return False
        return True

    return is_valid


def call_with_config_errors(field: str, text: str, call: Callable[[], T]) -> T:
    """Returns `call()`, and turns its exceptions into ConfigErrors that blame a setting.

    `call` runs code from outside the package, because the setting `field` has the value `text`. The
    error names both, and the line of the code that failed. A ReadError stays, because the system
    has failed to read a file, and not the code.
    """
    try:
        return call()
    except (ConfigError, ReadError):
        raise
    except Exception as failure:
        raise ConfigError(f'{field}={text!r} fails, {describe_failure(failure)}') from failure
