"""The chain of a study: the study that it repeats, the one that that repeats, and so on.

A study that is left open may be repeated with other seeds. The ledger of the repeat then names the
repeated study and the hash of the last line of its ledger at that time. Their questions are one
chain: what is compared in both is pooled, corrected for the arms of both, and tested at the error
rate of a second look (`qkattn.stats.decision.level`).
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
# Fields of study.json in which a repeat equals the study that it repeats. The others say which
# variants, seeds, rates and controls there are.
_EQUAL = ('baseline', 'sizes', 'corpora', 'margin')
# Those in which they are equal, too, where the repeat matches its arms.
_EQUAL_IF_MATCHED = ('matched', 'destinations', 'fill', 'tolerance')
# The fields of study.json that are read here.
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
    """What an arm of a study asks: the same key in every study of a chain that asks it.

    Its variant names the destination of the saved parameters, also where the study has only one:
    'qk/no_o' of a study that matches d_model asks 'qk/no_o [d_model]'. A variant that is not
    matched asks what the same-shape control of a study that matches does. `declared` has the
    fields `baseline`, `destinations` and `matched` of study.json.
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
    """A study that another one repeats, or that is repeated by one that it repeats."""

    repeat: Repeat
    path: Path | None  # its directory; None of a study that is not kept
    seeds: frozenset[int]  # of its verdicts
    questions: frozenset[ArmKey]  # of every arm that it ever declared
    family: frozenset[ArmKey]  # those of its primary arms but the baseline
    expected: tuple[str, ...] = ()  # its positive controls

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.repeat.study


class _Pooled(NamedTuple):
    """What a study of a chain adds to a pool of seeds."""

    name: str
    questions: frozenset[ArmKey]
    seeds: frozenset[int]


def earlier_studies(directory: Path, kept: Ledger, declared: Mapping[str, Any]) -> list[Earlier]:
    """The studies of the chain of a study before it, the ones that it repeats itself first.

    `kept` is its ledger, `declared` its study.json. ReportError where the chain has a circle, where
    one of its studies is missing or has a damaged ledger, where a ledger is not the one that was
    declared, and where two studies ask the same question with the same seed.
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

    # Of what this study compares, the seeds of all studies are pooled, so they are different ones.
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
    """The studies that the one in `directory` repeats, then those that these repeat, and so on.

    `later` are the directories on the way from the first study of the search to this one, both
    included: a study that is among them closes a circle.
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
    """A repeated study as its own ledger declares it, or, if it is lost, that of the repeat.

    `directory`, `kept` and `declared` are those of the study that repeats it.
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
    """The questions of arms of a study; `declared` is its study.json."""
    return frozenset(question(ArmKey(*key), declared) for key in arms)


def _family(arms: ArmKeys, declared: Mapping[str, Any]) -> frozenset[ArmKey]:
    """The questions of the primary arms but the baseline."""
    primary = primary_arms([ArmKey(*key) for key in arms], declared['baseline'])
    return frozenset(question(key, declared) for key in primary)


def directories_of(name: str, directory: Path) -> list[Path]:
    """The directories of studies of a name: beside `directory`, and committed at each scale."""
    paths = [directory.parent / name, *sorted(COMMITTED.glob(f'*/{name}'))]
    return [path for path in paths if (path / 'study.json').is_file()]


def declared_repeat(path: Path, declared: Mapping[str, Any]) -> dict[str, str] | None:
    """What the ledger of a new study in `path` declares: {study, entry}; None if it repeats none.

    `declared` is its study.json. ReportError with the reason if it cannot repeat that study.
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
    """Why a study cannot repeat the one in `path`; None if it can."""
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
    """The settings of `study` in which a repeat equals the repeated study; both are study.json.

    A repeat without a match has variants at the baseline's shape, which are controls of a study
    that matches, so whether and how the repeated study matches does not matter.
    """
    names = _EQUAL if repeat['matched'] is None else (*_EQUAL, *_EQUAL_IF_MATCHED)
    settings = {name: study[name] for name in names}
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
