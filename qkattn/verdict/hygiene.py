"""Checks of a study's own rules: what a reader has to know, and what stands in a verdict's way.

Only validation and test measurements are ever read as results; training losses are not.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from qkattn.config import ANNEALED, DECAYS, OptimizerConfig
from qkattn.report.numbers import counted, listed, si, span, words
from qkattn.study.tuning import KNOBS, SCREENING, SINGLE, VERDICT, Tuning
from qkattn.verdict import equality
from qkattn.verdict.load import Study
from qkattn.verdict.summary import Row, stopped_early
from qkattn.verdict.trials import Trial

ENOUGH_SEEDS = 5


@dataclasses.dataclass(frozen=True)
class Remark:
    """A finding: `clause` is a sentence but for its subject, which `arm` is; None is the study.

    `blocks` says that the arm, or with no arm every one, gets no verdict. `differs` names what is
    not the same in all arms that are compared, where that enters results.
    """

    clause: str
    blocks: bool = False
    arm: tuple[str, str] | None = None
    differs: str | None = None

    @property
    def text(self) -> str:
        return f'{self.clause}.' if self.arm is None else f'{" at ".join(self.arm)}: {self.clause}.'


def check(
    study: Study, rows: Sequence[Row], tuned: Mapping[tuple[str, str], Tuning]
) -> tuple[Remark, ...]:
    """All remarks, the blocking ones first; `tuned` is by row, and empty without tuning."""
    found: list[Remark] = [*_tuned(study), *_seeds(study)]
    for row in rows:
        found += _unfinished(study, row)
        found += _incomplete(study, row)
        found += _budget(study, row)
        if study.tuning:
            found += _planned_seeds(study, row)
            found += _bracketed(row, tuned[row.place])
            found += _settings(study, row, tuned[row.place])
    found += [Remark(*difference) for difference in equality.differences(study, rows)]
    found += _few_seeds(study, rows)
    found += _diverged(rows)
    found += _evaluation(rows)
    return tuple(sorted(_merged(found, len(rows)), key=lambda remark: not remark.blocks))


def _merged(remarks: Sequence[Remark], num_rows: int) -> list[Remark]:
    """What is said about every arm is said once."""
    arms: dict[Remark, set] = {}
    for remark in remarks:
        arms.setdefault(dataclasses.replace(remark, arm=None), set()).add(remark.arm)
    common = {r for r, of in arms.items() if len(of - {None}) == num_rows > 1}
    merged = {}
    for remark in remarks:
        of_all = dataclasses.replace(remark, arm=None)
        if remark.arm is not None and of_all in common:
            remark = dataclasses.replace(of_all, clause=f'every arm: {remark.clause}')
        merged[remark] = None
    return list(merged)


def _tuned(study: Study) -> Iterable[Remark]:
    if study.tuning is not None and 'learning_rate' not in study.tuning.knobs:
        rates = ', '.join(f'{rate:g}' for rate in study.tuning.learning_rates)
        yield Remark(f'the learning rate is not tuned per arm: its grid is {rates} only', True)


def _seeds(study: Study) -> Iterable[Remark]:
    """Seeds that chose a setting flatter it."""
    if study.tuning is None:
        return
    screening = set(study.tuning.seeds) | _of_stage(study.trials, SCREENING)
    verdict = set(study.seeds) | _of_stage(study.trials, VERDICT)
    if both := sorted(screening & verdict):
        yield Remark(
            f'screening and verdict share seed{"s" * (len(both) > 1)} {listed(both)}, which makes '
            'the tuned settings look better than they are',
            True,
        )


def _of_stage(trials: Iterable[Trial], stage: str) -> set[int]:
    return {trial.seed for trial in trials if trial.stage == stage}


def _unfinished(study: Study, row: Row) -> Iterable[Remark]:
    short = [t for t in row.verdicts if t.finished and stopped_early(study, t)]
    if short:
        planned = study.by_name[short[0].run].config['train']['num_steps']
        yield Remark(
            f'{counted(len(short), "trial")} of {len(row.verdicts)} stopped at step '
            f'{short[0].num_steps:,} of {planned:,} and are no part of a verdict',
            len(short) == len(row.verdicts),
            row.place,
        )
    planned = study.by_name[row.example.run].config['optimizer']
    schedule, final = planned['schedule'], planned['final_fraction']
    if OptimizerConfig(schedule=schedule, final_fraction=final).anneals:
        return
    ends = f'the {words(schedule)} schedule does not anneal the learning rate'
    if schedule in DECAYS:
        ends = f'the learning rate ends at {final:g} of its peak, above {ANNEALED:g}'
    yield Remark(f'{ends}, so its losses are not those of a finished training', True, row.place)


def _incomplete(study: Study, row: Row) -> Iterable[Remark]:
    for run in dict.fromkeys(trial.run for trial in row.trials):
        planned = study.by_name[run]
        if len(planned.trials) < planned.num_trials:
            stage = '' if planned.stage == SINGLE else f'{planned.stage} '
            yield Remark(
                f'{len(planned.trials)} of {planned.num_trials} {stage}trials of run {run} have '
                'readable results',
                planned.stage == VERDICT,
                row.place,
            )


def _budget(study: Study, row: Row) -> Iterable[Remark]:
    residual = row.example.residual
    if study.matched is None or residual is None:
        return
    name = equality.QUANTITIES[study.matched]
    if abs(residual) > study.tolerance:
        yield Remark(
            f'{name} differ by {100 * residual:+.3g} %, above the tolerance '
            f'{100 * study.tolerance:.3g} %: no verdict at equal {name}',
            True,
            row.place,
        )
    counted_weights, target = row.example.parameters['total'], row.example.target_parameters
    if study.matched == 'total' and abs(counted_weights / target - 1 - residual) > 1e-6:
        yield Remark(
            f'its results count {counted_weights:,} parameters, the plan says {residual:+.3%} of '
            f'{target:,}',
            True,
            row.place,
        )


def _planned_seeds(study: Study, row: Row) -> Iterable[Remark]:
    """Seeds that were picked are no fresh ones."""
    declared = {SCREENING: study.tuning.seeds, VERDICT: study.seeds}
    for run in study.runs:
        if (run.variant, run.size) != row.place or run.stage not in declared:
            continue
        ran, wanted = run.config['trials']['seeds'], declared[run.stage]
        if sorted(ran) != sorted(wanted):
            yield Remark(
                f'its {run.stage} ran on seeds {listed(ran)}, the study declares {listed(wanted)}',
                True,
                row.place,
            )


def _bracketed(row: Row, tuned: Tuning) -> Iterable[Remark]:
    """Not blocking as such: which words it leaves is decided with the verdict."""
    for knob, bowl in tuned.bowls.items():
        if not bowl.bracketed:
            yield Remark(
                f'{words(knob)} not bracketed, the best of {bowl.values[0]:g} to '
                f'{bowl.values[-1]:g} is {bowl.best:g}',
                False,
                row.place,
            )


def _settings(study: Study, row: Row, tuned: Tuning) -> Iterable[Remark]:
    """The verdict has to be at what the screening trials choose."""
    if not row.verdicts:
        return
    if tuned.knob is not None:
        lacking = ', '.join(f'{value:g}' for value in tuned.values)
        yield Remark(
            f'its screening of the {words(tuned.knob)} lacks results at {lacking} to choose a '
            'value by',
            True,
            row.place,
        )
    else:
        for knob, ran, found in zip(KNOBS, row.verdicts[0].at, tuned.settings, strict=True):
            if ran != found:
                screened = 'choose' if knob in study.tuning.knobs else 'ran at'
                yield Remark(
                    f'the verdict ran at {words(knob)} {ran:.12g}, the screening trials '
                    f'{screened} {found:.12g}',
                    True,
                    row.place,
                )
    if len({trial.at for trial in row.verdicts}) > 1:
        yield Remark('its verdict trials ran at more than one setting', True, row.place)


def _few_seeds(study: Study, rows: Sequence[Row]) -> Iterable[Remark]:
    if study.tuning is None:
        return
    few = [row for row in rows if row.verdicts and len(row.chosen) < ENOUGH_SEEDS]
    counts = {len(row.chosen) for row in few}
    if few:
        names = 'all arms' if len(few) == len(rows) else listed(row.name for row in few)
        yield Remark(
            f'Verdicts rest on {span(counts)} seed{"s" * (counts != {1})} (fewer than '
            f'{ENOUGH_SEEDS}) for {names}'
        )


def _diverged(rows: Sequence[Row]) -> Iterable[Remark]:
    found = []
    for row in rows:
        parts = []
        for stage, trials in (('screening ', row.screening), ('verdict ', row.verdicts)):
            lost = sum(not trial.finished for trial in trials)
            stage = stage if row.screening else ''
            parts += [f'{lost} of {counted(len(trials), f"{stage}trial")}'] if lost else []
        found += [f'{row.name} {listed(parts)}'] if parts else []
    if found:
        yield Remark(f'Diverged, counted and never averaged: {"; ".join(found)}')


def _evaluation(rows: Sequence[Row]) -> Iterable[Remark]:
    chosen = [trial for row in rows for trial in row.chosen]
    tokens = {trial.eval_tokens for trial in chosen} - {None}
    if not tokens:
        return
    size = ' or '.join(f'{number:,}' for number in sorted(tokens))
    eval_rows = ' or '.join(f'{n:,}' for n in sorted({t.eval_rows for t in chosen} - {None}))
    said = f'Val losses are over {size} tokens' + (f' in {eval_rows} rows' if eval_rows else '')
    errors = sorted(t.val_loss_se for t in chosen if t.val_loss_se is not None)
    if errors:
        said += (
            f', which leaves each a sampling error of {si(errors[len(errors) // 2], 2)} nats/token '
            '(standard error over rows). All arms are evaluated on the same tokens, so most of it '
            'cancels in a difference; intervals are over seeds and do not hold what is left of it'
        )
    yield Remark(said)
