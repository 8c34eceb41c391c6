"""The studies of claims: their configs at a scale, and their training."""

import contextlib
import functools
import logging
import runpy
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

from qkattn.claims.claim import Claim
from qkattn.claims.protocol import SCALES
from qkattn.claims.results import marker
from qkattn.config import Study, fingerprint, from_config_dict
from qkattn.errors import ConfigError, DiskError, ProcessError
from qkattn.jobs import cli
from qkattn.jobs.display import waiting
from qkattn.report import write_report
from qkattn.storage.files import check_directory, make_directory
from qkattn.storage.records import START, read_json, write_json
from qkattn.storage.run_directory import describe_start
from qkattn.study import declaration, local_workers, yardsticks
from qkattn.study.arms import build_arms

log = logging.getLogger(__name__)


def study_of(name: str, scale: str) -> Study | None:
    """The study that configs/claims/NAME.py gives at a scale; None if there is no such file."""
    path = cli.shipped('configs/claims').get(name)
    if path is None:
        return None
    return cast(Study, from_config_dict(runpy.run_path(str(path))['get_config'](scale)))


def names_of(claims: Iterable[Claim]) -> list[str]:
    """The studies of claims, each once."""
    return list(dict.fromkeys(name for claim in claims for name in claim.studies))


def check_workdir(directory: Path, names: Iterable[str], scale: str) -> None:
    """Raises ConfigError if the directory is that of one study, or holds one of another scale."""
    if (directory / 'study.json').exists():
        raise ConfigError(
            f'workdir={directory} is the directory of one study; claims need another, which has a '
            'directory for each study'
        )
    declaration.require_no_run(directory)
    for name in names:
        file, study = directory / name / 'study.json', study_of(name, scale)
        if study is None or not file.exists():
            continue
        stored = read_json(file, {'base_hash': str})['base_hash']
        if stored == fingerprint(study.base):
            continue
        for other in SCALES:
            if (of := study_of(name, other)) and stored == fingerprint(of.base):
                raise ConfigError(
                    f'workdir={directory} holds study {name} at scale {other}; give another '
                    f'workdir, or --scale={other}'
                )


def train(
    claims: Iterable[Claim],
    scale: str,
    directory: str | Path,
    workers: int | None,
) -> dict[str, Exception]:
    """Trains each study of the claims once, then records measures; the same call resumes.

    A study that cannot be trained, or whose workers give up, does not stop the others.

    Args:
      workers: as in `local_workers.run`; 1 is this process.

    Returns:
      Why studies could not be trained, by name.

    Raises:
      ConfigError: the directory is that of one study, or holds studies of another scale.
      DiskError: nothing can be written.
      Stopped: on SIGTERM or Ctrl-C, with the state saved.
    """
    claims, path = list(claims), check_directory(directory)
    failed: dict[str, Exception] = {}
    names = names_of(claims)
    check_workdir(path, names, scale)

    @contextlib.contextmanager
    def going_on(name: str) -> Iterator[None]:
        try:
            yield
        except DiskError:
            raise  # the others could not be saved either
        except (ConfigError, ProcessError) as error:
            failed[name] = error
            log.error('study %s: %s', name, error)

    studies = {name: study for name in names if (study := study_of(name, scale))}
    for place, (name, study) in enumerate(studies.items(), start=1):
        log.info('study %s, %d of %d', name, place, len(studies))
        arms = functools.partial(build_arms, study)
        with going_on(name):
            local_workers.run(study, arms, path / name, workers)
    # After all training: workers start from a process that has no threads of JAX yet.
    for name in names:
        if name not in failed:
            with going_on(name):
                if name in studies and studies[name].tuning.seeds:
                    yardsticks.record_finished(path / name)
                _record(claims, name, scale, path / name)
    return failed


def report(names: Iterable[str], directory: Path) -> None:
    """Writes the report of each study whose results are more recent, which is a look at them."""
    for name in names:
        results, page = (directory / name / file for file in ('results.jsonl', 'report.html'))
        if not results.exists() or not results.stat().st_size:
            continue
        if not page.exists() or page.stat().st_mtime < results.stat().st_mtime:
            with waiting(name, 'writing the report'):
                write_report(directory / name)


def _record(claims: Iterable[Claim], name: str, scale: str, path: Path) -> None:
    """Records the measures of a study that are not recorded yet."""
    measures = (of.record for claim in claims for of in claim.measures if of.study == name)
    for record in dict.fromkeys(of for of in measures if of):
        done = marker(path, record)
        if not done.exists():
            log.info('study %s: recording %s', name, done.stem)
            make_directory(done.parent)
            started = time.perf_counter()
            record(path, scale)
            seconds = time.perf_counter() - started
            # It is exported: user, host and paths are left out.
            start = describe_start()
            write_json(done, {'start': {key: start[key] for key in START}, 'seconds': seconds})
