"""What a study found: differences to the baseline, verdicts, tuning, what stands in their way.

Computed once from the rows, for every table, figure and page; all statistics are `qkattn.stats`,
`qkattn.bowl` and `qkattn.scaling`.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from qkattn import bowl, scaling, stats
from qkattn.report import hygiene, sentences
from qkattn.report.hygiene import Remark
from qkattn.report.load import Study
from qkattn.report.numbers import words
from qkattn.report.records import Trial
from qkattn.report.summary import Row

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
      bowls: the screening trials of each tuned knob, by its name.
      remarks: hygiene findings about this arm alone.
    """

    row: Row
    differences: tuple[float, ...]
    difference: stats.Difference | None
    verdict: stats.Verdict | None
    bowls: Mapping[str, bowl.Bowl]
    remarks: tuple[Remark, ...]

    @property
    def bracketed(self) -> bool:
        """Whether every knob that was tuned has its best value bracketed."""
        return all(found.bracketed for found in self.bowls.values())

    @property
    def blocks(self) -> tuple[str, ...]:
        """Why this arm, by itself, gets no verdict, in clauses."""
        return tuple(remark.clause for remark in self.remarks if remark.blocks)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Loss against weights over the sizes of one arm.

    Each of the two has a `problem`: a sentence, and then its numbers are not to be shown.
    `multiplier` is how many of the baseline's weights one of the arm's is worth; None for the
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
      scaling: per variant, in the study's order; empty for fewer than two sizes, and where a
        remark blocks every arm.
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


def find(study: Study, rows: Sequence[Row]) -> Findings:
    """Everything that `rows`, of `summarise`, say."""
    bowls = {row.place: _bowls(study, row) for row in rows}
    remarks = hygiene.check(study, rows, bowls)
    arms = []
    for row in rows:
        differences, difference = _difference(study, row, _baseline(rows, row))
        own = tuple(remark for remark in remarks if remark.arm == row.place)
        arms.append(Arm(row, differences, difference, None, bowls[row.place], own))
    verdicts = _verdicts(study, arms, remarks) if study.tuning else {}
    arms = [
        dataclasses.replace(arm, verdict=verdicts[arm.row.place])
        if arm.row.place in verdicts
        else arm
        for arm in arms
    ]
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


def _bowls(study: Study, row: Row) -> dict[str, bowl.Bowl]:
    """One for each tuned knob whose screening has a value that all its seeds were run at."""
    found = {}
    for knob in study.tuning.knobs if study.tuning else ():
        losses: dict[float, dict[int, float | None]] = {}
        for trial in row.screening:
            if trial.knob == knob:
                loss = trial.val_loss if trial.finished else None
                losses.setdefault(hygiene.setting(trial, knob), {})[trial.seed] = loss
        seeds = {seed for of_value in losses.values() for seed in of_value}
        whole = {value: of for value, of in losses.items() if of.keys() == seeds}
        if whole:
            found[knob] = bowl.fit(whole)
    return found


def _difference(
    study: Study, row: Row, baseline: Row | None
) -> tuple[tuple[float, ...], stats.Difference | None]:
    """Differences by seed and what they say; of unpaired samples where no seed is shared."""
    if baseline is None or not row.chosen or not baseline.chosen:
        return (), None
    losses = {trial.seed: trial.val_loss for trial in baseline.chosen}
    own = sorted(row.chosen, key=lambda trial: trial.seed)
    shared = tuple(t.val_loss - losses[t.seed] for t in own if t.seed in losses)
    if shared:
        return shared, stats.paired(shared, study.margin)
    return (), stats.welch([t.val_loss for t in own], list(losses.values()), study.margin)


def _verdicts(
    study: Study, arms: Sequence[Arm], remarks: Sequence[Remark]
) -> dict[tuple[str, str], stats.Verdict]:
    """Of every arm but the baselines; all comparisons that are declared are one family."""
    by_place = {arm.row.place: arm for arm in arms}
    of_study = [remark.clause for remark in remarks if remark.blocks and remark.arm is None]
    found, judged, diverged = {}, {}, {}
    for arm in arms:
        if arm.row.is_baseline:
            continue
        baseline = by_place.get((study.baseline, arm.row.size))
        reasons = [*of_study, *arm.blocks, *_lacking(study, arm, baseline)]
        if reasons:
            found[arm.row.place] = stats.Verdict(NO_VERDICT, None, None, '; '.join(reasons))
            continue
        judged[arm.row.name] = arm.difference
        diverged[arm.row.name] = (arm.row.num_diverged, baseline.row.num_diverged)
    verdicts = stats.judge(judged, diverged=diverged, planned=num_comparisons(study))
    for arm in arms:
        if arm.row.name in verdicts:
            baseline = by_place[study.baseline, arm.row.size]
            found[arm.row.place] = _as_tuned(verdicts[arm.row.name], arm, baseline)
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


def _as_tuned(verdict: stats.Verdict, arm: Arm, baseline: Arm) -> stats.Verdict:
    """The verdict, with only the words that knobs which are not bracketed leave.

    A better value may lie beyond those that were tried: then an arm may be better than it looks,
    and the baseline too.
    """
    loose = [_not_bracketed(arm), _not_bracketed(baseline)]
    forbidden = {'equivalent'} if any(loose) else set()
    forbidden |= {'worse'} if loose[0] else set()
    forbidden |= {'better'} if loose[1] else set()
    said = [
        f'{whose}{" and ".join(knobs)} not bracketed'
        for whose, knobs in zip(('', "the baseline's "), loose, strict=True)
        if knobs
    ]
    if verdict.word in forbidden:
        said.append(f'it would be {verdict.word}, but a better value may lie beyond those tried')
    word = 'undecided' if verdict.word in forbidden else verdict.word
    reason = '; '.join([verdict.reason, *said])
    return dataclasses.replace(verdict, word=word, reason=reason)


def _not_bracketed(arm: Arm) -> list[str]:
    return [words(knob) for knob, found in arm.bowls.items() if not found.bracketed]


def _scaling(study: Study, arms: Sequence[Arm], remarks: Sequence[Remark]) -> tuple[Scaling, ...]:
    """Of the sizes at which every seed finished: a mean of the others flatters an arm."""
    blocked = any(remark.blocks and remark.arm is None for remark in remarks)
    if blocked or len(study.sizes) < 2:
        return ()
    points: dict[str, list[Row]] = {variant: [] for variant in study.variants}
    for arm in arms:
        if arm.row.chosen and not arm.row.num_diverged and not arm.blocks:
            points[arm.row.variant].append(arm.row)
    curves = {
        variant: (
            [row.example.weights['total'] for row in of],
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
