"""study.json: the declaration of a study before its first run, and checks that a directory fits it.

A directory keeps the settings that its study began with; variants, sizes and corpora may grow. Any
other change takes a flag, and the ledger lists it. No run continues with settings other than its
own: changed settings make new runs. So do added seeds, and `history` in study.json distinguishes
them from earlier ones.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
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
from qkattn.errors import ConfigError, UnknownFieldError
from qkattn.storage import ledger
from qkattn.storage.leases import locked
from qkattn.storage.records import ARM_KEY, STUDY, check, damaged, parse_json, read_json, write_json
from qkattn.study import plan, stored
from qkattn.study.arm_key import ArmKey
from qkattn.study.plan import PlannedRun

# Fields of study.json that may gain values when a directory is used again, and those that may
# differ altogether; those that follow from the base; and those that tell runs of a plan apart.
GROWING = ('variants', 'sizes', 'corpora', 'arms')
EXTENSIBLE = (*GROWING, 'question', 'command')
DERIVED = ('seeds', 'base_hash')
KEY = (*ArmKey._fields, 'stage', 'knob')


def require_no_run(path: Path) -> None:
    """Raises ConfigError if the directory of a new study holds a run."""
    if (path / 'config.json').exists():
        raise ConfigError(
            f'workdir={path} holds a run, not a study; give a study its own directory, or go on '
            'with the run by train'
        )


def declare(
    path: Path,
    study: Study,
    declared: dict[str, Any],
    replaced: Sequence[str],
    accept_changes: bool,
) -> None:
    """Writes study.json and the ledger where they are not those of this study yet.

    `declared` is the content of study.json, `replaced` what the function of this name gives for the
    runs that are left. With `accept_changes` settings may change; the ledger keeps each change.
    Raises ConfigError if the directory holds another study, or a part of one.
    """
    with locked(path / 'lock'):
        stored.unpack_in_place(path)
        file, entries = path / 'study.json', path / ledger.NAME
        earlier = read_json(file, {}) if file.exists() else None
        changes: list[str] = []
        known = {ledger.digest(declared)}
        if earlier is not None:
            declared, changes, gone = _extended(file, study, earlier, declared)
            changes = changes or list(replaced)
            if gone or (changes and not accept_changes):
                flag = (
                    ', or add --accept_changes: the ledger then lists these changes, seeds that '
                    'are added are trained alone, and runs of other settings are trained beside '
                    'those of before, which are kept'
                )
                if entries.exists() and ledger.read(entries).marks(declared):
                    flag += '; as results were looked at, no arm gets a verdict then'
                raise ConfigError(
                    f'workdir={path} holds a study of other settings:\n  '
                    + '\n  '.join([*changes, *gone])
                    + f'\nSet them back or give another workdir{"" if gone else flag}.'
                )
            known = {ledger.digest(earlier), ledger.digest(declared)}
        # A worker may have died between the two; then the ledger is ahead.
        lost = earlier is None and (path / 'runs').exists()
        begun = earlier is not None or entries.exists()
        if lost or (begun and ledger.read(entries).declaration not in known):
            raise ConfigError(
                f'{file} is missing, or is not what {entries} declares last; restore both from a '
                'copy, or give another workdir'
            )
        ledger.declare(path, declared, changes)
        if earlier is None or ledger.digest(earlier) != ledger.digest(declared):
            write_json(file, declared)


def history(path: Path, study: Study) -> plan.History:
    """The history of a study in its directory, where it may have had other settings.

    Raises RunDirectoryError if study.json is damaged.
    """
    file = path / 'study.json'
    if not file.exists():
        return plan.history(study)
    earlier, ints = read_json(file, {}), tuple[int, ...]
    try:
        fields = {'margin': float, 'seeds': ints, 'looks': ints, 'controls': {'longer_seeds': ints}}
        check(earlier, fields)
        return plan.history(study, earlier)
    except ValueError as error:
        raise damaged(file, error) from error


def check_continued(path: Path, study: Study, declared: dict[str, Any]) -> None:
    """Raises ConfigError if another worker has changed the settings in the meantime."""
    file = path / 'study.json'
    if changes := _extended(file, study, read_json(file, {}), declared)[1]:
        raise ConfigError(
            f'another worker goes on with other settings of the study in {path}, by '
            f'--accept_changes: {"; ".join(changes)}'
        )


def _extended(
    file: Path, study: Study, earlier: Any, declared: dict[str, Any]
) -> tuple[dict[str, Any], list[str], list[str]]:
    """The new declaration with the earlier machine settings, the changes, and what is left out.

    Raises ConfigError if the earlier declaration has settings that are unknown here.
    """
    kind: Any = type(study)
    defaults, always = serialize.defaults(kind), serialize.introduced('1', kind)
    later = {name: value for name, value in defaults.items() if name not in always}
    kept = history(file.parent, study)
    earlier = later | {name: value for name, value in earlier.items() if name != 'history'}
    if unlike := (declared.keys() - earlier.keys()) or (earlier.keys() - (later | declared).keys()):
        has = 'a field' if min(unlike) in earlier else 'no field'
        raise ConfigError(
            f'{file} has {has} {min(unlike)!r}, so it is not the declaration of a study that can '
            'be continued; use the version of qkattn that wrote it, or give another workdir'
        )
    try:
        check(earlier, STUDY)
        before: Config = from_json(type(study.base), earlier['base'], 'base.')
    except UnknownFieldError as error:
        raise ConfigError(f'{file} has an {error}') from error
    except ValueError as error:  # a ConfigError, too
        raise damaged(file, error) from error
    now: Config = with_machine_of(study.base, before)
    gone = [
        f'{name}: {value!r} is left out, but {name} may only grow'
        for name in GROWING
        for value in earlier[name]
        if value not in declared[name]
    ]

    def compared(fields: Mapping[str, Any], base: Config) -> dict[str, Any]:
        kept = {name: v for name, v in fields.items() if name not in (*EXTENSIBLE, *DERIVED)}
        return kept | {'base': dataclasses.asdict(base)}

    changes = differences(compared(earlier, before), compared(later | declared, now))
    added = {} if kept == plan.history(study) else {'history': dataclasses.asdict(kept)}
    return declared | {'base': to_json(now)} | added, changes, gone[:1]


def planned(path: Path) -> dict[str, dict[str, Any]]:
    """The lines of plan.jsonl by the fingerprint of their config.

    Raises RunDirectoryError for a damaged line, as a run may be missed that has a result, and
    ConfigError for a config with a field that this version does not know.
    """
    file = path / 'plan.jsonl'
    try:
        lines = file.read_bytes().splitlines() if file.exists() else []
        return dict(map(_parsed, lines))
    except UnknownFieldError as error:
        raise ConfigError(f'{file} has an {error}') from error
    except (OSError, ValueError) as error:
        advice = 'restore it from a copy, or remove it: it is then made again from the results'
        raise damaged(file, error, advice) from error


@functools.cache
def _parsed(line: bytes) -> tuple[str, dict[str, Any]]:
    record = parse_json(line)
    check(record, ARM_KEY | {'stage': str, 'knob': str | None, 'directory': str, 'config': dict})
    try:
        return fingerprint(from_json(Config, record['config'])), record
    except UnknownFieldError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f'the config of run {record["directory"]} cannot be read') from error


def replaced(path: Path, runs: Sequence[PlannedRun], left: Sequence[PlannedRun]) -> list[str]:
    """Differences in settings between new runs and the finished runs that they replace.

    `runs` is the whole plan; those in `left` have no result.
    """
    ids = {run.id for run in runs}
    again = {(*run.arm.key, run.stage, run.knob): run for run in reversed(left)}
    changes = []
    for name, line in planned(path).items():
        if name in ids or not (path / line['directory'] / 'result.json').exists():
            continue
        if (run := again.pop(tuple(line[field] for field in KEY), None)) is not None:
            old = from_json(Config, line['config'])
            new = with_machine_of(run.config, old)
            differing = differences(dataclasses.asdict(old), dataclasses.asdict(new))
            changes += [f'{line["directory"]}: {change}' for change in differing]
    return changes
