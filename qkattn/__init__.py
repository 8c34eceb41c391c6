"""qkattn: controlled ablations of attention's weight matrices at equal parameter count.

The names below are available here. Other names are imported from their modules, as in
`from qkattn.train.loop import train`.
"""

import importlib
from typing import Any

__version__ = '0.2.0'

_SETTINGS = ('ModelConfig', 'DataConfig', 'OptimizerConfig', 'TrainConfig', 'TrialsConfig')
# Names are imported on first use, so that `import qkattn` does not import JAX.
_NAMES = {
    'qkattn.attention': ('Attention', 'AttentionSpec'),
    'qkattn.config': ('Config', *_SETTINGS),
    'qkattn.convert.conversions': ('converted',),
    'qkattn.convert.loading': ('load',),
    'qkattn.data.tasks.task_registry': ('batches',),
    'qkattn.model': ('build',),
    'qkattn.model.cost': ('count',),
    'qkattn.model.transformer': ('loss',),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    module = importlib.import_module(_HOMES[name])
    return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return __all__
