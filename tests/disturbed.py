"""The last bits of what the package computes, changed as another processor may change them.

Inside `disturbed()`, each of these is off by a factor within RELATIVE of 1, drawn anew at every
call: exp, log, powers, hyperbolic tangents and hypotenuses of numpy and `math`, sums and means,
matrix products (`@` too), `numpy.linalg`, and the functions of `scipy.special`. This holds for code
of the packages PACKAGES, through which every number of a report passes after its logs are read, and
for functions of them that scipy calls, as in minimizations and bootstraps. What scipy computes by
itself is left as it is; so are XLA, whose exact checks of claims are repeated with other vector
instructions by `.ci/run`, and arithmetic that rounds correctly everywhere.
"""

import contextlib
import math
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import scipy

from qkattn.verdict import findings

RELATIVE = 1e-15  # a few units in the last place
PACKAGES = ('qkattn.stats.', 'qkattn.verdict.', 'qkattn.metrics', 'qkattn.report.')
INEXACT = {
    *('exp', 'exp2', 'expm1', 'log', 'log2', 'log10', 'log1p', 'power', 'float_power', 'pow'),
    *('tanh', 'hypot', 'dot', 'matmul', 'inner', 'outer', 'einsum', 'vecdot', 'mean', 'sum'),
}

_random = np.random.default_rng(0)


def _off(value: Any) -> Any:
    """`value`, if it is of floats, off by RELATIVE at most; arrays stay so under operations."""
    if isinstance(value, tuple):
        return type(value)(*map(_off, value)) if hasattr(value, '_fields') else (*map(_off, value),)
    if isinstance(value, float):
        return type(value)(value * (1 + RELATIVE * _random.uniform(-1, 1)))
    if isinstance(value, np.ndarray) and value.dtype == float:
        factors = 1 + RELATIVE * _random.uniform(-1, 1, value.shape)
        return (value.view(np.ndarray) * factors).view(Disturbed)
    return value


class Disturbed(np.ndarray):
    """An array of floats whose inexact operations are off."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **keywords):
        plain = [x.view(np.ndarray) if isinstance(x, Disturbed) else x for x in inputs]
        result = getattr(ufunc, method)(*plain, **keywords)
        if ufunc.__name__ in INEXACT or (ufunc is np.add and method != '__call__'):
            result = _off(result)
        if out is not None:
            out[0].view(np.ndarray)[...] = result
            return out[0]
        return _followed(result)


def _followed(value: Any) -> Any:
    is_floats = type(value) is np.ndarray and value.dtype == float
    return value.view(Disturbed) if is_floats else value


class Module(ModuleType):
    """A module whose functions return what is off, or arrays that become so.

    Args:
      everything: whether all of its functions are inexact, or those in INEXACT.
    """

    def __init__(self, module: ModuleType, everything: bool = False):
        super().__init__(module.__name__)
        self._module, self._everything = module, everything

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if value is np.linalg or value is scipy.special:
            return Module(value, everything=True)
        if isinstance(value, type | ModuleType) or not callable(value):
            return value
        changed = _off if self._everything or name in INEXACT else _followed
        return lambda *arguments, **keywords: changed(value(*arguments, **keywords))


@contextlib.contextmanager
def disturbed() -> Iterator[None]:
    """Disturbs the packages, and forgets studies that were read before."""
    places = [
        (module, name, value)
        for module in list(sys.modules.values())
        if module and module.__name__.startswith(PACKAGES)
        for name, value in vars(module).items()
        if any(value is of for of in (np, scipy, math))
    ]
    findings._load.cache_clear()
    try:
        for module, name, value in places:
            setattr(module, name, Module(value))
        yield
    finally:
        for module, name, value in places:
            setattr(module, name, value)
        findings._load.cache_clear()
