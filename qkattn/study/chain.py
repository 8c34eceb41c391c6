"""The chain of a study: the study that it repeats, then the study repeated by that one, and so on.

If a study leaves a question open, another study may repeat it with other seeds. The ledger of the
repeat names the repeated study and the hash of the last line of its ledger at that time.

A comparison that both studies make is pooled over their seeds. It is corrected for the arms of both
and tested at the error rate of a second look (`qkattn.stats.decision.level`).
"""

import dataclasses
from collections.abc import Mapping, Sequence
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
    """Returns the question that an arm asks: a key by which arms of several studies are compared.

    Two studies may write the same arm in different ways. For example, a study that spends saved
    parameters only on d_model has the arm 'qk/no_o'. A study that spends them on d_model or on d_ff
    calls the same arm 'qk/no_o [d_model]'. Both ask 'qk/no_o [d_model]'. There are three cases:

    - The label of the arm lacks the destination of the saved parameters, because its study has only
      one. The question adds it.
    - The study matches no cost, so the arm has the shape of the baseline. Its question is that of a
      same-shape control in a study that matches.
    - All other arms, and baselines: the question is the key of the arm.

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
    questions: frozenset[ArmKey]  # those that the last study of the chain asks, too
    seeds: frozenset[int]


def earlier_studies(
    directory: Path, study_ledger: Ledger, declared: Mapping[str, Any]
) -> list[Earlier]:
    """Returns the earlier studies in the chain of a study.

    If study A repeats B, and B repeats C, the result for A is [B, C].

    Args:
        directory: The directory of the study.
        study_ledger: Its ledger.
        declared: The content of its study.json.

    Raises ReportError if

    - the chain has a circle;
    - a study of the chain is missing, or its ledger is damaged or not the one that was declared;
    - two studies of the chain ask the same question with the same seed.
    """
    name = declared.get('repeats')
    if name is not None and name not in [repeat.study for repeat in study_ledger.repeats]:
        raise ReportError(
            f'{directory / "study.json"} repeats {name!r}, which '
            f'{directory / ledger.NAME} does not declare; {ledger.ADVICE}'
        )
    if not study_ledger.repeats:
        return []

    # If several studies of the chain repeat the same study, it is listed once. The hash of the last
    # line of its ledger (`repeat.entry`) identifies it.
    chain: dict[str, Earlier] = {}
    for earlier in _all_repeated(directory, study_ledger, declared, (directory.resolve(),)):
        chain.setdefault(earlier.repeat.entry, earlier)
    _require_different_seeds(directory, study_ledger, declared, list(chain.values()))
    return list(chain.values())


def _require_different_seeds(
    directory: Path,
    study_ledger: Ledger,
    declared: Mapping[str, Any],
    repeated_studies: Sequence[Earlier],
) -> None:
    """Raises ReportError if two studies of a chain ask the same question with the same seed.

    Seeds of all studies that ask a question are pooled, so no seed may count twice. Only questions
    that the last study of the chain asks are pooled.

    Args:
        directory: The directory of the last study.
        study_ledger: Its ledger.
        declared: The content of its study.json.
        repeated_studies: The studies that it repeats, and those that they repeat.
    """
    questions = _questions(study_ledger.arms, declared)
    compared = frozenset(key for key in questions if key.variant != declared['baseline'])

    # What each study adds to the pooled comparisons. Seeds of lost studies are not pooled.
    pools = [_Pooled(directory.name, compared, frozenset(declared['seeds']))]
    for earlier in repeated_studies:
        if earlier.path is not None:
            pools.append(_Pooled(earlier.name, earlier.questions & compared, earlier.seeds))
    for first, second in combinations(pools, 2):
        shared_seeds = sorted(first.seeds & second.seeds)
        shared_questions = first.questions & second.questions
        if shared_seeds and shared_questions:
            raise ReportError(
                f'{first.name} and {second.name}, of the chain of {directory}, share the seeds '
                f'{tuple(shared_seeds)}; a repeat needs other seeds'
            )


def _all_repeated(
    directory: Path, study_ledger: Ledger, declared: Mapping[str, Any], route: tuple[Path, ...]
) -> list[Earlier]:
    """Returns the studies that a study repeats, followed by the studies that those repeat.

    If A repeats B, and B repeats C, the result for A is [B, C]. If two studies repeat the same
    study, it appears twice.

    Args:
        directory: The directory of the study.
        study_ledger: Its ledger.
        declared: The content of its study.json.
        route: The directories of the studies on the way from the first study to this one, both
            included. When the function calls itself for B, this is (A, B).

    Raises:
        ReportError: A repeated study is on the route, so the repeats form a circle; or it cannot be
            read.
    """
    repeated = [_repeated_study(directory, repeat, declared) for repeat in study_ledger.repeats]
    studies = list(repeated)
    for earlier in repeated:
        if earlier.path is None:
            continue  # the study is lost, so what it repeats is not known
        if earlier.path.resolve() in route:
            names = ' -> '.join(path.name for path in (*route, earlier.path))
            raise ReportError(f'{directory / ledger.NAME} closes a circle of repeats: {names}')
        studies += _all_repeated(
            earlier.path,
            ledger.read(earlier.path / ledger.NAME),
            read_json(earlier.path / 'study.json', _SCHEMA),
            (*route, earlier.path.resolve()),
        )
    return studies


def _repeated_study(directory: Path, repeat: Repeat, declared: Mapping[str, Any]) -> Earlier:
    """Finds and reads a study that another study repeats.

    Args:
        directory: The directory of the study that repeats it.
        repeat: What the ledger in `directory` says about the repeated study: its name, and the
            hash of the last line of its ledger at that time (`repeat.entry`).
        declared: The content of study.json in `directory`.

    Raises:
        ReportError: The repeated study is not found, or its ledger has no line with that hash.
    """
    # The files of a lost study are gone. Its seeds and arms are known from `repeat`.
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

    # Several studies may have this name. The hash tells which one was repeated.
    for path in paths:
        repeated_ledger = ledger.read(path / ledger.NAME)
        hashes = [entry['hash'] for entry in repeated_ledger.entries]
        if repeat.entry in hashes:
            repeated = read_json(path / 'study.json', _SCHEMA)
            return Earlier(
                repeat,
                path,
                seeds=frozenset(repeated['seeds']),
                questions=_questions(repeated_ledger.arms, repeated),
                family=_family(repeated_ledger.arms, repeated),
                expected=tuple(repeated.get('expected', ())),
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

    # Several studies may have this name. The first one that can be repeated is chosen.
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

    # No study of the chain may have a seed of this study, or be this study.
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
    """Returns why a study cannot repeat the one in `path`; None if it can.

    `declared` is the content of study.json of the study that would repeat it.
    """
    candidate = read_json(path / 'study.json', _SCHEMA)
    are_matched = declared['matched'] is not None
    changes = differences(
        _settings_to_share(candidate, are_matched), _settings_to_share(declared, are_matched)
    )
    if changes:
        return (
            f'{path} differs in {"; ".join(changes)}; a repeat may differ in variants, seeds, '
            'learning rates, tuning and controls'
        )
    compared = set(declared['variants']) - {declared['baseline']}
    if not compared.intersection(candidate['variants']):
        return (
            f'{path} compares none of the variants {", ".join(declared["variants"])} with '
            f'{declared["baseline"]}; it has {", ".join(candidate["variants"])}'
        )
    return None


def _settings_to_share(study: Mapping[str, Any], are_matched: bool) -> dict[str, Any]:
    """Returns the settings that have to be equal in a repeat and in the study that it repeats.

    Args:
        study: The content of study.json of either study.
        are_matched: Whether the repeat matches its arms in cost. If not, all arms that are compared
            have the baseline's shape, so the two studies need not match in the same way.
    """
    names = [*_EQUAL]
    if are_matched:
        names += _EQUAL_IF_MATCHED
    settings = {name: study[name] for name in names}

    # The base config has to be equal, too, except for some settings: the trials, a whole section
    # such as 'mesh', or a field of a section such as 'train.log_every'.
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
