"""The studies of claims: their configs at a scale, and their training."""

import contextlib
import dataclasses
import functools
import logging
import runpy
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import jax

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
from qkattn.study import declaration, estimate, local_workers, plan, yardsticks
from qkattn.study.arms import build_arms
from qkattn.study.estimate import Cost, Speed

_HEAD = f'{"study":<20}{"claims":<14}{"runs":>6}{"trials":>8}{"tokens":>10}{"FLOPs":>10}  time'

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


def require(claims: Iterable[Claim], scale: str, directory: Path) -> None:
    """Raises ConfigError for a study that is neither a config of claims nor in the directory."""
    for claim in claims:
        for name in dict.fromkeys(expected.study for expected in claim.expectations):
            if study_of(name, scale) is None and not (directory / name).is_dir():
                raise ConfigError(
                    f'claim {claim.name}: study {name!r} is none of configs/claims; train it with '
                    f'{cli.script("ablate")} --workdir={directory / name}, then decide with '
                    '--notrain'
                )


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
            if (study := study_of(name, other)) and stored == fingerprint(study.base):
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

    A study that cannot be trained, or whose workers give up, does not stop the others: returns the
    reasons by name. `workers` as in `local_workers.run`; 1 is this process. ConfigError if the
    directory is that of one study, or holds studies of another scale; DiskError if nothing can be
    written; Stopped on SIGTERM or Ctrl-C, with the state saved.
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
    for number, (name, study) in enumerate(studies.items(), start=1):
        log.info('study %s, %d of %d', name, number, len(studies))
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
    measures = [m for claim in claims for m in claim.measures if m.study == name]
    for record in dict.fromkeys(measure.record for measure in measures if measure.record):
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


def cost_lines(
    claims: Iterable[Claim], scale: str, flops_per_second: float | None = None
) -> Iterator[str]:
    """The plan of the studies of claims, a line each and one of their sum, as it is made.

    Time is that of this machine's device: FLOPs over the speed of a warm-up at the smallest size of
    each study, or over `flops_per_second`, and the compilation of each run. At scale gpu, a CPU has
    no time without that number. Arms that are trained longer are counted as if all were.
    """
    claims = list(claims)
    yield _HEAD
    total = Cost(0, 0, 0, 0.0, 0.0)
    timed = flops_per_second is not None or scale != 'gpu' or jax.default_backend() != 'cpu'
    for name in names_of(claims):
        if (study := study_of(name, scale)) is None:
            continue
        cost = _cost(study, flops_per_second, timed)
        serves = ','.join(claim.name for claim in claims if name in claim.studies)
        yield _line(name, serves, cost, timed)
        pairs = zip(dataclasses.astuple(total), dataclasses.astuple(cost), strict=True)
        total = Cost(*(a + b for a, b in pairs))
    yield _line('total', '', total, timed)
    device = jax.devices()[0].device_kind
    if flops_per_second is not None:
        yield f'hours of one device that trains at {flops_per_second:.3g} FLOP/s'
    elif timed:
        yield f'hours of one process on {device}, from a warm-up of each study'
    else:
        yield (
            f'time takes a warm-up on a GPU, and this device is {device}: give the command there, '
            'or --flops_per_second'
        )


def _cost(study: Study, flops_per_second: float | None, timed: bool) -> Cost:
    runs = plan.imagined(study, build_arms(study))
    if flops_per_second is not None or not timed:
        speed = Speed(flops_per_second or float('inf'), 0.0)
    else:
        speed = estimate.measure(min(runs, key=lambda run: run.arm.match.target))
    return estimate.cost(runs, dict.fromkeys(study.sizes, speed))


def _line(name: str, serves: str, cost: Cost, timed: bool) -> str:
    hours = cost.seconds / 3600
    took = f'{hours:,.1f} h' if hours >= 1 else f'{cost.seconds / 60:,.1f} min'
    return (
        f'{name:<20}{serves:<14}{cost.runs:>6,}{cost.trials:>8,}{cost.tokens:>10.3g}'
        f'{cost.flops:>10.3g}  {took if timed else "not measured"}'
    )
