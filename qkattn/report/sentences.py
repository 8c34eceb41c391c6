"""Prose for the codes and numbers of `qkattn.verdict`."""

import re
from collections.abc import Mapping, Sequence

from qkattn.report.numbers import counted, interval, listed, si, span, words
from qkattn.stats.scaling import Problem, ProblemCode
from qkattn.verdict import (
    Arm,
    Decision,
    Findings,
    Missing,
    NotScaled,
    Reason,
    ReasonCode,
    Remark,
    RemarkCode,
    Study,
    Verdict,
)

# What a study matches, as a noun in the plural.
QUANTITIES = {
    'total': 'total parameters',
    'non_embedding': 'non-embedding parameters',
    'flops': 'FLOPs per token',
    'cache': 'cache floats per token',
}
NO_SCALING_LAW = 'No law of size: no arm has a size whose losses may be used for one.'
MAX_NAMES = 3
# More arms than this are counted in a sentence, not named; the table names all.
MAX_NAMED = 5
ORDER = {decision.value: place for place, decision in enumerate(Decision)}


def held_equal(study: Study, findings: Findings) -> str:
    """What all arms have in common, in one sentence, and what they do not."""
    arms = findings.arms
    steps = sorted({trial.num_steps for arm in arms for trial in arm.verdict_trials})
    trained = f' ({" or ".join(f"{number:,}" for number in steps)} steps)' if steps else ''
    rates = f'each arm at its own tuned {tuned(study)}' if study.tuning else settings(arms)
    differing = [r.data for r in findings.remarks if r.code is RemarkCode.DIFFERS]
    differs = list(dict.fromkeys(data['name'] for data in differing if not data['harmless']))
    but = f', but for {listed(differs)}' if differs else ''
    return f'{budget(study, arms)}; same data, training{trained} and evaluation set{but}; {rates}.'


def budget(study: Study, arms: Sequence[Arm]) -> str:
    """'Equal total parameters (252k, within 0.1 %)'."""
    if study.matched is None:
        return 'Parameters are not matched'
    residuals = [arm.example.residual for arm in arms]
    beyond = sum(abs(residual) > study.tolerance for residual in residuals if residual is not None)
    but = f' but for {counted(beyond, "arm")}' if beyond else ''
    within = f'within {100 * study.tolerance:.3g} %{but}'
    return f'Equal {QUANTITIES[study.matched]} ({targets(study, arms)}, {within})'


def targets(study: Study, arms: Sequence[Arm]) -> str:
    """'252k', or with its size where there are several."""
    found = {arm.size: arm.example.target_parameters for arm in arms}
    if len(found) == 1:
        return si(*found.values())
    return ', '.join(f'{si(target)} at {size}' for size, target in found.items())


def tuned(study: Study) -> str:
    return listed(map(words, study.tuning.knobs)) or 'nothing'


def settings(arms: Sequence[Arm]) -> str:
    rates = sorted({rate for arm in arms for rate in arm.learning_rates})
    if len(rates) == 1:
        return f'all at learning rate {rates[0]:g}, not tuned per arm'
    return f'learning rates from {rates[0]:g} to {rates[-1]:g}, not tuned with seeds of their own'


def found_in(study: Study, findings: Findings) -> tuple[str, ...]:
    """What was found, in one or two sentences for each size."""
    arms = findings.arms
    if study.baseline is None:
        return ('No verdict: the study has no baseline to compare with.',)
    if study.tuning is None:
        return _described(study, arms)
    if findings.blocks:
        return (f'No verdict: {"; ".join(map(clause, findings.blocks))}.',)
    said = []
    for size in study.sizes:
        of_size = [arm for arm in arms if arm.size == size]
        judged = [arm for arm in of_size if arm.verdict is not None]
        if judged:
            said.append(f'{_setting(study, of_size)}: {_verdicts(study, judged)}.')
    return (*said, *_absent(study, bool(said)))


def _setting(study: Study, of_size: Sequence[Arm]) -> str:
    """'At equal total parameters (252k), each arm at its own tuned rate, 8 fresh seeds'."""
    size = of_size[0].size
    where = f' at {size}' if len(study.sizes) > 1 else ''
    equal = 'Parameters not matched'
    if study.matched is not None:
        target = si(of_size[0].example.target_parameters)
        equal = f'At equal {QUANTITIES[study.matched]} ({target}{where})'
    elif where:
        equal += where
    counts = {len(arm.chosen) for arm in of_size if arm.chosen}
    seeds = f'{span(counts)} fresh seed{"s" * (counts != {1})}'
    return f'{equal}, each arm at its own tuned {tuned(study)}, {seeds}'


def _verdicts(study: Study, arms: Sequence[Arm]) -> str:
    by_word: dict[str, list] = {}
    for arm in arms:
        by_word.setdefault(arm.verdict.decision.value, []).append(arm)
    parts = [
        _word(study, word, sorted(by_word[word], key=_mean))
        for word in sorted(by_word, key=ORDER.__getitem__)
    ]
    return '; '.join(parts)


def _mean(arm: Arm) -> float:
    return 0.0 if arm.difference is None else arm.difference.mean


def _word(study: Study, word: str, arms: Sequence[Arm]) -> str:
    """'a (-0.034 [-0.041, -0.027]) and b (...) are better than qk/vo'."""
    several = len(arms) > 1
    verb = 'are' if several else 'is'
    if word in ('better', 'worse'):
        return f'{_names(arms)} {verb} {word} than {study.baseline}'
    if word == 'equivalent':
        margin = f'within {study.margin:g} nats/token'
        return f'{_names(arms)} {verb} equivalent to {study.baseline} ({margin})'
    why = '' if several else f': {reason(arms[0].verdict)}'
    if word == 'undecided':
        return f'{_names(arms)} {verb} undecided{why}'
    return f'{_names(arms, plain=True)} {"get" if several else "gets"} no verdict{why}'


def _names(arms: Sequence[Arm], plain: bool = False) -> str:
    shown = [
        arm.variant if plain or arm.difference is None else f'{arm.variant} ({_nats(arm)})'
        for arm in arms[:MAX_NAMED]
    ]
    more = len(arms) - MAX_NAMED
    return listed(shown + ([counted(more, 'more arm')] if more > 0 else []))


def _nats(arm: Arm) -> str:
    return interval(arm.difference, 3)


def _absent(study: Study, some: bool) -> list[str]:
    """One sentence on the arms without a result, where there are any."""
    lacking = {(arm.variant, arm.size) for arm in study.missing}
    if not lacking and some:
        return []
    if not some and not lacking:
        return ['No verdict: no arm but the baseline has results.']
    number = counted(len(lacking), 'arm')
    verb = 'has' if len(lacking) == 1 else 'have'
    head = '' if some else 'No verdict yet: '
    return [f'{head}{number} of {len(study.arms)} {verb} no verdict trials so far.']


def _described(study: Study, arms: Sequence[Arm]) -> tuple[str, ...]:
    """A study without tuning: why it gives no verdict, and its differences all the same."""
    said = [f'No verdict: {_why(study, [arm for arm in arms])}.']
    for size in study.sizes:
        compared = [a for a in arms if a.size == size and a.difference is not None]
        if not compared:
            continue
        where = f' at {size}' if len(study.sizes) > 1 else ''
        shown = sorted(compared, key=_mean)
        said.append(
            f'Differences to {study.baseline}{where}, nats/token (descriptive, below zero is '
            f'better): {_listed_differences(shown)}.'
        )
    return tuple(said)


def _listed_differences(arms: Sequence[Arm]) -> str:
    if len(arms) > MAX_NAMED:
        return f'from {_one(arms[0])} to {_one(arms[-1])}'
    return ', '.join(map(_one, arms))


def _one(arm: Arm) -> str:
    return f'{arm.variant} {_nats(arm)}'


def _why(study: Study, rows: Sequence[Arm]) -> str:
    rates = sorted({rate for row in rows for rate in row.learning_rates})
    if len(rates) == 1:
        return f'the learning rate was not tuned per arm, all ran at {rates[0]:g}'
    return (
        'the learning rate of each arm was chosen by the seeds that its loss is measured with, '
        'not by screening seeds'
    )


def at(place: tuple[str, str]) -> str:
    """'qk/vo at d_model=96'."""
    return ' at '.join(place)


def progress(missing: Missing) -> str:
    """'screening of learning_rate, step 300 of 800', 'verdict not started', 'step 30 of 80'."""
    stage = '' if missing.stage in (None, 'single') else missing.stage
    stage += f' of {missing.knob}' if missing.knob else ''
    if missing.step is None:
        return f'{stage} not started'.strip()
    state = f'step {missing.step} of {missing.num_steps}'
    return f'{stage}, {state}' if stage else state


def not_scaled(arm: Arm) -> str:
    """Why the arm's mean is not a point of a scaling law, in a word or two."""
    return {
        NotScaled.NO_LOSSES: 'no losses',
        NotScaled.DIVERGED: 'diverged trials',
        NotScaled.BLOCKED: 'not comparable',
        NotScaled.NOT_BRACKETED: f'{_knobs(arm.not_bracketed)} not bracketed',
    }[arm.not_scaled]


def remark_text(remark: Remark) -> str:
    """The remark as a sentence with its subject."""
    return f'{clause(remark)}.' if remark.arm is None else f'{at(remark.arm)}: {clause(remark)}.'


def reason(verdict: Verdict) -> str:
    """Why a verdict is what it is, in clauses."""
    return '; '.join(
        clause(why) if isinstance(why, Remark) else _reason(why, verdict.num_comparisons)
        for why in (*verdict.reasons, *verdict.caveats)
    )


def clause(remark: Remark) -> str:
    """A sentence but for its subject, which the arm is."""
    return f'{"every arm: " if remark.every_arm else ""}{_clause(remark.code, remark.data)}'


def _clause(code: RemarkCode, data: Mapping) -> str:
    match code:
        case RemarkCode.LEARNING_RATE_NOT_TUNED:
            rates = _numbers(data['learning_rates'])
            return f'the learning rate is not tuned per arm: its grid is {rates} only'
        case RemarkCode.SHARED_SEEDS:
            seeds = data['seeds']
            return (
                f'screening and verdict share seed{"s" * (len(seeds) > 1)} {listed(seeds)}, which '
                'makes the tuned settings look better than they are'
            )
        case RemarkCode.STOPPED_EARLY:
            return (
                f'{counted(data["stopped"], "trial")} of {data["trials"]} stopped at step '
                f'{data["step"]:,} of {data["num_steps"]:,} and are no part of a verdict'
            )
        case RemarkCode.NOT_ANNEALED:
            ends = f'the {words(data["schedule"])} schedule does not anneal the learning rate'
            if (final := data['final_fraction']) is not None:
                ends = f'the learning rate ends at {final:g} of its peak, above {data["limit"]:g}'
            return f'{ends}, so its losses are not those of a finished training'
        case RemarkCode.MISSING_RESULTS:
            stage = f'{data["stage"]} ' if data['stage'] else ''
            return (
                f'{data["readable"]} of {data["planned"]} {stage}trials of run {data["run"]} have '
                'readable results'
            )
        case RemarkCode.OVER_TOLERANCE:
            name = QUANTITIES[data['matched']]
            return (
                f'{name} differ by {100 * data["residual"]:+.3g} %, above the tolerance '
                f'{100 * data["tolerance"]:.3g} %: no verdict at equal {name}'
            )
        case RemarkCode.OTHER_PARAMETER_COUNT:
            return (
                f'its results count {data["parameters"]:,} parameters, the plan says '
                f'{data["residual"]:+.3%} of {data["target"]:,}'
            )
        case RemarkCode.OTHER_SEEDS:
            return (
                f'its {data["stage"]} ran on seeds {listed(data["actual"])}, the study declares '
                f'{listed(data["declared"])}'
            )
        case RemarkCode.NOT_BRACKETED:
            return (
                f'{words(data["knob"])} not bracketed, the best of {data["low"]:g} to '
                f'{data["high"]:g} is {data["best"]:g}'
            )
        case RemarkCode.SCREENING_INCOMPLETE:
            return (
                f'its screening of the {words(data["knob"])} lacks results at '
                f'{_numbers(data["values"])} to choose a value by'
            )
        case RemarkCode.OTHER_SETTING:
            return (
                f'the verdict ran at {words(data["knob"])} {data["actual"]:.12g}, the screening '
                f'trials {"choose" if data["tuned"] else "ran at"} {data["expected"]:.12g}'
            )
        case RemarkCode.SEVERAL_SETTINGS:
            return 'its verdict trials ran at more than one setting'
        case RemarkCode.FEW_SEEDS:
            counts, arms = data['counts'], data['arms']
            names = 'all arms' if arms is None else listed(map(at, arms))
            return (
                f'Verdicts rest on {span(counts)} seed{"s" * (counts != (1,))} (fewer than '
                f'{data["enough"]}) for {names}'
            )
        case RemarkCode.DIVERGED:
            arms = (f'{at(arm)} {listed(map(_lost, counts))}' for arm, counts in data['arms'])
            return f'Diverged, counted and never averaged: {"; ".join(arms)}'
        case RemarkCode.EVALUATION:
            return _evaluation(data)
        case RemarkCode.DIFFERS:
            where = f' at {data["size"]}' if data['size'] else ''
            return f'{data["name"]} differs between arms{where}: {_by_value(data["values"])}'
        case RemarkCode.DIFFERS_FROM_BASELINE:
            value, baseline = _short(data['value']), _short(data['baseline'])
            return f"{data['name']} is {value}, the baseline's {baseline}"
        case RemarkCode.SOFTWARE_DIFFERS:
            values = {value: sorted(map(_ran, of)) for value, of in data['values'].items()}
            return f'{data["name"]} differs between runs: {_by_value(values)}'
        case RemarkCode.UNCOMMITTED_CHANGES:
            return 'Some results come from a working tree with changes that no commit holds'


def _numbers(values: Sequence[float]) -> str:
    return ', '.join(f'{value:g}' for value in values)


def _knobs(knobs: Sequence[str]) -> str:
    return listed(map(words, knobs)) if knobs else ''


def _lost(counts: tuple[str | None, int, int]) -> str:
    stage, diverged, trials = counts
    return f'{diverged} of {counted(trials, f"{stage} trial" if stage else "trial")}'


def _ran(place: tuple[str, str, str]) -> str:
    *arm, stage = place
    return at(arm) + (' (screening)' if stage == 'screening' else '')


def _by_value(values: Mapping[str, Sequence[str]]) -> str:
    """'800 (qk/vo), 400 (shared_qk/vo and 2 more)'."""
    texts = []
    for value, names in values.items():
        more = f' and {len(names) - MAX_NAMES} more' if len(names) > MAX_NAMES else ''
        texts.append(f'{_short(value)} ({", ".join(names[:MAX_NAMES])}{more})')
    return ', '.join(texts)


def _short(value: str) -> str:
    """A hash by its first digits."""
    return f'{value[:12]}…' if re.fullmatch(r'[0-9a-f]{32,}', value) else value


def _evaluation(data: Mapping) -> str:
    tokens, rows = (
        ' or '.join(f'{number:,}' for number in data[name]) for name in ('tokens', 'rows')
    )
    said = f'Val losses are over {tokens} tokens' + (f' in {rows} rows' if rows else '')
    if data['standard_error'] is not None:
        said += (
            f', which leaves each a sampling error of {si(data["standard_error"], 2)} nats/token '
            '(standard error over rows). All arms are evaluated on the same tokens, so most of it '
            'cancels in a difference; intervals are over seeds and do not hold what is left of it'
        )
    return said


def _reason(why: Reason, num_comparisons: int) -> str:
    data = why.data
    over = f' after Holm over {num_comparisons} arms' if num_comparisons > 1 else ''
    its = {'arm': 'its ', 'baseline': "the baseline's "}
    match why.code:
        case ReasonCode.DIVERGED:
            counts = {'its': data['arm'], "the baseline's": data['baseline']}
            said = (
                f'{count} of {whose} trials diverged' for whose, count in counts.items() if count
            )
            return '; '.join(said)
        case ReasonCode.FEW_PAIRS:
            seeds = counted(data['n'], 'finished seed')
            return f'{seeds} in both, a verdict needs {data["needed"]}'
        case ReasonCode.EQUIVALENT:
            return f'equivalence {_p(data["p"])}{over}'
        case ReasonCode.DIFFERENT:
            return f'{_p(data["p"])}{over}'
        case ReasonCode.DIFFERENT_WITHIN_MARGIN:
            return f'{data["side"].value} by less than {data["margin"]:g} nats, {_p(data["p"])}'
        case ReasonCode.DIFFERENT_BUT_DIVERGED:
            return f'{data["side"].value} on the seeds left, {_p(data["p"])}{over}'
        case ReasonCode.NOT_SHOWN:
            return (
                f'{_p(data["p"])}, equivalence {_p(data["p_equivalence"])}{over}; differences from '
                f'{data["detectable"]:.2g} up would have been found'
            )
        case ReasonCode.NO_VERDICT_TRIALS:
            return 'its verdict trials have no results yet'
        case ReasonCode.NO_BASELINE_TRIALS:
            return f'the baseline {data["baseline"]} has no verdict trials there'
        case ReasonCode.BASELINE_BLOCKED:
            return f'the baseline {data["baseline"]}: {"; ".join(map(clause, data["remarks"]))}'
        case ReasonCode.NOT_BRACKETED:
            return f'{its[data["whose"]]}{_knobs(data["knobs"])} not bracketed'
        case ReasonCode.BEYOND_GRID:
            word = data['decision'].value
            return f'it would be {word}, but a better value may lie beyond those tried'
        case ReasonCode.IMPRECISE_OPTIMUM:
            return (
                f'{its[data["whose"]]}{words(data["knob"])} may be off by more than that: '
                f"{data['nats']:.2g} nats/token at the farther end of the optimum's interval"
            )


def _p(p: float) -> str:
    return 'p < 0.001' if p < 0.001 else f'p = {p:.3f}'


def scaling_problem(problem: Problem) -> str:
    """Why there is no scaling law, or no multiplier, in a clause."""
    data = problem.data
    match problem.code:
        case ProblemCode.FEW_SIZES:
            return f'a scaling law needs {data["needed"]} sizes or more, there are {data["sizes"]}'
        case ProblemCode.NARROW_SPAN:
            return (
                f'the sizes span a factor of {data["factor"]:.3g}, a scaling law needs '
                f'{data["needed"]:g}'
            )
        case ProblemCode.NOT_FALLING:
            (first, last), (small, large) = data['losses'], data['parameters']
            return (
                f'the loss does not fall with size: {first:.4f} nats at {small:,.0f} parameters, '
                f'{last:.4f} at {large:,.0f}'
            )
        case ProblemCode.POOR_FIT:
            return (
                f'the law explains too little: R^2 is {data["r_squared"]:.3f}, below '
                f'{data["needed"]:g}'
            )
        case ProblemCode.EXPONENT_NEAR_ZERO | ProblemCode.EXPONENT_LOOSE as code:
            near_zero = code is ProblemCode.EXPONENT_NEAR_ZERO
            doubt = 'distinguish the exponent from zero' if near_zero else 'determine the exponent'
            return (
                f'the sizes do not {doubt}: {data["value"]:.3g}, with a 95 % interval from '
                f'{data["low"]:.2g} to {data["high"]:.2g}'
            )
        case ProblemCode.NO_BASELINE_LAW:
            return f'the baseline has no scaling law: {scaling_problem(data["problem"])}'
        case ProblemCode.SINGLE_LOSS:
            return 'a multiplier from a single loss of the arm has no interval'
        case ProblemCode.EXTRAPOLATED:
            beyond = 'less' if data['end'] == 'smallest' else 'more'
            return (
                f'the loss of {data["loss"]:.4f} nats at {data["parameters"]:,.0f} parameters is '
                f'that of a baseline of {beyond} than {data["factor"]:g} times its {data["end"]} '
                'size, where its law is extrapolated'
            )
        case ProblemCode.INTERVAL_EXTRAPOLATED:
            return (
                f'the interval around a multiplier of {data["value"]:.3g} reaches sizes at which '
                "the baseline's law is extrapolated"
            )
    raise AssertionError(problem.code)
