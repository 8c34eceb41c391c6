"""Chains of studies: study A repeats study B, which repeats study C.

A study repeats an earlier study with other seeds, to decide arms that the earlier study left
undecided. The ledger of a repeat has the name of the repeated study, and the hash of the last line
in the ledger of the repeated study.

An arm that both studies compare with the baseline is decided from the seeds of both, corrected for
the arms of both. It is tested at the error rate of a second look (`qkattn.stats.decision.level`).
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from qkattn.config import differences
from qkattn.config.serialize import OF_MACHINE
from qkattn.errors import ReportError, RunDirectoryError
from qkattn.storage import ledger
from qkattn.storage.ledger import ArmKeys, Ledger, Repeat
from qkattn.storage.records import read_json
from qkattn.study.arm_key import SAME_SHAPE, ArmKey
from qkattn.study.family import primary_arms

# The committed studies, in COMMITTED/scale/name. An installation does not have them.
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
# Fields of study.json that are equal in a repeat and in the study that it repeats.
_EQUAL = ('baseline', 'sizes', 'corpora', 'margin')
# Fields that are also equal if the repeat matches its arms in cost.
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
    """Returns a key by which arms of different studies can be compared.

    The key of an arm in its study lacks what all arms of the study have in common. This is added:

    - Without matching, all arms have the baseline's shape: `control` becomes SAME_SHAPE.
    - With a single destination, labels do not name it: 'qk/no_o' becomes 'qk/no_o [d_model]'.

    The key of the baseline stays.

    Args:
        key: The key of the arm in its study.
        declared: The content of study.json. `baseline`, `destinations` and `matched` are read.
    """
    is_baseline = key.variant == declared['baseline']
    if is_baseline:
        return key
    if declared['matched'] is None:
        return key._replace(control=SAME_SHAPE)

    destinations = declared['destinations']
    names_destination = len(destinations) > 1
    if key.control == SAME_SHAPE or names_destination:
        return key
    return key._replace(variant=f'{key.variant} [{destinations[0]}]')


@dataclasses.dataclass(frozen=True)
class Earlier:
    """A study that a later study repeats."""

    repeat: Repeat  # what the ledger of the later study says about this study
    path: Path | None  # the directory of the study; None if the study is lost
    # The hash of the first line of the study's ledger, which stays when the ledger grows. For a
    # lost study, the hash in `repeat`.
    identity: str
    seeds: frozenset[int]  # the seeds of its verdicts
    questions: frozenset[ArmKey]  # `question` of each arm that it ever declared
    family: frozenset[ArmKey]  # `question` of each arm that it compares with its baseline
    expected: tuple[str, ...] = ()  # its positive controls

    @property
    def name(self) -> str:
        """The name of the study's directory."""
        return self.repeat.study


class _Pooled(NamedTuple):
    """The arms and seeds of one study that are pooled with other studies."""

    name: str  # of the study
    questions: frozenset[ArmKey]  # `question` of each arm that the last study also compares
    seeds: frozenset[int]


def earlier_studies(
    directory: Path, study_ledger: Ledger, declared: Mapping[str, Any]
) -> list[Earlier]:
    """Returns the studies that a study repeats, directly or through another study.

    If study A repeats B, and B repeats C, the result for A is [B, C].

    Args:
        directory: The directory of the study.
        study_ledger: The ledger of the study.
        declared: The content of study.json.

    Raises:
        ReportError: The repeats form a circle, a repeated study is missing or has another ledger
            than declared, two studies have the same name, or two studies train the same arm on the
            same seed.
    """
    name = declared.get('repeats')
    names_in_ledger = [repeat.study for repeat in study_ledger.repeats]
    if name is not None and name not in names_in_ledger:
        raise ReportError(
            f'{directory / "study.json"} repeats {name!r}, which '
            f'{directory / ledger.NAME} does not declare; {ledger.ADVICE}'
        )
    if not study_ledger.repeats:
        return []

    # Two studies may repeat the same study, which is listed once.
    route = (directory.resolve(),)  # the directories on the way, to find circles
    study_by_identity: dict[str, Earlier] = {}
    for earlier in _all_repeated(directory, study_ledger, declared, route):
        study_by_identity.setdefault(earlier.identity, earlier)
    repeated_studies = list(study_by_identity.values())
    _require_different_names(directory, repeated_studies)
    _require_different_seeds(directory, study_ledger, declared, repeated_studies)
    return repeated_studies


def _require_different_names(directory: Path, repeated_studies: Sequence[Earlier]) -> None:
    """Raises ReportError if directories of two studies have the same name.

    The results of a chain are pooled by name, so one of the two studies would replace the other.

    Args:
        directory: The directory of the last study.
        repeated_studies: The earlier studies.
    """
    path_by_name = {directory.name: directory}
    for earlier in repeated_studies:
        if earlier.path is None:  # a lost study has no results to pool
            continue
        if earlier.name in path_by_name:
            raise ReportError(
                f'{path_by_name[earlier.name]} and {earlier.path} are in one chain of repeats, '
                'whose studies need directories of different names'
            )
        path_by_name[earlier.name] = earlier.path


def _require_different_seeds(
    directory: Path,
    study_ledger: Ledger,
    declared: Mapping[str, Any],
    repeated_studies: Sequence[Earlier],
) -> None:
    """Raises ReportError if two studies train the same arm on the same seed.

    The results of an arm are pooled over studies, and such a seed would count twice.

    Args:
        directory: The directory of the last study.
        study_ledger: The ledger of the last study.
        declared: The study.json of the last study.
        repeated_studies: The earlier studies.
    """
    # Questions are keys by which arms of different studies can be compared.
    questions = _questions(study_ledger.arms, declared)
    compared = frozenset(key for key in questions if key.variant != declared['baseline'])
    last_seeds = frozenset(declared['seeds'])
    pools = [_Pooled(directory.name, questions=compared, seeds=last_seeds)]
    for earlier in repeated_studies:
        is_lost = earlier.path is None
        if not is_lost:  # a lost study has no results to pool
            also_compared = earlier.questions & compared
            pools.append(_Pooled(earlier.name, questions=also_compared, seeds=earlier.seeds))
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
    """Returns the studies that a study repeats, directly or through another study.

    If A repeats B, and B repeats C, the result for A is [B, C]. A study may appear several times.

    Args:
        directory: The directory of the study.
        declared: The content of study.json.
        route: The directories from the first study to this one. For study B above, it is (A, B).

    Raises:
        ReportError: The repeats form a circle, or a repeated study cannot be read.
    """
    directly = [_repeated_study(directory, repeat, declared) for repeat in study_ledger.repeats]
    studies = list(directly)
    for earlier in directly:
        if earlier.path is None:
            continue  # a lost study has no ledger that could name further studies
        if earlier.path.resolve() in route:
            names = ' -> '.join(path.name for path in (*route, earlier.path))
            raise ReportError(f'{directory / ledger.NAME} closes a circle of repeats: {names}')
        earlier_ledger = ledger.read(earlier.path / ledger.NAME)
        earlier_declared = read_json(earlier.path / 'study.json', _SCHEMA)
        longer_route = (*route, earlier.path.resolve())
        studies += _all_repeated(earlier.path, earlier_ledger, earlier_declared, longer_route)
    return studies


def _repeated_study(directory: Path, repeat: Repeat, declared: Mapping[str, Any]) -> Earlier:
    """Finds and reads a study that another study repeats.

    Args:
        directory: The directory of the study that repeats it.
        repeat: What the ledger in `directory` says about the repeated study. `repeat.entry` is the
            hash of a line in the ledger of the repeated study.
        declared: The content of study.json in `directory`.

    Raises:
        ReportError: No study of this name is found, or no ledger has this line.
    """
    if repeat.is_lost:
        # The files of the repeated study are gone, but `repeat` has its seeds and arms.
        return Earlier(
            repeat,
            path=None,
            identity=repeat.entry,
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

    # Several studies may have this name. The repeated one has the line `repeat.entry`.
    for path in paths:
        repeated_ledger = ledger.read(path / ledger.NAME)
        hashes = [entry['hash'] for entry in repeated_ledger.entries]
        if repeat.entry in hashes:
            repeated = read_json(path / 'study.json', _SCHEMA)
            return Earlier(
                repeat,
                path,
                identity=hashes[0],  # of the first line, which never changes
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
    """Returns the key of each arm by which studies can be compared (`question`).

    Args:
        arms: The keys of the arms in their study, as tuples.
        declared: The study.json of this study.
    """
    return frozenset(question(ArmKey(*key), declared) for key in arms)


def _family(arms: ArmKeys, declared: Mapping[str, Any]) -> frozenset[ArmKey]:
    """Returns the keys of `_questions`, but only of arms that are compared with the baseline."""
    primary = primary_arms([ArmKey(*key) for key in arms], declared['baseline'])
    return frozenset(question(key, declared) for key in primary)


def directories_of(name: str, directory: Path) -> list[Path]:
    """Returns the directories of all studies with a name, beside `directory` and in COMMITTED."""
    paths = [directory.parent / name, *sorted(COMMITTED.glob(f'*/{name}'))]
    return [path for path in paths if (path / 'study.json').is_file()]


def declared_repeat(path: Path, declared: Mapping[str, Any]) -> dict[str, str] | None:
    """Returns what the ledger of a new study declares about the study that it repeats.

    Args:
        path: The directory of the new study.
        declared: The study.json of the new study.

    Returns:
        {'study': the name of the repeated study, 'entry': the hash of the last line in its ledger},
        or None if the new study repeats none.

    Raises:
        ReportError: The new study cannot repeat the study that it names.
    """
    name = declared.get('repeats')
    if name is None:
        return None
    repeated = _find_repeatable(name, path, declared)
    repeated_ledger = ledger.read(repeated / ledger.NAME)
    repeated_declared = read_json(repeated / 'study.json', _SCHEMA)
    # The studies that the repeated study itself repeats.
    still_earlier = earlier_studies(repeated, repeated_ledger, repeated_declared)

    # A repeat needs other seeds than all earlier studies.
    used_seeds = set(repeated_declared['seeds'])
    for earlier in still_earlier:
        used_seeds |= earlier.seeds
    shared_seeds = sorted(used_seeds.intersection(declared['seeds']))
    if shared_seeds:
        raise ReportError(
            f'the verdicts of {name!r}, or of a study that it repeats, have the seeds '
            f'{tuple(shared_seeds)}, too; trials.seeds={tuple(declared["seeds"])} must be others'
        )
    earlier_paths = [earlier.path.resolve() for earlier in still_earlier if earlier.path]
    if path.resolve() in earlier_paths:
        raise ReportError(f'{name!r} repeats this study, which would close a circle')
    _require_different_names(path, still_earlier)
    _require_first_repeat(path, declared, name, repeated_ledger)
    return {'study': name, 'entry': repeated_ledger.last}


def _require_first_repeat(
    path: Path, declared: Mapping[str, Any], repeated: str, repeated_ledger: Ledger
) -> None:
    """Raises ReportError if another study beside a new study already repeats one of its arms.

    Both would be second looks, so the error rate of a second look would be spent twice.

    Args:
        path: The directory of the new study.
        declared: The study.json of the new study.
        repeated: The name of the study that it repeats.
        repeated_ledger: The ledger of the study that it repeats.
    """
    new_arms = frozenset(ledger.arm_key(arm) for arm in declared['arms'])
    new_questions = _questions(new_arms, declared)
    for other, other_questions in _repeats_beside(path, repeated_ledger):
        shared_questions = new_questions & other_questions
        # Every repeat has the baseline, which gets no verdict.
        shared_variants = {key.variant for key in shared_questions} - {declared['baseline']}
        if shared_variants:
            raise ReportError(
                f'{other} already repeats {", ".join(sorted(shared_variants))} of the study '
                f'{repeated!r}; repeat {other.name!r} instead, because two repeats would spend the '
                'second share of the error rate twice'
            )


def _repeats_beside(
    path: Path, repeated_ledger: Ledger
) -> Iterator[tuple[Path, frozenset[ArmKey]]]:
    """Yields the directory and the questions of each study beside `path` that repeats a study.

    Damaged studies are skipped; their own reports name the problem.

    Args:
        path: The directory of a study.
        repeated_ledger: The ledger of the study that is repeated.
    """
    repeated_hashes = {entry['hash'] for entry in repeated_ledger.entries}
    for study_json in sorted(path.parent.glob('*/study.json')):
        other = study_json.parent
        try:
            other_ledger = ledger.read(other / ledger.NAME)
            other_declared = read_json(study_json, _SCHEMA)
        except (ReportError, RunDirectoryError):
            continue
        # `repeat.entry` is the hash of a line in the ledger of a study that `other` repeats.
        if any(repeat.entry in repeated_hashes for repeat in other_ledger.repeats):
            yield other, _questions(other_ledger.arms, other_declared)


def _find_repeatable(name: str, path: Path, declared: Mapping[str, Any]) -> Path:
    """Returns the directory of the first study of a name that a new study can repeat.

    Args:
        path: The directory of the new study.
        declared: The study.json of the new study.

    Raises:
        ReportError: There is no such study.
    """
    advice = 'give the name of a study beside the workdir, or of one in experiments/results/claims'
    is_directory_name = Path(name).name == name and name not in ('.', '..')
    if not is_directory_name:
        raise ReportError(f'{name!r} is no name of a directory; {advice}')
    if name == path.name:
        raise ReportError(f'a study does not repeat itself; {advice}')
    candidates = directories_of(name, path)
    if not candidates:
        raise ReportError(
            f'there is no study {name!r} in {path.parent}, nor in experiments/results/claims; '
            f'{advice}'
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
    return repeatable[0]


def _why_not_repeatable(declared: Mapping[str, Any], path: Path) -> str | None:
    """Returns why a study cannot repeat the study in `path`; None if it can.

    Args:
        declared: The study.json of the study that is to repeat the other one.
        path: The directory of the study to repeat.
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
    """Returns the settings that are equal in a repeat and in the study that it repeats.

    Args:
        study: The study.json of one of the two studies.
        are_matched: Whether the repeat matches its arms in cost.
    """
    names = [*_EQUAL]  # such as 'baseline' and 'margin'
    if are_matched:
        names += _EQUAL_IF_MATCHED  # such as 'tolerance'
    settings = {name: study[name] for name in names}

    # The base config, without the settings that may differ.
    base = dict(study['base'])
    base.pop('trials', None)
    for name in (*HARMLESS, *OF_MACHINE):  # such as 'train.log_every' and 'mesh'
        section, _, field = name.partition('.')
        is_whole_section = not field
        if is_whole_section:
            base.pop(section, None)
        elif isinstance(base.get(section), Mapping):
            fields = dict(base[section])
            fields.pop(field, None)
            base[section] = fields
    settings['base'] = base
    return settings
