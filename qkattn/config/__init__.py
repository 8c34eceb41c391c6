"""Every setting of a run or a study: typed, frozen, validated before anything compiles.

A config file is a Python file with `get_config()`, which returns a `Config` or a `Study`; single
fields are overridden on the command line as `--config.model.d_model=256`.
"""

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
from qkattn.config.serialize import differences as differences
from qkattn.config.serialize import fingerprint as fingerprint
from qkattn.config.serialize import fingerprint_of as fingerprint_of
from qkattn.config.serialize import from_config_dict as from_config_dict
from qkattn.config.serialize import from_json as from_json
from qkattn.config.serialize import to_config_dict as to_config_dict
from qkattn.config.serialize import to_json as to_json
from qkattn.config.serialize import with_machine_of as with_machine_of
from qkattn.config.study_config import ControlsConfig as ControlsConfig
from qkattn.config.study_config import Study as Study
from qkattn.config.study_config import TuningConfig as TuningConfig
