"""qkattn: controlled ablations of attention's weight matrices at equal parameter count.

The names below are what a notebook needs; docs/notebook.ipynb shows them. Everything else is
imported from its package, as in `from qkattn.train.loop import train`.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = '0.1.0'

# Each is imported on first use: `import qkattn`, and packages that need no jax, import none.
_NAMES = {
    'qkattn.attention': ('Attention', 'AttentionSpec'),
    'qkattn.config': (
        'Config',
        'DataConfig',
        'ModelConfig',
        'OptimizerConfig',
        'TrainConfig',
        'TrialsConfig',
    ),
    'qkattn.convert.conversions': ('converted',),
    'qkattn.convert.loading': ('load',),
    'qkattn.data.pipeline': ('batches',),
    'qkattn.model': ('build',),
    'qkattn.model.cost': ('count',),
    'qkattn.model.transformer': ('loss',),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOMES)

if TYPE_CHECKING:  # the same names, for type checkers and editors
    from qkattn.attention import Attention as Attention
    from qkattn.attention import AttentionSpec as AttentionSpec
    from qkattn.config import Config as Config
    from qkattn.config import DataConfig as DataConfig
    from qkattn.config import ModelConfig as ModelConfig
    from qkattn.config import OptimizerConfig as OptimizerConfig
    from qkattn.config import TrainConfig as TrainConfig
    from qkattn.config import TrialsConfig as TrialsConfig
    from qkattn.convert.conversions import converted as converted
    from qkattn.convert.loading import load as load
    from qkattn.data.pipeline import batches as batches
    from qkattn.model import build as build
    from qkattn.model.cost import count as count
    from qkattn.model.transformer import loss as loss


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return globals().setdefault(name, getattr(importlib.import_module(_HOMES[name]), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
