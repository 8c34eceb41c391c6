"""Checks of a run before anything compiles."""

import contextlib
from collections.abc import Callable, Sequence

from qkattn.config import Config, DataConfig
from qkattn.data.cache import NotPrepared, nothing_prepared
from qkattn.data.corpora.corpus_registry import is_local
from qkattn.data.evaluation_corpora import entries, open_corpora
from qkattn.data.tasks.rows import Rows
from qkattn.data.tasks.task_registry import rows_of
from qkattn.jobs.display import waiting
from qkattn.storage.sinks import check_sinks
from qkattn.train.optimizer import check_optimizer
from qkattn.train.trials import check_metrics


def check_parts(config: Config) -> None:
    """Raises ConfigError for an optimizer, sink, metric or further corpus that cannot be used."""
    check_optimizer(config.optimizer, config.train.num_steps)
    check_sinks(config.train.sinks)
    check_metrics(config)
    entries(config)  # parses data.evaluate, and raises for an invalid entry


def check_data_if_here(
    config: Config, label: str, check: Callable[[Config], Rows] = rows_of
) -> str | None:
    """Checks the data of a run, if that needs no download.

    Local text is tokenized into the cache. Other data are checked only if they are prepared.

    Args:
        config: The settings of the run.
        label: The title of the progress display.
        check: Opens and returns the rows; raises ConfigError if they do not fit the run.

    Returns:
        A sentence on why the data were not checked; None if they were.

    Raises:
        ConfigError: The data do not fit the run.
    """
    corpora = [entry.data for entry in entries(config) if entry.data is not None]
    with waiting(label, 'preparing data'):
        # Data that are not on this machine raise NotPrepared in place of a download.
        try:
            with _preparing_local_data([config.data]):
                rows = check(config)
            with _preparing_local_data(corpora):
                open_corpora(config, rows)
        except NotPrepared as missing:
            return f'data are not checked, as they are not prepared on this machine: {missing}'
    return None


def _preparing_local_data(data: Sequence[DataConfig]) -> contextlib.AbstractContextManager[None]:
    """A context in which data are prepared only if all of them are on this machine.

    Otherwise, opening data that are not prepared raises NotPrepared.
    """
    if all(is_local(settings) for settings in data):
        return contextlib.nullcontext()
    return nothing_prepared()
