"""The settings of runs and studies: frozen dataclasses that are validated before compilation.

A config file is a Python file with a function `get_config()`, which returns a `Config` or a
`Study`. Flags such as `--config.model.d_model=256` override single fields.
"""

import importlib
from typing import Any

from qkattn.config.model_config import ModelConfig as ModelConfig
from qkattn.config.run_config import ANNEALED as ANNEALED
from qkattn.config.run_config import INDEPENDENT_END as INDEPENDENT_END
from qkattn.config.run_config import Config as Config
from qkattn.config.run_config import DataConfig as DataConfig
from qkattn.config.run_config import DecodeConfig as DecodeConfig
from qkattn.config.run_config import MeshConfig as MeshConfig
from qkattn.config.run_config import OptimizerConfig as OptimizerConfig
from qkattn.config.run_config import TrainConfig as TrainConfig
from qkattn.config.run_config import TrialsConfig as TrialsConfig
from qkattn.config.study_config import ControlsConfig as ControlsConfig
from qkattn.config.study_config import Study as Study
from qkattn.config.study_config import TuningConfig as TuningConfig

# Names that are imported from `serialize` on first use, because it needs ml_collections.
_SERIALIZE = (
    'differences',
    'fingerprint',
    'fingerprint_of',
    'from_config_dict',
    'from_json',
    'to_config_dict',
    'to_json',
    'with_machine_of',
)


def __getattr__(name: str) -> Any:
    if name not in _SERIALIZE:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    serialize = importlib.import_module('qkattn.config.serialize')
    value = getattr(serialize, name)
    return globals().setdefault(name, value)
