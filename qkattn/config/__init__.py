"""Every setting of a run or a study: typed, frozen, validated before anything compiles.

A config file is a Python file with `get_config()`, which returns a `Config` or a `Study`; single
fields are overridden on the command line as `--config.model.d_model=256`.
"""

from qkattn.config.model_config import ModelConfig
from qkattn.config.run_config import (
    ANNEALED,
    Config,
    DataConfig,
    DecodeConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
    TrialsConfig,
)
from qkattn.config.serialize import (
    concrete_types,
    differences,
    fingerprint,
    fingerprint_of,
    from_config_dict,
    from_json,
    to_config_dict,
    to_json,
    with_machine_of,
)
from qkattn.config.study_config import ControlsConfig, Study, TuningConfig

__all__ = [
    'ANNEALED',
    'Config',
    'ControlsConfig',
    'DataConfig',
    'DecodeConfig',
    'MeshConfig',
    'ModelConfig',
    'OptimizerConfig',
    'Study',
    'TrainConfig',
    'TrialsConfig',
    'TuningConfig',
    'concrete_types',
    'differences',
    'fingerprint',
    'fingerprint_of',
    'from_config_dict',
    'from_json',
    'to_config_dict',
    'to_json',
    'with_machine_of',
]
