"""study.json: the declaration of a study, written before its first run.

A study that continues in its directory may gain variants, sizes and corpora. All other settings
stay as declared.
"""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qkattn.config import (
    Config,
    Study,
    differences,
    fingerprint,
    from_json,
    serialize,
    to_json,
    with_machine_of,
)
from qkattn.errors import ConfigError, ReportError, RunDirectoryError, UnknownFieldError
from qkattn.storage import ledger, records
from qkattn.storage.files import without_directories
from qkattn.storage.leases import locked
from qkattn.storage.run_directory import command_line
from qkattn.study import chain, plan, stored
from qkattn.study.arm_key import LONGER
from qkattn.study.arms import PlannedArm
from qkattn.study.protocol import resolved

# Fields of study.json that may gain values when a study continues.
GROWING = ('variants', 'sizes', 'corpora', 'arms')
# Fields of study.json that may change when a study continues.
EXTENSIBLE = (*GROWING, 'question', 'command', 'looks', 'base_hash')


def require_no_run(path: Path) -> None:
    """Raises ConfigError if the directory of a new study holds a run."""
    if (path / 'config.json').exists():
        raise ConfigError(
            f'workdir={path} holds a run, not a study; give a study its own directory, or resume '
            'the run with train'
        )


def content(study: Study, arms: Sequence[PlannedArm]) -> dict[str, Any]:
    """Returns the content of study.json for a new study.

    It is the study as JSON, with these differences:

    - `match` is called `matched`.
    - `variants` has the labels of the arms, such as 'qk/no_o [d_ff]'.
    - `tuning` also has the grid of each setting, such as `learning_rates`. It is None without
      tuning.
    - `seeds`, `looks`, `base_hash`, `arms` and `command` are added.
    """
    study = resolved(study)  # its corpora and controls are explicit
    seeds = study.base.trials.seeds
    is_tuned = bool(study.tuning.seeds)
    declared = to_json(study)
    declared['matched'] = declared.pop('match')
    labels = [arm.key.variant for arm in arms if arm.key.control is None]
    unique_labels = list(dict.fromkeys(labels))  # in the order of the arms
    declared['variants'] = unique_labels
    if is_tuned:
        baseline = next(arm for arm in arms if arm.variant == study.baseline)
        for knob, grid in plan.grids(study, baseline).items():
            declared['tuning'][f'{knob}s'] = grid  # such as `learning_rates`
    else:
        declared['tuning'] = None
    declared['seeds'] = seeds
    # The results of a tuned study are analyzed once, with all seeds.
    declared['looks'] = [len(seeds)] if is_tuned else []
    declared['base_hash'] = fingerprint(study.base)
    declared['arms'] = [arm.key._asdict() for arm in arms]
    # study.json may be published, so it must not name directories of a user.
    command = [without_directories(argument) for argument in command_line()]
    declared['command'] = shlex.join(command)
    return records.to_jsonable(declared)


def declare(path: Path, study: Study, arms: Sequence[PlannedArm]) -> dict[str, Any]:
    """Declares a study in its directory, and returns the content of study.json.

    Writes study.json, and records the hash of its content in the ledger. If the directory holds the
    same study already, the files are written only if the study has grown.

    Raises:
        ConfigError: The directory holds another study, or parts of one.
    """
    declared = content(study, arms)
    with locked(path / 'lock'):
        is_new = _is_new(path)
        earlier, declared = _earlier_and_continued(path, study, declared)
        # A directory that is refused above stays as it is.
        stored.unpack_in_place(path)
        _check_runs(path, study, arms)
        repeats = _declared_repeat(path, declared) if is_new else None

        # The ledger is written first, so that the study can continue after a crash in between.
        ledger.declare(path, declared, repeats)
        is_written = earlier is not None and (
            ledger.declaration_digest(earlier) == ledger.declaration_digest(declared)
        )
        if not is_written:
            records.write_json(path / 'study.json', declared)
    return declared


def _earlier_and_continued(
    path: Path, study: Study, declared: dict[str, Any]
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Checks that a study may start or continue in its directory.

    Args:
        path: The directory of the study.
        study: The study.
        declared: What `content` returns for the study.

    Returns:
        The present content of study.json; None without this file.
        The content to write to study.json.

    Raises:
        ConfigError: The directory holds another study, or parts of one.
    """
    study_file = path / 'study.json'
    earlier = None
    if study_file.exists():
        earlier = records.read_json(study_file, {})  # {}: its fields are checked below
        declared = _continued(study_file, study, earlier, declared)
    if not _is_new(path):
        _require_declared(study_file, earlier, declared)
    return earlier, declared


def _require_declared(
    study_file: Path, earlier: dict[str, Any] | None, declared: dict[str, Any]
) -> None:
    """Raises ConfigError unless the ledger has the hash of the old or new content of study.json.

    The ledger is written before study.json. It has the hash of the new content if a worker crashed
    before it wrote study.json.

    Args:
        study_file: The path of study.json.
        earlier: The present content of study.json; None without this file.
        declared: The content to write to study.json.
    """
    ledger_file = study_file.parent / ledger.NAME
    valid_hashes = [ledger.declaration_digest(declared)]
    if earlier is not None:
        valid_hashes.append(ledger.declaration_digest(earlier))
    if ledger.read(ledger_file).declaration not in valid_hashes:
        raise ConfigError(
            f'{study_file} is missing, or is not what {ledger_file} declares last; restore both '
            'from a copy, or give another workdir'
        )


def check(path: Path, study: Study, arms: Sequence[PlannedArm]) -> None:
    """Makes the checks of `declare`, without writing any file.

    Raises:
        ConfigError: The study cannot be declared in this directory.
    """
    require_no_run(path)
    require_chain(path, study, arms)
    _earlier_and_continued(path, study, content(study, arms))
    _check_runs(path, study, arms)


def _is_new(path: Path) -> bool:
    """Returns whether a directory holds no part of a study."""
    parts = ('study.json', ledger.NAME, 'runs', stored.LOGS)
    return not any((path / name).exists() for name in parts)


def require_chain(path: Path, study: Study, arms: Sequence[PlannedArm]) -> None:
    """Raises ConfigError if a new study cannot repeat the study named by `study.repeats`."""
    has_ledger = (path / ledger.NAME).exists()
    if not has_ledger and study.repeats is not None:
        _declared_repeat(path, content(study, arms))  # raises ConfigError


def _declared_repeat(path: Path, declared: dict[str, Any]) -> dict[str, str] | None:
    """Returns what a study's ledger declares about the study that it repeats.

    It is {'study': the name of the repeated study, 'entry': the hash of the last line in its
    ledger}, or None if none is repeated. Raises ConfigError if the study cannot be repeated.
    """
    try:
        return chain.declared_repeat(path, declared)
    except (ReportError, RunDirectoryError) as error:
        raise ConfigError(f'repeats={declared["repeats"]!r}: {error}') from error


def _continued(
    file: Path, study: Study, earlier: dict[str, Any], declared: dict[str, Any]
) -> dict[str, Any]:
    """Checks that a study may continue, and returns the content of study.json to write.

    It is `declared`, but with the settings of the machine (such as `mesh`) of `earlier`.

    Args:
        file: The path of study.json.
        study: The study to continue with.
        earlier: The present content of study.json.
        declared: What `content` returns for `study`.

    Raises:
        ConfigError: The study lacks a variant, size or corpus of `earlier`, or changes another
            setting. Or `earlier` has a setting that is unknown to this version.
        RunDirectoryError: `earlier` is damaged.
    """
    try:
        records.check(earlier, records.STUDY)  # the types of its fields
        earlier_base: Config = from_json(Config, earlier['base'], prefix='base.')
    except UnknownFieldError as error:
        raise ConfigError(f'{file} has an {error}') from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise records.damaged_file_error(file, error, records.ADVICE) from error
    base: Config = with_machine_of(study.base, earlier_base)

    # The arms of a missing variant are missing too, so only the first entry is reported.
    changes = _left_out(earlier, declared)[:1]
    earlier_settings = _fixed_settings(study, earlier, earlier_base)
    settings = _fixed_settings(study, declared, base)
    changes += differences(earlier_settings, settings)
    if changes:
        raise ConfigError(
            f'workdir={file.parent} holds a study with other settings:\n  '
            + '\n  '.join(changes)
            + '\nSet them back or give another workdir; a study may only gain variants, sizes and '
            'corpora.'
        )
    return {**declared, 'base': to_json(base)}


def _left_out(earlier: dict[str, Any], declared: dict[str, Any]) -> list[str]:
    """Returns a message such as "sizes: 'd_model=64' is left out" for each value that is missing.

    Args:
        earlier: The present content of study.json, such as {'sizes': ['d_model=64'], ...}.
        declared: The content of study.json with which the study would continue.
    """
    messages = []
    for name in GROWING:  # such as 'sizes'
        for value in earlier[name]:
            if value not in declared[name]:
                messages.append(f'{name}: {value!r} is left out')
    return messages


def _fixed_settings(study: Study, declared: dict[str, Any], base: Config) -> dict[str, Any]:
    """Returns the settings in a study.json that must not change when the study continues.

    A file of an earlier version may lack settings. They get their defaults.

    Args:
        study: A study, whose class has the defaults.
        declared: The content of study.json.
        base: The base config in `declared`.
    """
    study_class: Any = type(study)
    # Schema 1 is the oldest one, so all files have its fields.
    fields_of_all_files = serialize.fields_added_by_schema('1', study_class)
    settings: dict[str, Any] = {}
    for name, default in serialize.defaults(study_class).items():
        if name not in fields_of_all_files:
            settings[name] = default
    settings |= declared  # what the file has overrides the defaults
    for name in EXTENSIBLE:  # fields that may change, such as `sizes`
        settings.pop(name, None)
    settings['base'] = dataclasses.asdict(base)
    return settings


def _check_runs(path: Path, study: Study, arms: Sequence[PlannedArm]) -> None:
    """Raises ConfigError if a finished run of plan.jsonl is not in the plan of this version.

    Two versions may plan different runs for the same study. For example, an earlier version may
    have matched an arm at d_model=104, and this version matches it at d_model=112.

    Raises RunDirectoryError for a damaged line of plan.jsonl.
    """
    if not (path / stored.PLAN).exists():
        return
    planned = plan.runs(study, arms, plan.results_in(path))
    for run in plan.unplanned_runs(path, planned):  # finished runs, as dicts
        # Only decided arms are trained longer, and added arms may leave an arm undecided.
        may_leave_plan = run['control'] == LONGER
        if not may_leave_plan:
            raise ConfigError(
                f'this version of qkattn would train {run["directory"]} of workdir={path} '
                'again; use the version that trained it, or give another workdir'
            )
