"""The parameters of `train.init_from`, from which a run starts instead of random ones."""

import functools
import logging

from qkattn.config import Config, differences, to_json
from qkattn.config.imports import import_paths
from qkattn.jobs import agreement
from qkattn.train import exported

# Optional settings of a model that change its function, but not the shape of any parameter. Other
# optional settings are None if they follow from further settings. Any real difference in them
# shows in the shapes of the parameters, so it needs no warning.
_WITHOUT_SHAPE = ('logit_cap', 'window', 'encoder_variant', 'cross_variant')

log = logging.getLogger(__name__)


class InitialParameters:
    """The parameters of another model that all trials of a run start from, if there are any.

    They are read on first use. A run that resumes from a checkpoint does not read them, so their
    directory may be deleted once a run has a checkpoint.
    """

    def __init__(self, config: Config):
        self._config = config

    def load(self) -> dict | None:
        """Returns the parameters (float32, numpy) of train.init_from; None if it is not set.

        Raises ConfigError if they cannot be read or do not fit the model of the run.
        """
        return self._params

    def hashes(self) -> dict[str, str]:
        """Returns {'train.init_from': sha256 of the parameters}; {} if train.init_from is None.

        Raises ConfigError if the processes of a job have read different parameters.
        """
        params = self.load()
        if params is None:
            return {}
        sha256 = exported.parameters_sha256(params)
        agreement.require_same(f'train.init_from={self._config.train.init_from}', sha256)
        return {'train.init_from': sha256}

    @functools.cached_property
    def _params(self) -> dict | None:
        """The parameters that `load` returns, read on first use.

        Logs a warning if the settings of the model at train.init_from differ from those of the
        run's model.
        """
        source = self._config.train.init_from
        if source is None:
            return None
        model_json = to_json(self._config.model)

        # The settings stored with the parameters may name code by import path. It is imported only
        # if the run's model names it too. Otherwise `load` raises an error that ends in `advice`.
        advice = "name it in the model's settings too, or start from other parameters"
        source_model, params = exported.load(source, import_paths(model_json), advice)
        exported.check(self._config.model, params, source)

        # A difference is a text such as 'window: 3 -> null'.
        all_changes = differences(to_json(source_model), model_json)
        changes = [change for change in all_changes if _is_worth_a_warning(change)]
        if changes:
            log.warning('train.init_from=%s has other settings: %s', source, ', '.join(changes))
        return params


def _is_worth_a_warning(change: str) -> bool:
    """Whether a difference between two models, such as 'window: 3 -> null', may be a mistake."""
    field = change.partition(':')[0]
    return 'null' not in change or field in _WITHOUT_SHAPE
