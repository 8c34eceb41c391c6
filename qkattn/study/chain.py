"""The chain of a study: the study that it repeats, the study which that one repeats, and so on.

If a study leaves a question open, another study may repeat it with other seeds. The ledger of the
repeat names the repeated study and the hash of the last line of its ledger at that time.

A comparison that both studies make is pooled over their seeds. It is corrected for the arms of both
and tested at the error rate of a second look (`qkattn.stats.decision.level`).
"""

import dataclasses
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from qkattn.config import differences
from qkattn.config.serialize import OF_MACHINE
from qkattn.errors import ReportError
from qkattn.storage import ledger
from qkattn.storage.ledger import ArmKeys, Ledger, Repeat
from qkattn.storage.records import read_json
from qkattn.study.arm_key import SAME_SHAPE, ArmKey
from qkattn.study.family import primary_arms

# Committed studies of claims, by scale and name; not part of an installation.
COMMITTED = Path(__file__).parents[2] / 'experiments/results/claims'
# Settings that do not affect results.
HARMLESS = (
    'train.steps_per_dispatch',
    'train.log_every',
    'train.eval_every',
    'train.checkpoint_every',
    'train.lifting',
    'train.logits_chunk',
    'model.remat',
    'model.scan_unroll',
)
# A repeat has to share these fields of study.json with the study that it repeats. It may have other
# variants, seeds, learning rates and controls.
_EQUAL = ('baseline', 'sizes', 'corpora', 'margin')
# A repeat that matches its arms has to share these fields, too.
_EQUAL_IF_MATCHED = ('matched', 'destinations', 'fill', 'tolerance')
# The fields of study.json that this module reads.
_SCHEMA = {
    'base': dict,
    'baseline': str,
    'variants': tuple[str, ...],
    'sizes': tuple[str, ...],
    'destinations': tuple[str, ...],
    'matched': str | None,
    'seeds': tuple[int, ...],
}


def question(key: ArmKey, declared: Mapping[str, Any]) -> ArmKey:
    """Returns the question of an arm: a key that is equal in all studies of a chain that ask it.

    The variant of a question always names the destination of the saved parameters, even if the
    study has only one: the arm 'qk/no_o' of a study that matches d_model asks 'qk/no_o [d_model]'.
    An arm of a study without matching asks the same question as the same-shape control of a study
    with matching.

    `declared` has the fields `baseline`, `destinations` and `matched` of study.json.
    """
    if key.variant == declared['baseline']:
        return key
    if declared['matched'] is None:
        return key._replace(control=SAME_SHAPE)
    destinations = declared['destinations']
    if key.control == SAME_SHAPE or len(destinations) > 1:
        return key
    return key._replace(variant=f'{key.variant} [{destinations[0]}]')


@dataclasses.dataclass(frozen=True)
class Earlier:
    """An earlier study in the chain of a study."""

    repeat: Repeat
    path: Path | None  # its directory; None if it is lost
    seeds: frozenset[int]  # the seeds of its verdicts
    questions: frozenset[ArmKey]  # the questions of all arms that it ever declared
    family: frozenset[ArmKey]  # the questions of its primary arms, without the baseline
    expected: tuple[str, ...] = ()  # its positive controls

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.repeat.study


class _Pooled(NamedTuple):
    """What a study of a chain contributes to pooled comparisons."""

    name: str
    questions: frozenset[ArmKey]
    seeds: frozenset[int]


def earlier_studies(directory: Path, kept: Ledger, declared: Mapping[str, Any]) -> list[Earlier]:
    """Returns the earlier studies in the chain of a study: first those that it repeats itself.

    `kept` is the ledger of the study, `declared` its study.json. Raises ReportError if

    - the chain has a circle;
    - a study of the chain is missing, or its ledger is damaged or not the one that was declared;
    - two studies of the chain ask the same question with the same seed.
    """
    name = declared.get('repeats')
    if name is not None and name not in [repeat.study for repeat in kept.repeats]:
        raise ReportError(
            f'{directory / "study.json"} repeats {name!r}, which '
            f'{directory / ledger.NAME} does not declare; {ledger.ADVICE}'
        )
    if not kept.repeats:
        return []
    chain: dict[str, Earlier] = {}
    for earlier in _followed(directory, kept, declared, (directory.resolve(),)):
        chain.setdefault(earlier.repeat.entry, earlier)

    # Each comparison of this study is pooled over the seeds of all studies. So two studies that ask
    # the same question must not share a seed.
    compared = frozenset(
        key for key in _questions(kept.arms, declared) if key.variant != declared['baseline']
    )
    pools = [_Pooled(directory.name, compared, frozenset(declared['seeds']))]
    for earlier in chain.values():
        if earlier.path is not None:
            pools.append(_Pooled(earlier.name, earlier.questions & compared, earlier.seeds))
    for first, second in combinations(pools, 2):
        shared_seeds = sorted(first.seeds & second.seeds)
        if shared_seeds and first.questions & second.questions:
            raise ReportError(
                f'{first.name} and {second.name}, of the chain of {directory}, share the seeds '
                f'{tuple(shared_seeds)}; a repeat needs other seeds'
            )
    return list(chain.values())


def _followed(
    directory: Path, kept: Ledger, declared: Mapping[str, Any], later: tuple[Path, ...]
) -> list[Earlier]:
    """Returns the studies that the study in `directory` repeats, then those that these repeat, etc.

    `later` are the directories on the path from the first study of the search to this one, both
    included. A repeated study that is in `later` closes a circle.
    """
    repeated = [_opened(directory, kept, repeat, declared) for repeat in kept.repeats]
    studies = list(repeated)
    for earlier in repeated:
        if earlier.path is None:
            continue
        if earlier.path.resolve() in later:
            names = ' -> '.join(path.name for path in (*later, earlier.path))
            raise ReportError(f'{directory / ledger.NAME} closes a circle of repeats: {names}')
        studies += _followed(
            earlier.path,
            ledger.read(earlier.path / ledger.NAME),
            read_json(earlier.path / 'study.json', _SCHEMA),
            (*later, earlier.path.resolve()),
        )
    return studies


def _opened(directory: Path, kept: Ledger, repeat: Repeat, declared: Mapping[str, Any]) -> Earlier:
    """Reads a study that the study in `directory` repeats.

    If the repeated study is lost, the ledger of the study that repeats it describes it. `kept` and
    `declared` are the ledger and study.json of the study in `directory`.
    """
    if repeat.is_lost:
        return Earlier(
            repeat,
            path=None,
            seeds=frozenset(repeat.seeds),
            questions=_questions(repeat.arms, declared),
            family=_family(repeat.arms, declared),
        )
    paths = directories_of(repeat.study, directory)
    if not paths:
        raise ReportError(
            f'{directory} repeats the study {repeat.study!r}, which is neither at '
            f'{directory.parent / repeat.study} nor in {COMMITTED}; copy it there'
        )
    for path in paths:
        ledger_there = ledger.read(path / ledger.NAME)
        hashes = [entry['hash'] for entry in ledger_there.entries]
        if repeat.entry in hashes:
            declared_there = read_json(path / 'study.json', _SCHEMA)
            return Earlier(
                repeat,
                path,
                seeds=frozenset(declared_there['seeds']),
                questions=_questions(ledger_there.arms, declared_there),
                family=_family(ledger_there.arms, declared_there),
                expected=tuple(declared_there.get('expected', ())),
            )
    raise ReportError(
        f'{directory / ledger.NAME} repeats {repeat.study!r} as of the entry {repeat.entry[:12]}, '
        f'which {paths[0] / ledger.NAME} does not have; restore both from a copy'
    )


def _questions(arms: ArmKeys, declared: Mapping[str, Any]) -> frozenset[ArmKey]:
    """Returns the questions of arms of a study; `declared` is its study.json."""
    return frozenset(question(ArmKey(*key), declared) for key in arms)


def _family(arms: ArmKeys, declared: Mapping[str, Any]) -> frozenset[ArmKey]:
    """Returns the questions of the primary arms, without the baseline."""
    primary = primary_arms([ArmKey(*key) for key in arms], declared['baseline'])
    return frozenset(question(key, declared) for key in primary)


def directories_of(name: str, directory: Path) -> list[Path]:
    """Finds the studies with a name: beside `directory`, and among the committed studies."""
    paths = [directory.parent / name, *sorted(COMMITTED.glob(f'*/{name}'))]
    return [path for path in paths if (path / 'study.json').is_file()]


def declared_repeat(path: Path, declared: Mapping[str, Any]) -> dict[str, str] | None:
    """Returns what the ledger of a new study declares about the study that it repeats.

    `path` is the directory of the new study, `declared` its study.json. The result is {'study':
    name, 'entry': hash of the last line of its ledger}, or None if the new study repeats none.
    Raises ReportError with the reason if it cannot repeat that study.
    """
    name = declared.get('repeats')
    if name is None:
        return None
    valid = 'give the name of a study beside the workdir, or of one in experiments/results/claims'
    if name in ('.', '..') or Path(name).name != name:
        raise ReportError(f'{name!r} is no name of a directory; {valid}')
    if name == path.name:
        raise ReportError(f'a study does not repeat itself; {valid}')
    candidates = directories_of(name, path)
    if not candidates:
        raise ReportError(
            f'there is no study {name!r} in {path.parent}, nor in experiments/results/claims; '
            f'{valid}'
        )
    repeatable: list[Path] = []
    reasons: list[str] = []
    for candidate in candidates:
        reason = _why_not_repeatable(declared, candidate)
        if reason is None:
            repeatable.append(candidate)
        else:
            reasons.append(reason)
    if not repeatable:
        raise ReportError(reasons[0])

    repeated = repeatable[0]
    ledger_there = ledger.read(repeated / ledger.NAME)
    declared_there = read_json(repeated / 'study.json', _SCHEMA)
    chain = earlier_studies(repeated, ledger_there, declared_there)
    used_seeds = set(declared_there['seeds'])
    for earlier in chain:
        used_seeds |= earlier.seeds
    shared_seeds = sorted(used_seeds.intersection(declared['seeds']))
    if shared_seeds:
        raise ReportError(
            f'the verdicts of {name!r}, or of a study that it repeats, have the seeds '
            f'{tuple(shared_seeds)}, too; trials.seeds={tuple(declared["seeds"])} must be others'
        )
    paths_of_chain = [earlier.path.resolve() for earlier in chain if earlier.path is not None]
    if path.resolve() in paths_of_chain:
        raise ReportError(f'{name!r} repeats this study, which would close a circle')
    return {'study': name, 'entry': ledger_there.last}


def _why_not_repeatable(declared: Mapping[str, Any], path: Path) -> str | None:
    """Returns why a study cannot repeat the one in `path`; None if it can."""
    declared_there = read_json(path / 'study.json', _SCHEMA)
    changes = differences(
        _settings_to_keep(declared_there, declared), _settings_to_keep(declared, declared)
    )
    if changes:
        return (
            f'{path} differs in {"; ".join(changes)}; a repeat may differ in variants, seeds, '
            'learning rates, tuning and controls'
        )
    variants = set(declared['variants']) - {declared['baseline']}
    if not variants.intersection(declared_there['variants']):
        return (
            f'{path} compares none of the variants {", ".join(declared["variants"])} with '
            f'{declared["baseline"]}; it has {", ".join(declared_there["variants"])}'
        )
    return None


def _settings_to_keep(study: Mapping[str, Any], repeat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of `study` that `repeat` and the study it repeats have to share.

    Both arguments are contents of study.json. The variants of a repeat without matching correspond
    to the same-shape controls of a study with matching. So for such a repeat it does not matter how
    the repeated study matches.
    """
    names = [*_EQUAL]
    if repeat['matched'] is not None:
        names += _EQUAL_IF_MATCHED
    settings = {name: study[name] for name in names}

    # The base config without trials, harmless settings and those of the machine.
    base = {section: fields for section, fields in study['base'].items() if section != 'trials'}
    for name in (*HARMLESS, *OF_MACHINE):
        section, _, field = name.partition('.')
        if not field:
            base.pop(section, None)
        elif isinstance(base.get(section), Mapping):
            fields = dict(base[section])
            fields.pop(field, None)
            base[section] = fields
    settings['base'] = base
    return settings
