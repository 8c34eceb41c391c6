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

    The content is the study as JSON, with these differences:

    - `match` is called `matched`.
    - `variants` are the labels of the arms, such as 'qk/no_o [d_ff]'.
    - `tuning` has the grid of each setting, such as `learning_rates`. It is None without tuning.
    - `arms` has the key of each arm. `seeds`, `looks`, `base_hash` and `command` are added.
    """
    study = resolved(study)
    declared = to_json(study)
    declared['matched'] = declared.pop('match')
    primary_arms = [arm for arm in arms if arm.key.control is None]
    declared['variants'] = list(dict.fromkeys(arm.key.variant for arm in primary_arms))
    seeds = study.base.trials.seeds
    declared['seeds'] = seeds
    # The number of seeds at each interim analysis. No study has interim analyses, but the field is
    # part of the hash by which ledgers know a study.
    declared['looks'] = [len(seeds)] if study.tuning.seeds else []
    if study.tuning.seeds:
        # A setting that is not tuned has one value: that of the baseline.
        baseline = next(arm for arm in arms if arm.variant == study.baseline)
        for knob, grid in plan.grids(study, baseline).items():
            declared['tuning'][f'{knob}s'] = grid
    else:
        declared['tuning'] = None
    declared['base_hash'] = fingerprint(study.base)
    declared['arms'] = [arm.key._asdict() for arm in arms]
    # Exports copy this file and ledgers hash it, so it must not contain directories of a user.
    declared['command'] = shlex.join(without_directories(part) for part in command_line())
    return records.to_jsonable(declared)


def declare(path: Path, study: Study, arms: Sequence[PlannedArm]) -> dict[str, Any]:
    """Writes study.json and its hash in the ledger, if they have changed.

    A directory that holds the study already continues it; see `_continued`. Returns the content of
    study.json. Raises ConfigError if the directory holds another study, or parts of one.
    """
    declared = content(study, arms)
    study_file = path / 'study.json'
    ledger_file = path / ledger.NAME
    with locked(path / 'lock'):
        stored.unpack_in_place(path)
        is_begun = study_file.exists() or ledger_file.exists() or (path / 'runs').exists()
        earlier = None
        if study_file.exists():
            earlier = records.read_json(study_file, {})
            declared = _continued(study_file, study, earlier, declared)
        if is_begun:
            # The ledger usually has the hash of the present study.json. The ledger is written
            # before study.json, so after a crash between the two it has the hash of `declared`.
            valid_hashes = [ledger.digest(declared)]
            if earlier is not None:
                valid_hashes.append(ledger.digest(earlier))
            if ledger.read(ledger_file).declaration not in valid_hashes:
                raise ConfigError(
                    f'{study_file} is missing, or is not what {ledger_file} declares last; restore '
                    'both from a copy, or give another workdir'
                )
        _check_runs(path, study, arms)
        repeats = None if is_begun else _repeats(path, declared)
        ledger.declare(path, declared, repeats)
        if earlier is None or ledger.digest(earlier) != ledger.digest(declared):
            records.write_json(study_file, declared)
    return declared


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
    """Returns the content of study.json for a study that continues in its directory.

    It is `declared`, with the settings of the machine in `earlier`: their change is allowed, but
    not recorded.

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
        raise records.damaged(file, error, records.ADVICE) from error
    base: Config = with_machine_of(study.base, earlier_base)

    left_out = []
    for name in GROWING:
        for value in earlier[name]:
            if value not in declared[name]:
                left_out.append(f'{name}: {value!r} is left out')
    # If a variant is left out, so are all its arms. The message names only the first of these.
    changes = left_out[:1]
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
    """Returns the settings of a study.json that must not change when a study continues.

    A file of an earlier version lacks the fields that later versions introduced. They get their
    defaults, so that the file compares with one of this version.

    Args:
        study: A study of the same class, whose fields have these defaults.
        declared: The content of study.json.
        base: The base config in it.
    """
    cls: Any = type(study)
    # Every study.json has the fields of schema 1.
    fields_of_schema_1 = serialize.introduced('1', cls)
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
    """Raises ConfigError if a finished run is not in the plan that this version makes.

    The version that trained the run may have matched its arm to another size, or tuned to another
    setting. This version would then train a run in its place. Raises RunDirectoryError for a
    damaged line of plan.jsonl.
    """
    file = path / 'plan.jsonl'
    if not file.exists():
        return
    advice = 'restore it from a copy, or remove it: it is then made again from the results'
    schema = {'run': str, 'directory': str, 'control': str | None}
    planned_ids = {run.id for run in plan.runs(study, arms, plan.results_in(path))}
    for run in records.read_lines(file, schema, advice, stored.check_run_directory):
        # Decided arms are trained longer. More arms mean a stricter correction of the tests, so an
        # arm may become undecided. Its longer runs then leave the plan without harm.
        if run['run'] in planned_ids or run['control'] == LONGER:
            continue
        if (path / run['directory'] / 'result.json').exists():
            raise ConfigError(
                f'this version of qkattn would train {run["directory"]} of workdir={path} '
                'again; use the version that trained it, or give another workdir'
            )
