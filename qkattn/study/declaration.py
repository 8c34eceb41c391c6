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
from qkattn.study.arms import PlannedArm, resolved

# Fields of study.json that may gain values when a directory is used again, and those that may
# differ altogether or follow from others.
GROWING = ('variants', 'sizes', 'corpora', 'arms')
EXTENSIBLE = (*GROWING, 'question', 'command', 'looks', 'base_hash')


def require_no_run(path: Path) -> None:
    """Raises ConfigError if the directory of a new study holds a run."""
    if (path / 'config.json').exists():
        raise ConfigError(
            f'workdir={path} holds a run, not a study; give a study its own directory, or resume '
            'the run with train'
        )


def content(study: Study, arms: Sequence[PlannedArm]) -> dict[str, Any]:
    """The content of study.json in a new directory."""
    study = resolved(study)
    values = to_json(study)
    tuning = None
    matched = values.pop('match')
    if study.tuning.seeds:
        baseline = next(arm for arm in arms if arm.variant == study.baseline)
        grids = plan.grids(study, baseline)
        tuning = values['tuning'] | {f'{knob}s': grid for knob, grid in grids.items()}
    declared = values | {
        'variants': list(dict.fromkeys(a.key.variant for a in arms if a.key.control is None)),
        'matched': matched,
        'seeds': study.base.trials.seeds,
        # Once the seeds at interim analyses; part of the hash by which ledgers know a study.
        'looks': [len(study.base.trials.seeds)] if study.tuning.seeds else [],
        'tuning': tuning,
        'base_hash': fingerprint(study.base),
        'arms': [arm.key._asdict() for arm in arms],
        # Exports have this file as it is, and looks its hash: it names no directory of a user.
        'command': shlex.join(map(without_directories, command_line())),
    }
    return records.to_jsonable(declared)


def declare(path: Path, study: Study, arms: Sequence[PlannedArm]) -> dict[str, Any]:
    """Writes study.json and the ledger where they are not those of this study yet.

    Returns the content of study.json. Raises ConfigError if the directory holds another study, or a
    part of one.
    """
    declared = content(study, arms)
    file = path / 'study.json'
    entries = path / ledger.NAME
    with locked(path / 'lock'):
        stored.unpack_in_place(path)
        begun = any((path / name).exists() for name in (file.name, entries.name, 'runs'))
        earlier = records.read_json(file, {}) if file.exists() else None
        known = [declared]
        if earlier is not None:
            declared = _continued(file, study, earlier, declared)
            known = [earlier, declared]
        # A worker may have died between the two; then the ledger is ahead.
        if begun and ledger.read(entries).declaration not in map(ledger.digest, known):
            raise ConfigError(
                f'{file} is missing, or is not what {entries} declares last; restore both from a '
                'copy, or give another workdir'
            )
        _check_runs(path, study, arms)
        ledger.declare(path, declared, None if begun else _repeats(path, declared))
        if earlier is None or ledger.digest(earlier) != ledger.digest(declared):
            records.write_json(file, declared)
    return declared


def check(path: Path, study: Study, arms: Sequence[PlannedArm]) -> None:
    """Raises ConfigError where `declare` refuses the study; writes nothing."""
    require_no_run(path)
    require_chain(path, study, arms)
    file = path / 'study.json'
    if file.exists():
        _continued(file, study, records.read_json(file, {}), content(study, arms))
    _check_runs(path, study, arms)


def require_chain(path: Path, study: Study, arms: Sequence[PlannedArm]) -> None:
    """Raises ConfigError if a new study in `path` repeats one that it cannot repeat."""
    if study.repeats is not None and not (path / ledger.NAME).exists():
        _repeats(path, content(study, arms))


def _repeats(path: Path, declared: dict[str, Any]) -> dict[str, str] | None:
    """The declaration of what a study repeats; ConfigError where it cannot repeat that."""
    try:
        return chain.declared_repeat(path, declared)
    except (ReportError, RunDirectoryError) as error:
        raise ConfigError(f'repeats={declared["repeats"]!r}: {error}') from error


def _continued(
    file: Path, study: Study, earlier: dict[str, Any], declared: dict[str, Any]
) -> dict[str, Any]:
    """The new declaration with the earlier machine settings.

    Raises ConfigError if the earlier declaration has other settings, or unknown ones.
    """
    kind: Any = type(study)
    always = serialize.introduced('1', kind)
    later = {name: v for name, v in serialize.defaults(kind).items() if name not in always}
    try:
        records.check(earlier, records.STUDY)
        before: Config = from_json(Config, earlier['base'], 'base.')
    except UnknownFieldError as error:
        raise ConfigError(f'{file} has an {error}') from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise records.damaged(file, error, records.ADVICE) from error
    now: Config = with_machine_of(study.base, before)

    def fixed(record: dict[str, Any], base: Config) -> dict[str, Any]:
        """The settings that have to stay."""
        kept = {name: v for name, v in (later | record).items() if name not in EXTENSIBLE}
        return kept | {'base': dataclasses.asdict(base)}

    changes = [
        f'{name}: {value!r} is left out'
        for name in GROWING
        for value in earlier[name]
        if value not in declared[name]
    ][:1]
    changes += differences(fixed(earlier, before), fixed(declared, now))
    if changes:
        raise ConfigError(
            f'workdir={file.parent} holds a study with other settings:\n  '
            + '\n  '.join(changes)
            + '\nSet them back or give another workdir; a study may only gain variants, sizes and '
            'corpora.'
        )
    return declared | {'base': to_json(now)}


def _check_runs(path: Path, study: Study, arms: Sequence[PlannedArm]) -> None:
    """Raises ConfigError if a finished run is not in the plan that this version makes.

    Another version may match an arm to another size, or choose another setting; it would train the
    run again. RunDirectoryError for a damaged line of plan.jsonl.
    """
    file = path / 'plan.jsonl'
    if not file.exists():
        return
    advice = 'restore it from a copy, or remove it: it is then made again from the results'
    known = {run.id for run in plan.runs(study, arms, plan.results_in(path))}
    schema = {'run': str, 'directory': str, 'control': str | None}

    for record in records.read_lines(file, schema, advice, stored.check_run_directory):
        # Arms that are trained longer may be decided no more, once others are added.
        expected = record['run'] in known or record['control'] == LONGER
        if not expected and (path / record['directory'] / 'result.json').exists():
            raise ConfigError(
                f'this version of qkattn would train {record["directory"]} of workdir={path} '
                'again; use the version that trained it, or give another workdir'
            )
