"""The chain of a study: the study that it repeats, the one that that repeats, and so on.

A study that is left open may be repeated with other seeds. The ledger of the repeat then names the
repeated study and the hash of the last line of its ledger at that time. Their questions are one
chain: what is compared in both is pooled, corrected for the arms of both, and tested at the error
rate of a second look (`qkattn.stats.decision.level`).
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from qkattn.config import differences
from qkattn.config.serialize import OF_MACHINE
from qkattn.errors import ReportError
from qkattn.storage import ledger
from qkattn.storage.ledger import Ledger, Repeat
from qkattn.storage.records import read_json
from qkattn.study.arm_key import SAME_SHAPE, ArmKey
from qkattn.study.family import primary_arms

# Committed studies of claims, by scale and name; not part of an installation.
COMMITTED = Path(__file__).parents[2] / 'experiments/results/claims'
# Settings that do not affect results.
HARMLESS = (
    *('train.steps_per_dispatch', 'train.log_every', 'train.eval_every', 'train.checkpoint_every'),
    *('train.lifting', 'train.logits_chunk', 'model.remat', 'model.scan_unroll'),
)
# Fields of study.json in which a repeat equals the study that it repeats. The others say which
# variants, seeds, rates and controls there are.
_EQUAL = ('baseline', 'sizes', 'corpora', 'margin')
_OF_MATCH = ('matched', 'destinations', 'fill', 'tolerance')
_STUDY = {
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

    Its variant names the destination of the saved parameters, also where the study has only one. A
    variant that is not matched is the same-shape control of a study that matches. `declared`
    has the fields `baseline`, `destinations` and `matched` of study.json.
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


def earlier_studies(directory: Path, kept: Ledger, declared: Mapping[str, Any]) -> list[Earlier]:
    """The studies of the chain of a study before it, the ones that it repeats itself first.

    `kept` is its ledger, `declared` its study.json. ReportError where the chain has a circle, where
    one of its studies is missing or has a damaged ledger, where a ledger is not the one that was
    declared, and where two studies ask the same question with the same seed.
    """
    if declared.get('repeats') not in (None, *(repeat.study for repeat in kept.repeats)):
        raise ReportError(
            f'{directory / "study.json"} repeats {declared["repeats"]!r}, which '
            f'{directory / ledger.NAME} does not declare; {ledger.ADVICE}'
        )
    if not kept.repeats:
        return []
    chain: dict[str, Earlier] = {}
    for one in _follow(directory, kept, declared, (directory.resolve(),)):
        chain.setdefault(one.repeat.entry, one)
    # Of what this study compares, too, all seeds are pooled, so they are different ones.
    asked = {question(ArmKey(*key), declared) for key in kept.arms}
    compared = frozenset(key for key in asked if key.variant != declared['baseline'])
    studies = [(directory.name, compared, frozenset(declared['seeds']))]
    for one in chain.values():
        if one.path is not None:
            studies.append((one.name, one.questions & compared, one.seeds))
    for (name, asked_here, seeds), (other, asked_there, others) in combinations(studies, 2):
        shared = sorted(seeds & others)
        if shared and asked_here & asked_there:
            raise ReportError(
                f'{name} and {other}, of the chain of {directory}, share the seeds '
                f'{tuple(shared)}; a repeat needs other seeds'
            )
    return list(chain.values())


def _follow(
    directory: Path, kept: Ledger, declared: Mapping[str, Any], later: tuple[Path, ...]
) -> Iterator[Earlier]:
    """The studies that a study repeats, then those that these repeat; `later` are on the way."""
    known = [(repeat, _opened(directory, kept, repeat, declared)) for repeat in kept.repeats]
    yield from (one for _, one in known)
    for _, one in known:
        if one.path is None:
            continue
        if one.path.resolve() in later:
            names = ' -> '.join(path.name for path in (*later, one.path))
            raise ReportError(f'{directory / ledger.NAME} closes a circle of repeats: {names}')
        there = read_json(one.path / 'study.json', _STUDY)
        below = ledger.read(one.path / ledger.NAME)
        yield from _follow(one.path, below, there, (*later, one.path.resolve()))


def _opened(directory: Path, kept: Ledger, repeat: Repeat, declared: Mapping[str, Any]) -> Earlier:
    """A repeated study as its own ledger declares it, or, if it is lost, that of the repeat."""
    if repeat.is_lost:
        questions = frozenset(question(ArmKey(*key), declared) for key in repeat.arms)
        family = _family(questions, repeat.arms, declared)
        return Earlier(repeat, None, frozenset(repeat.seeds), questions, family)
    paths = places(repeat.study, directory)
    if not paths:
        raise ReportError(
            f'{directory} repeats the study {repeat.study!r}, which is neither at '
            f'{directory.parent / repeat.study} nor in {COMMITTED}; copy it there'
        )
    for path in paths:
        ledger_there = ledger.read(path / ledger.NAME)
        if repeat.entry in {entry['hash'] for entry in ledger_there.entries}:
            return _earlier(repeat, path, ledger_there)
    raise ReportError(
        f'{directory / ledger.NAME} repeats {repeat.study!r} as of the entry {repeat.entry[:12]}, '
        f'which {paths[0] / ledger.NAME} does not have; restore both from a copy'
    )


def _earlier(repeat: Repeat, path: Path, kept: Ledger) -> Earlier:
    declared = read_json(path / 'study.json', _STUDY)
    questions = frozenset(question(ArmKey(*key), declared) for key in kept.arms)
    return Earlier(
        repeat,
        path,
        frozenset(declared['seeds']),
        questions,
        _family(questions, kept.arms, declared),
        tuple(declared.get('expected', ())),
    )


def _family(
    questions: Iterable[ArmKey], arms: Iterable[tuple[str | None, ...]], declared: Mapping[str, Any]
) -> frozenset[ArmKey]:
    """The questions of primary arms but the baseline."""
    keys = [ArmKey(*key) for key in arms]
    primary = primary_arms(keys, declared['baseline'])
    asked = frozenset(question(key, declared) for key in primary)
    return asked.intersection(questions)


def places(name: str, directory: Path) -> list[Path]:
    """The directories of studies of a name: beside `directory`, and committed at each scale."""
    paths = [directory.parent / name, *sorted(COMMITTED.glob(f'*/{name}'))]
    return [path for path in paths if (path / 'study.json').is_file()]


def declared_repeat(path: Path, declared: Mapping[str, Any]) -> dict[str, str] | None:
    """What the ledger of a new study in `path` declares: {study, entry}; None if it repeats none.

    `declared` is its study.json. ReportError with the reason if it cannot repeat that study.
    """
    if (name := declared.get('repeats')) is None:
        return None
    valid = 'give the name of a study beside the workdir, or of one in experiments/results/claims'
    if name in ('.', '..') or Path(name).name != name:
        raise ReportError(f'{name!r} is no name of a directory; {valid}')
    if name == path.name:
        raise ReportError(f'a study does not repeat itself; {valid}')
    paths = places(name, path)
    if not paths:
        raise ReportError(
            f'there is no study {name!r} in {path.parent}, nor in experiments/results/claims; '
            f'{valid}'
        )
    problems = {there: problem(declared, there) for there in paths}
    fitting = [there for there, why in problems.items() if why is None]
    if not fitting:
        raise ReportError(problems[paths[0]] or '')
    kept = ledger.read(fitting[0] / ledger.NAME)
    there = read_json(fitting[0] / 'study.json', _STUDY)
    chain = earlier_studies(fitting[0], kept, there)
    used = frozenset(there['seeds']).union(*(one.seeds for one in chain))
    own = set(declared['seeds'])
    if shared := sorted(own & used):
        raise ReportError(
            f'the verdicts of {name!r}, or of a study that it repeats, have the seeds '
            f'{tuple(shared)}, too; trials.seeds={tuple(declared["seeds"])} must be others'
        )
    if any(one.path and one.path.resolve() == path.resolve() for one in chain):
        raise ReportError(f'{name!r} repeats this study, which would close a circle')
    return {'study': name, 'entry': kept.last}


def problem(declared: Mapping[str, Any], path: Path) -> str | None:
    """Why a study cannot repeat the one in `path`; None if it can."""
    there = read_json(path / 'study.json', _STUDY)
    if changes := differences(_settings(there, declared), _settings(declared, declared)):
        return (
            f'{path} differs in {"; ".join(changes)}; a repeat may differ in variants, seeds, '
            'learning rates, tuning and controls'
        )
    shared = {*declared['variants']} & {*there['variants']} - {declared['baseline']}
    if not shared:
        return (
            f'{path} compares none of the variants {", ".join(declared["variants"])} with '
            f'{declared["baseline"]}; it has {", ".join(there["variants"])}'
        )
    return None


def _settings(declared: Mapping[str, Any], repeat: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in which a repeat equals the repeated study.

    A repeat without a match has variants at the baseline's shape, which are controls of a study
    that matches.
    """
    names = _EQUAL if repeat['matched'] is None else (*_EQUAL, *_OF_MATCH)
    settings = {name: declared[name] for name in names}
    base = {name: value for name, value in declared['base'].items() if name != 'trials'}
    for name in (*HARMLESS, *OF_MACHINE):
        section, _, field = name.partition('.')
        if not field:
            base.pop(section, None)
        elif isinstance(base.get(section), Mapping):
            base[section] = {n: v for n, v in base[section].items() if n != field}
    return settings | {'base': base}
