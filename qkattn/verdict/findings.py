"""The findings of a study: differences from the baseline, verdicts, scaling fits, remarks.

Computed once for all tables, figures and pages; the statistics are those of `qkattn.stats`.
"""

import dataclasses
import functools
import hashlib
import math
from pathlib import Path

from qkattn.stats import scaling
from qkattn.storage.files import as_path
from qkattn.study import stored
from qkattn.study.place import EQUAL_SHAPE, Expected, Place, parse_expected
from qkattn.verdict import hygiene, judging, parts, trained
from qkattn.verdict.arms import Arm, Group, arms_of
from qkattn.verdict.codes import TEST, VALIDATION, Comparison, Decision, Remark, Verdict
from qkattn.verdict.comparison import compare
from qkattn.verdict.load import Study, load_study
from qkattn.verdict.parts import Decomposition

# The verdicts with which a positive control passes.
_PASSES = {
    'better': judging.BELOW_ZERO,
    'worse': judging.ABOVE_ZERO,
    'not better': (Decision.EQUIVALENT, *judging.ABOVE_ZERO),
    'not worse': (Decision.EQUIVALENT, *judging.BELOW_ZERO),
}


@dataclasses.dataclass(frozen=True)
class Overall:
    """A variant at one size over all corpora of the study.

    Attributes:
      arms: one a corpus, in the order of the study.
      comparison: the mean over corpora of the differences, seed by seed, whose error over documents
        is that of the documents of all corpora; None if an arm or its baseline has no result.
      verdict: one family of its own, of the variants and sizes.
    """

    variant: str
    size: str
    arms: tuple[Arm, ...]
    comparison: Comparison | None
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class PositiveControl:
    """A known effect that the study has to find, at one size and on one corpus.

    Attributes:
      passed: whether the arm has the expected verdict; None while it has no verdict.
    """

    expected: Expected
    arm: Arm
    verdict: Verdict

    @property
    def passed(self) -> bool | None:
        if self.verdict.decision is Decision.NO_VERDICT:
            return None
        return self.verdict.decision in _PASSES[self.expected.word]


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Loss against parameters over the sizes of one variant on one corpus.

    `multiplier` is how many parameters of the baseline one of the variant is worth; None for the
    baseline and if the baseline has no results. If `fit` or `multiplier` has a `problem`, its
    numbers are None.
    """

    variant: str
    corpus: str
    fit: scaling.Fit
    multiplier: scaling.Multiplier | None


@dataclasses.dataclass(frozen=True)
class Findings:
    """The findings of a study.

    Attributes:
      arms: the primary ones: size by size, corpus by corpus, the baseline first.
      controls: the others, in the same order; compared with the baseline of their length of
        training, and without a verdict.
      remarks: all hygiene findings, the blocking ones first.
      scaling: one fit per variant and corpus, in the study's order, over the arms whose
        `not_scaled` is None; empty for fewer than two sizes and if a remark blocks every arm.
      num_comparisons: the family of Holm's correction: the declared primary arms without the
        baselines, or as many as ever were declared; 0 in a study without tuning.
      decomposition: of the arms that have a control with results.
      overall: one for each variant but the baseline and size, if there are several corpora.
      positive: the positive controls, decided as a family of their own.
    """

    arms: tuple[Arm, ...]
    controls: tuple[Arm, ...]
    remarks: tuple[Remark, ...]
    scaling: tuple[Scaling, ...] = ()
    num_comparisons: int = 0
    decomposition: tuple[Decomposition, ...] = ()
    overall: tuple[Overall, ...] = ()
    positive: tuple[PositiveControl, ...] = ()

    @property
    def blocks(self) -> tuple[Remark, ...]:
        """The remarks that withhold every verdict."""
        return tuple(remark for remark in self.remarks if remark.blocks and remark.arm is None)

    @property
    def split(self) -> str:
        """The split of the differences: TEST, or VALIDATION where trials have no test loss."""
        compared = [arm.comparison for arm in self.arms if arm.comparison]
        return VALIDATION if any(of.split == VALIDATION for of in compared) else TEST

    @property
    def lacks_scaling(self) -> bool:
        """Whether the study has several sizes, but no arm that a scaling fit may use."""
        return not self.scaling and len({arm.size for arm in self.arms}) > 1


def load_findings(directory: str | Path) -> tuple[Study, Findings]:
    """A study with its findings, read again only if its files have changed.

    Raises ReportError as `load_study`.
    """
    path = as_path(directory)
    if (copy := stored.opened(path)) != path:
        return _load(path, ((str(copy), b''),))
    # All that a study is read from: its own JSON files, and those of runs in DIR/ or runs/DIR/.
    files = sorted(
        (str(file), hashlib.sha256(file.read_bytes()).digest())
        for where in ('*', '*/*', '*/*/*')
        for file in path.glob(f'{where}.json*')
        if file.suffix in ('.json', '.jsonl') and file.is_file()
    )
    return _load(path, tuple(files))


@functools.lru_cache(maxsize=32)
def _load(directory: Path, files: tuple[tuple[str, bytes], ...]) -> tuple[Study, Findings]:
    """`files`, with their digests, tell when to read again."""
    study = load_study(directory)
    return study, find(study)


def find(study: Study) -> Findings:
    """Computes the findings of a study."""
    arms = arms_of(study)
    remarks = hygiene.check(study, arms)
    baselines = {arm.group: arm for arm in arms if arm.is_baseline}
    arms = tuple(
        dataclasses.replace(
            arm,
            comparison=_compared(study, arm, baselines.get(arm.group)),
            remarks=tuple(remark for remark in remarks if remark.arm == arm.place),
        )
        for arm in arms
    )
    baselines = {arm.group: arm for arm in arms if arm.is_baseline}
    primary = tuple(arm for arm in arms if arm.control is None)
    found = Findings(primary, tuple(arm for arm in arms if arm.control), remarks)
    if study.tuning:
        compared = {a.place: [(a, baselines.get(a.group))] for a in primary if not a.is_baseline}
        family = _family(study)
        verdicts = judging.judge(study, compared, found.blocks, family)
        primary = tuple(dataclasses.replace(a, verdict=verdicts.get(a.place)) for a in primary)
        found = dataclasses.replace(found, arms=primary, num_comparisons=family)
        overall = _overall(study, found, baselines)
        positive = _positive(study, found, baselines)
        found = dataclasses.replace(found, overall=overall, positive=positive)
    shared = [remark for remark in found.blocks if remark.every_arm]
    decomposition = parts.decompose(study, (*found.arms, *found.controls), shared)
    return dataclasses.replace(found, scaling=_scaling(study, found), decomposition=decomposition)


def _positive(
    study: Study, found: Findings, baselines: dict[Group, Arm]
) -> tuple[PositiveControl, ...]:
    """The verdict of every arm of which an effect is expected."""
    cases: dict[tuple[Expected, Place], list[tuple[Arm, Arm | None]]] = {}
    for expected in map(parse_expected, study.expected):
        control = EQUAL_SHAPE if expected.equal_shape else None
        for arm in (*found.arms, *found.controls):
            if (arm.variant, arm.control) == (expected.variant, control):
                cases[expected, arm.place] = [(arm, baselines.get(arm.group))]
    verdicts = judging.judge(study, cases, found.blocks, len(cases))
    return tuple(
        PositiveControl(key[0], cases[key][0][0], verdict) for key, verdict in verdicts.items()
    )


def _family(study: Study) -> int:
    """How many primary arms are, or ever were, declared for comparison with a baseline."""
    declared = sum(p.control is None and p.variant != study.baseline for p in study.arms)
    return max(declared, study.ledger.family if study.ledger else 0)


def _compared(study: Study, arm: Arm, baseline: Arm | None) -> Comparison | None:
    if arm.is_baseline or baseline is None:
        return None
    return compare([(arm, baseline)], study)


def _overall(study: Study, found: Findings, baselines: dict[Group, Arm]) -> tuple[Overall, ...]:
    """The variants that have results on every corpus, at each size."""
    number = len(study.corpora)
    cases: dict[tuple[str, str], list[tuple[Arm, Arm | None]]] = {}
    for arm in found.arms if number > 1 else ():
        if not arm.is_baseline:
            pair = arm, baselines.get(arm.group)
            cases.setdefault((arm.variant, arm.size), []).append(pair)
    cases = {key: pairs for key, pairs in cases.items() if len(pairs) == number}
    family = math.ceil(found.num_comparisons / number)
    verdicts = judging.judge(study, cases, found.blocks, family)
    return tuple(
        Overall(
            *key,
            arms=tuple(arm for arm, _ in pairs),
            comparison=compare([(a, b) for a, b in pairs if b is not None], study)
            if all(b is not None for _, b in pairs)
            else None,
            verdict=verdicts[key],
        )
        for key, pairs in cases.items()
    )


def _scaling(study: Study, found: Findings) -> tuple[Scaling, ...]:
    """Scaling fits of all variants that have a size to use, at which models are trained enough."""
    if found.blocks or len(study.sizes) < 2:
        return ()
    short = {of.arm.group for of in trained.standings(study, found.arms) if of.remarks}
    curves = {}
    for key in dict.fromkeys((arm.variant, arm.corpus) for arm in found.arms):
        own = [arm for arm in found.arms if (arm.variant, arm.corpus) == key]
        own = [arm for arm in own if arm.group not in short]
        if usable := [arm for arm in own if arm.not_scaled is None]:
            parameters = [arm.example.parameters['total'] for arm in usable]
            curves[key] = parameters, [list(arm.losses(arm.split).values()) for arm in usable]
    made = []
    for (variant, corpus), curve in curves.items():
        baseline = curves.get((study.baseline, corpus))
        multiplier = None
        if baseline and curve is not baseline:
            multiplier = scaling.multiplier(curve, baseline)
        made.append(Scaling(variant, corpus, scaling.fit(*curve), multiplier))
    return tuple(made)
