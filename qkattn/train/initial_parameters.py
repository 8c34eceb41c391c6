"""Initial parameters of a run from another model, by the setting `train.init_from`."""

import functools
import logging

from qkattn.config import Config, differences, to_json
from qkattn.config.imports import import_paths
from qkattn.jobs import agreement
from qkattn.train import exported

# Optional settings of a model that do not change the shape of any parameter. Differences in other
# optional settings are seen in the shapes.
_WITHOUT_SHAPE = ('logit_cap', 'window', 'encoder_variant', 'cross_variant')

log = logging.getLogger(__name__)


class InitialParameters:
    """The parameters that all trials of a run start from, if train.init_from is set.

    They are read on first use, so a resumed run does not need their directory.
    """

    def __init__(self, config: Config):
        self._config = config

    def load(self) -> dict | None:
        """Returns the parameters (float32, numpy); None if train.init_from is not set.

        Raises:
            ConfigError: The parameters cannot be read or do not fit the model.
        """
        return self._params

    def hashes(self) -> dict[str, str]:
        """Returns {'train.init_from': sha256 of the parameters}; {} if there are none.

        Raises:
            ConfigError: The processes of a job have read different parameters.
        """
        params = self.load()
        if params is None:
            return {}
        sha256 = exported.parameters_sha256(params)
        agreement.require_same(f'train.init_from={self._config.train.init_from}', sha256)
        return {'train.init_from': sha256}

    @functools.cached_property
    def _params(self) -> dict | None:
        """The parameters; warns if they are of a model with other settings."""
        source = self._config.train.init_from
        if source is None:
            return None
        model_json = to_json(self._config.model)

        # The source may name code to import. Only code that the run's model names is trusted.
        trusted_imports = import_paths(model_json)
        remedy = "name it in the model's settings too, or start from other parameters"
        source_model, params = exported.load(source, trusted_imports, remedy)
        exported.check(self._config.model, params, source)

        changes = differences(to_json(source_model), model_json)
        suspicious_changes = [change for change in changes if _is_suspicious(change)]
        if suspicious_changes:
            log.warning(
                'train.init_from=%s has other settings: %s', source, ', '.join(suspicious_changes)
            )
        return params


def _is_suspicious(change: str) -> bool:
    """Whether a difference between two models, such as 'window: 3 -> null', may be a mistake."""
    field = change.partition(':')[0]
    is_optional = 'null' in change
    # Other optional settings change shapes of parameters, which are checked.
    return not is_optional or field in _WITHOUT_SHAPE
