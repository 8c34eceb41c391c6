"""What a study found: differences to the baseline, verdicts, tuning, what stands in their way.

Computed once from the rows, for every table, figure and page; all statistics are `qkattn.stats`,
`qkattn.bowl` and `qkattn.scaling`.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from qkattn.report import sentences
from qkattn.report.numbers import listed, words
from qkattn.stats import inference, scaling, sweep
from qkattn.study import tuning
from qkattn.verdict import hygiene
from qkattn.verdict.hygiene import Remark
from qkattn.verdict.load import Study
from qkattn.verdict.summary import Row
from qkattn.verdict.trials import Trial

# The word of an arm whose numbers may not be judged; the others are qkattn.stats.WORDS.
NO_VERDICT = 'no verdict'


@dataclasses.dataclass(frozen=True)
class Arm:
    """One row and what was found about it.

    Attributes:
      row: its trials and means.
      differences: val loss minus the baseline's (nats/token), one for each shared seed; empty where
        none is shared.
      difference: what these say; of independent samples (`paired` False) where no seed is shared.
        None for the baseline and where either has no finished trial.
      verdict: its word is better, worse, equivalent, undecided or no verdict; None for the baseline
        and in a study without tuning.
      bowls: of the knobs that were screened, in the order of tuning.
      remarks: hygiene findings about this arm alone.
      caveats: what its tuning and the baseline's leave open, in clauses of the verdict's reason.
    """

    row: Row
    differences: tuple[float, ...]
    difference: inference.Difference | None
    verdict: inference.Verdict | None
    bowls: Mapping[str, sweep.Bowl]
    remarks: tuple[Remark, ...]
    caveats: tuple[str, ...] = ()

    @property
    def bracketed(self) -> bool:
        """Whether every knob that was tuned has its best value bracketed."""
        return not self.loose

    @property
    def loose(self) -> tuple[str, ...]:
        """Names of the knobs that are not bracketed, in words."""
        return tuple(words(knob) for knob, found in self.bowls.items() if not found.bracketed)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Why this arm, by itself, gets no verdict, in clauses."""
        return tuple(remark.clause for remark in self.remarks if remark.blocks)

    @property
    def unfit(self) -> str | None:
        """Why its mean is no point of a law of size, in a word or two; None where it is one.

        A mean of the seeds that did not diverge flatters an arm, and settings that are not the best
        make it look worse.
        """
        if not self.row.chosen:
            return 'no losses'
        if self.row.num_diverged:
            return 'diverged trials'
        if self.blocks:
            return 'not comparable'
        return f'{listed(self.loose)} not bracketed' if self.loose else None


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Loss against parameters over the sizes of one arm.

    Each of the two has a `problem`: a sentence, and then its numbers are not to be shown.
    `multiplier` is how many of the baseline's parameters one of the arm's is worth; None for the
    baseline and where it has no results.
    """

    variant: str
    fit: scaling.Fit
    multiplier: scaling.Multiplier | None


@dataclasses.dataclass(frozen=True)
class Findings:
    """All that the report says.

    Attributes:
      arms: in the order of the rows.
      sentences: what was found, in plain words, for the first screen.
      held_equal: one sentence: what all arms have in common.
      remarks: all hygiene findings, the blocking ones first.
      scaling: per variant, in the study's order, of the sizes at which it is fit for it; empty for
        fewer than two sizes, and where a remark blocks every arm.
      num_comparisons: declared arms but the baselines, which Holm's correction is over.
    """

    arms: tuple[Arm, ...]
    sentences: tuple[str, ...]
    held_equal: str
    remarks: tuple[Remark, ...]
    scaling: tuple[Scaling, ...]
    num_comparisons: int

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(arm.row for arm in self.arms)

    @property
    def without_scaling(self) -> str | None:
        """Why a study of several sizes has no law of size at all; None where it has one size."""
        if self.scaling or len({arm.row.size for arm in self.arms}) < 2:
            return None
        return 'No law of size: no arm has a size whose losses may be used for one.'


def find(study: Study, rows: Sequence[Row]) -> Findings:
    """Everything that `rows`, of `summarise`, say."""
    tuned = {row.place: _tuned(study, row) for row in rows} if study.tuning else {}
    remarks = hygiene.check(study, rows, tuned)
    arms = []
    for row in rows:
        differences, difference = _difference(study, row, _baseline(rows, row))
        own = tuple(remark for remark in remarks if remark.arm == row.place)
        bowls = tuned[row.place].bowls if tuned else {}
        arms.append(Arm(row, differences, difference, None, bowls, own))
    if study.tuning:
        arms = _judged(study, arms, remarks)
    return Findings(
        arms=tuple(arms),
        sentences=sentences.found(study, arms, remarks),
        held_equal=sentences.held_equal(study, arms, remarks),
        remarks=remarks,
        scaling=_scaling(study, arms, remarks),
        num_comparisons=num_comparisons(study),
    )


def _baseline(rows: Sequence[Row], row: Row) -> Row | None:
    """The baseline's row at the size of `row`, unless it is that one."""
    if row.is_baseline:
        return None
    return next((other for other in rows if other.is_baseline and other.size == row.size), None)


def _tuned(study: Study, row: Row) -> tuning.Tuning:
    """How far the row's screening has come, of the settings at which every screening seed ran."""
    own = dict(zip(tuning.KNOBS, (row.screening or row.trials)[0].at, strict=True))
    grids = {
        knob: values if len(values) > 1 else (own[knob],)
        for knob, values in study.tuning.grids.items()
    }
    measured: dict[tuning.Settings, dict[int, float | None]] = {}
    for trial in row.screening:
        if trial.seed in study.tuning.seeds:
            loss = trial.val_loss if trial.finished else None
            measured.setdefault(trial.at, {})[trial.seed] = loss
    whole = {at: of for at, of in measured.items() if len(of) == len(set(study.tuning.seeds))}
    return tuning.tune(grids, study.tuning.max_points, whole)


def _difference(
    study: Study, row: Row, baseline: Row | None
) -> tuple[tuple[float, ...], inference.Difference | None]:
    """Differences by seed and what they say; of unpaired samples where no seed is shared."""
    if baseline is None or not row.chosen or not baseline.chosen:
        return (), None
    losses = {trial.seed: trial.val_loss for trial in baseline.chosen}
    own = sorted(row.chosen, key=lambda trial: trial.seed)
    shared = tuple(t.val_loss - losses[t.seed] for t in own if t.seed in losses)
    if shared:
        return shared, inference.paired(shared, study.margin)
    return (), inference.welch([t.val_loss for t in own], list(losses.values()), study.margin)


def _judged(study: Study, arms: Sequence[Arm], remarks: Sequence[Remark]) -> list[Arm]:
    """All but the baselines with a verdict; all comparisons that are declared are one family."""
    by_place = {arm.row.place: arm for arm in arms}
    baselines = {arm.row.place: by_place.get((study.baseline, arm.row.size)) for arm in arms}
    of_study = [remark.clause for remark in remarks if remark.blocks and remark.arm is None]
    reasons = {
        arm.row.place: [*of_study, *arm.blocks, *_lacking(study, arm, baselines[arm.row.place])]
        for arm in arms
        if not arm.row.is_baseline
    }
    judged = [by_place[place] for place, why in reasons.items() if not why]
    verdicts = inference.judge(
        {arm.row.name: arm.difference for arm in judged},
        diverged={
            arm.row.name: (arm.row.num_diverged, baselines[arm.row.place].row.num_diverged)
            for arm in judged
        },
        planned=num_comparisons(study),
    )
    found = []
    for arm in arms:
        if why := '; '.join(reasons.get(arm.row.place, ())):
            arm = dataclasses.replace(arm, verdict=inference.Verdict(NO_VERDICT, None, None, why))
        elif not arm.row.is_baseline:
            arm = _as_tuned(arm, baselines[arm.row.place], verdicts[arm.row.name])
        found.append(arm)
    return found


def num_comparisons(study: Study) -> int:
    """Arms that are declared, finished or not, without the baselines; 0 without tuning."""
    return (
        0 if study.tuning is None else sum(variant != study.baseline for variant, _ in study.arms)
    )


def _lacking(study: Study, arm: Arm, baseline: Arm | None) -> list[str]:
    """What a verdict needs of both, in clauses about what is not there."""
    reasons = []
    if not arm.row.verdicts:
        reasons.append('its verdict trials have no results yet')
    if baseline is None or not baseline.row.verdicts:
        reasons.append(f'the baseline {study.baseline} has no verdict trials there')
    elif baseline.blocks:
        reasons.append(f'the baseline {study.baseline}: {"; ".join(baseline.blocks)}')
    return reasons


def _as_tuned(arm: Arm, baseline: Arm, verdict: inference.Verdict) -> Arm:
    """The arm with its verdict, and only such a word as the tuning leaves.

    Where a knob is not bracketed, a better value may lie beyond those that were tried: then an arm
    may be better than it looks, and the baseline too.
    """
    whose = {'its ': arm, "the baseline's ": baseline}
    forbidden = {'worse'} if arm.loose else set()
    forbidden |= {'better'} if baseline.loose else set()
    forbidden |= {'equivalent'} if forbidden else set()
    said = [f'{its}{listed(of.loose)} not bracketed' for its, of in whose.items() if of.loose]
    if verdict.word in forbidden:
        said.append(f'it would be {verdict.word}, but a better value may lie beyond those tried')
        verdict = dataclasses.replace(verdict, word='undecided')
    elif verdict.word in ('better', 'worse'):
        said += [
            f'{its}{words(knob)} may be off by more than that: {found.at_worst:.2g} nats/token at '
            "the farther end of the optimum's interval"
            for its, of in whose.items()
            for knob, found in of.bowls.items()
            if found.at_worst is not None and found.at_worst > abs(arm.difference.mean)
        ]
    verdict = dataclasses.replace(verdict, reason='; '.join([verdict.reason, *said]))
    return dataclasses.replace(arm, verdict=verdict, caveats=tuple(said))


def _scaling(study: Study, arms: Sequence[Arm], remarks: Sequence[Remark]) -> tuple[Scaling, ...]:
    """Of every variant at the sizes at which it is fit for it."""
    blocked = any(remark.blocks and remark.arm is None for remark in remarks)
    if blocked or len(study.sizes) < 2:
        return ()
    points: dict[str, list[Row]] = {variant: [] for variant in study.variants}
    for arm in arms:
        if arm.unfit is None:
            points[arm.row.variant].append(arm.row)
    curves = {
        variant: (
            [row.example.parameters['total'] for row in of],
            [_by_seed(row.chosen) for row in of],
        )
        for variant, of in points.items()
        if of
    }
    return tuple(
        Scaling(
            variant,
            scaling.fit(*curve),
            scaling.multiplier(curve, curves[study.baseline])
            if study.baseline in curves and variant != study.baseline
            else None,
        )
        for variant, curve in curves.items()
    )


def _by_seed(trials: Sequence[Trial]) -> list[float]:
    return [trial.val_loss for trial in sorted(trials, key=lambda trial: trial.seed)]
