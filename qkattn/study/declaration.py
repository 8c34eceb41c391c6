"""study.json: the declaration of a study before its first run, and checks that a directory fits it.

A directory keeps the settings that its study began with. Variants, sizes and corpora may grow; any
other change takes another directory.
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

# Fields of study.json that may gain values when a directory is used again.
GROWING = ('variants', 'sizes', 'corpora', 'arms')
# Fields that may change when a directory is used again. They grow, follow from other fields, or do
# not matter.
EXTENSIBLE = (*GROWING, 'question', 'command', 'looks', 'base_hash')


def require_no_run(path: Path) -> None:
    """Raises ConfigError if the directory of a new study holds a run."""
    if (path / 'config.json').exists():
        raise ConfigError(
            f'workdir={path} holds a run, not a study; give a study its own directory, or resume '
            'the run with train'
        )


def content(study: Study, arms: Sequence[PlannedArm]) -> dict[str, Any]:
    """Returns the content of study.json in a new directory.

    It is the study as JSON, with these differences:

    - `match` is called `matched`.
    - `variants` are the labels of the arms, such as 'qk/no_o [d_ff]'.
    - `tuning` also has the grid of each setting, such as `learning_rates`. It is None without
      tuning.
    - `arms` has the key of each arm. `seeds`, `looks`, `base_hash` and `command` are added.
    """
    study = resolved(study)
    seeds = study.base.trials.seeds
    is_tuned = bool(study.tuning.seeds)
    primary_arms = [arm for arm in arms if arm.key.control is None]
    declared = to_json(study)
    declared['matched'] = declared.pop('match')
    declared['variants'] = list(dict.fromkeys(arm.key.variant for arm in primary_arms))
    if is_tuned:
        # The grid of a setting that is not tuned has one value. It is that of the baseline, though
        # a variant may set another one.
        baseline = next(arm for arm in arms if arm.variant == study.baseline)
        for knob, grid in plan.grids(study, baseline).items():
            declared['tuning'][f'{knob}s'] = grid
    else:
        declared['tuning'] = None
    declared['seeds'] = seeds
    # `looks` lists the numbers of seeds at which results are analyzed. They are analyzed once, with
    # all seeds. The hash that ledgers record includes this field, so it stays.
    declared['looks'] = [len(seeds)] if is_tuned else []
    declared['base_hash'] = fingerprint(study.base)
    declared['arms'] = [arm.key._asdict() for arm in arms]
    # Exports copy this file and ledgers hash it, so it must not contain directories of a user.
    declared['command'] = shlex.join(without_directories(part) for part in command_line())
    return records.to_jsonable(declared)


def declare(path: Path, study: Study, arms: Sequence[PlannedArm]) -> dict[str, Any]:
    """Declares a study in its directory, and returns the content of study.json.

    There are two cases:

    - The directory is new. study.json gets the study, and the ledger gets the hash of this file.
    - The directory holds the same study already, which continues. If it has grown, for example by a
      variant, both files are written again.

    Raises ConfigError if the directory holds another study, or parts of one.
    """
    declared = content(study, arms)
    study_file = path / 'study.json'
    ledger_file = path / ledger.NAME
    with locked(path / 'lock'):
        stored.unpack_in_place(path)
        is_new = not (study_file.exists() or ledger_file.exists() or (path / 'runs').exists())
        earlier = None  # what study.json holds already
        if study_file.exists():
            earlier = records.read_json(study_file, {})
            declared = _continued(study_file, study, earlier, declared)
        if not is_new:
            _require_declared(study_file, earlier, declared)
        _check_runs(path, study, arms)
        repeats = _repeats(path, declared) if is_new else None

        # The ledger is written first; see `_require_declared`.
        ledger.declare(path, declared, repeats)
        if earlier is None or ledger.declaration_digest(earlier) != ledger.declaration_digest(
            declared
        ):
            records.write_json(study_file, declared)
    return declared


def _require_declared(
    study_file: Path, earlier: dict[str, Any] | None, declared: dict[str, Any]
) -> None:
    """Raises ConfigError unless the ledger has recorded the hash of study.json.

    The ledger is written before study.json. If a worker crashed between the two, the ledger already
    has the hash of the content that study.json still has to get.

    Args:
        study_file: The study.json.
        earlier: Its content; None if there is no such file.
        declared: The content that it has to get.
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
    """Raises ConfigError if `declare` would refuse the study; writes nothing."""
    require_no_run(path)
    require_chain(path, study, arms)
    study_file = path / 'study.json'
    if study_file.exists():
        earlier = records.read_json(study_file, {})
        _continued(study_file, study, earlier, content(study, arms))
    _check_runs(path, study, arms)


def require_chain(path: Path, study: Study, arms: Sequence[PlannedArm]) -> None:
    """Raises ConfigError if a new study in `path` cannot repeat the study that it names."""
    if study.repeats is not None and not (path / ledger.NAME).exists():
        _repeats(path, content(study, arms))


def _repeats(path: Path, declared: dict[str, Any]) -> dict[str, str] | None:
    """Returns what a ledger declares about the repeated study (`chain.declared_repeat`).

    Raises ConfigError if the study cannot be repeated.
    """
    try:
        return chain.declared_repeat(path, declared)
    except (ReportError, RunDirectoryError) as error:
        raise ConfigError(f'repeats={declared["repeats"]!r}: {error}') from error


def _continued(
    file: Path, study: Study, earlier: dict[str, Any], declared: dict[str, Any]
) -> dict[str, Any]:
    """Checks that a study may continue in its directory; returns the content of its study.json.

    It may have gained variants, sizes and corpora. Settings of the machine may have changed too,
    but the result has those of `earlier`. All other content is that of `declared`.

    Args:
        file: The study.json in the directory.
        study: The study to continue with.
        earlier: The present content of `file`.
        declared: What `content` returns for `study`.

    Raises:
        ConfigError: The study leaves out a variant, a size or a corpus of `earlier`, or has another
            value of any other setting; or this version does not know a setting of `earlier`.
        RunDirectoryError: `earlier` is damaged.
    """
    try:
        records.check(earlier, records.STUDY)
        earlier_base: Config = from_json(Config, earlier['base'], 'base.')
    except UnknownFieldError as error:
        raise ConfigError(f'{file} has an {error}') from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise records.damaged_file_error(file, error, records.ADVICE) from error
    base: Config = with_machine_of(study.base, earlier_base)

    # What is left out? If a variant is, so are all its arms, and naming the variant is enough.
    left_out = []
    for name in GROWING:
        for value in earlier[name]:
            if value not in declared[name]:
                left_out.append(f'{name}: {value!r} is left out')
    changes = left_out[:1]

    # Which other settings have changed?
    earlier_settings = _fixed_settings(study, earlier, earlier_base)
    changes += differences(earlier_settings, _fixed_settings(study, declared, base))
    if changes:
        raise ConfigError(
            f'workdir={file.parent} holds a study with other settings:\n  '
            + '\n  '.join(changes)
            + '\nSet them back or give another workdir; a study may only gain variants, sizes and '
            'corpora.'
        )
    return {**declared, 'base': to_json(base)}


def _fixed_settings(study: Study, declared: dict[str, Any], base: Config) -> dict[str, Any]:
    """Returns the settings in a study.json that must not change when the study continues.

    The file may have been written by an earlier version, which did not have all settings of this
    version. Such settings get their defaults, so that the files of both versions can be compared.

    Args:
        study: Any study; its class has the defaults.
        declared: The content of study.json.
        base: The base config in this content.
    """
    cls: Any = type(study)
    # Every file has the settings of schema 1, the oldest one.
    fields_of_schema_1 = serialize.fields_added_by_schema('1', cls)
    settings: dict[str, Any] = {}
    for name, default in serialize.defaults(cls).items():
        if name not in fields_of_schema_1:
            settings[name] = default
    settings |= declared
    for name in EXTENSIBLE:
        settings.pop(name, None)
    settings['base'] = dataclasses.asdict(base)
    return settings


def _check_runs(path: Path, study: Study, arms: Sequence[PlannedArm]) -> None:
    """Raises ConfigError if this version of qkattn would train a finished run again.

    Two versions may plan different runs for the same study. For example, an earlier version has
    trained an arm with d_model=104, and this version matches the arm at d_model=112. The finished
    run is then in plan.jsonl, but not in the plan that this version makes.

    Raises RunDirectoryError for a damaged line of plan.jsonl.
    """
    file = path / 'plan.jsonl'
    if not file.exists():
        return
    planned_ids = {run.id for run in plan.runs(study, arms, plan.results_in(path))}
    advice = 'restore it from a copy, or remove it: it is then made again from the results'
    schema = {'run': str, 'directory': str, 'control': str | None}
    for run in records.read_lines(file, schema, advice, stored.check_run_directory):
        is_planned = run['run'] in planned_ids
        # Only decided arms are trained longer. If arms are added, the tests become stricter, and an
        # arm may no longer be decided. Its longer runs may then leave the plan.
        may_leave_plan = run['control'] == LONGER
        if is_planned or may_leave_plan:
            continue
        if (path / run['directory'] / 'result.json').exists():
            raise ConfigError(
                f'this version of qkattn would train {run["directory"]} of workdir={path} '
                'again; use the version that trained it, or give another workdir'
            )
