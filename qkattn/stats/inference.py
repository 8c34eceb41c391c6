"""Intervals and tests over seeds: means, differences from a baseline, verdicts on arms.

A difference is an arm's loss minus the baseline's, in nats per token: below zero is better. Seeds
pair the two where both arms saw the same data order and the same initial draws.
"""

import dataclasses
import math
import statistics
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import special, stats

LEVEL = 0.95  # of every interval; 1 - LEVEL is the family-wise error rate of every verdict
POWER = 0.8  # the probability with which a detectable difference is found
MARGIN = 0.005  # nats per token; arms closer than this are called equivalent
MIN_PAIRS = 3  # fewer seeds get no verdict
RESAMPLES = 9999
WORDS = ('better', 'worse', 'equivalent', 'undecided')


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Mean over n values; sd (n - 1 in the denominator) and t interval only when n >= 2."""

    mean: float
    n: int
    sd: float | None
    low: float | None
    high: float | None


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of `values`, with sd and 95 % t interval of the mean when there are two or more."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return Estimate(mean, n, None, None, None)
    sd = float(np.std(values, ddof=1))
    half = float(stats.t.ppf(0.5 + LEVEL / 2, n - 1)) * sd / n**0.5
    return Estimate(mean, n, sd, mean - half, mean + half)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Mean of arm minus baseline, nats per token, and what n seeds say about it.

    `n` counts pairs, or the trials of the smaller group where trials are not paired. `sd` is that
    of one difference: over pairs, or sqrt(sd_arm^2 + sd_baseline^2). With se the standard error of
    the mean and t the statistic's distribution at `df` degrees of freedom:

    `low`, `high`: the 95 % t interval. `bootstrap_low`, `bootstrap_high`: the 95 % bootstrap
    interval, a check on the t interval's normality; None with n < 3 or where it was turned off. It
    is too narrow at few seeds: over 8 normal values it covers the truth in 89 %, over 30 in 93 %.
    `p`: two-sided t test of no difference. `p_equivalence`: two one-sided t tests (Schuirmann 1987)
    of a difference of `margin` or more in either direction; the larger of their p values.
    `detectable`: the |difference| that `p` < 0.05 finds, in its direction, with probability 0.8,
    were this sd the true one; one test, before any adjustment for several arms.

    With a single seed everything but `mean` and `n` is None. Where sd is 0, the mean is taken for
    exact: p is 0 or 1, intervals have no width.
    """

    mean: float
    n: int
    sd: float | None
    low: float | None
    high: float | None
    bootstrap_low: float | None
    bootstrap_high: float | None
    p: float | None
    p_equivalence: float | None
    detectable: float | None
    paired: bool
    margin: float
    df: float | None


def paired(
    differences: Sequence[float], margin: float = MARGIN, *, resamples: int | None = RESAMPLES
) -> Difference:
    """The mean of `differences`, arm minus baseline of the same seed (nats per token).

    `resamples` are the bootstrap's; None means no bootstrap. Raises ValueError for no differences,
    one that is not finite, or a margin that is not positive.
    """
    (values,) = _checked(margin, differences=differences)
    n = len(values)
    if n < 2:
        return _unknown(values[0], margin, is_paired=True)
    sd = float(np.std(values, ddof=1))
    return _difference(
        statistics.fmean(values), n, sd, sd / n**0.5, n - 1.0, margin, True, (values,), resamples
    )


def welch(
    arm: Sequence[float],
    baseline: Sequence[float],
    margin: float = MARGIN,
    *,
    resamples: int | None = RESAMPLES,
) -> Difference:
    """Mean of `arm` minus mean of `baseline` (nats per token), trials not paired.

    Variances may differ (Welch 1947): se^2 = s_a^2 / n_a + s_b^2 / n_b, with the degrees of freedom
    of Welch and Satterthwaite, se^4 / sum_i (s_i^2 / n_i)^2 / (n_i - 1). `resamples` and errors as
    in `paired`.
    """
    groups = _checked(margin, arm=arm, baseline=baseline)
    mean = statistics.fmean(groups[0]) - statistics.fmean(groups[1])
    n = min(len(values) for values in groups)
    if n < 2:
        return _unknown(mean, margin, is_paired=False)
    variances = [float(np.var(values, ddof=1)) for values in groups]
    parts = [variance / len(values) for variance, values in zip(variances, groups, strict=True)]
    error = sum(parts) ** 0.5
    df = float(sum(len(values) for values in groups) - 2)
    if error > 0:
        shares = [part / sum(parts) for part in parts]
        df = 1 / sum(s**2 / (len(values) - 1) for s, values in zip(shares, groups, strict=True))
    return _difference(mean, n, sum(variances) ** 0.5, error, df, margin, False, groups, resamples)


def detectable_difference(error: float, df: float, alpha: float = 1 - LEVEL) -> float:
    """The |difference| that a two-sided t test at `alpha` finds with probability POWER.

    `error` is the standard error of the mean difference, in the unit of the result. The statistic
    is noncentral t with noncentrality difference / error; the solution is the noncentrality at
    which it exceeds the critical value with probability POWER, in the difference's own direction.
    """
    critical = special.stdtrit(df, 1 - alpha / 2)
    return float(special.nctdtrinc(df, 1 - POWER, critical)) * error


def bootstrap(*groups: Sequence[float], resamples: int = RESAMPLES) -> tuple[float, float]:
    """95 % bootstrap interval of a mean, or of the first group's mean minus the second's.

    Bias-corrected and accelerated (BCa, Efron 1987), with the same random draws at every call;
    the percentile interval where BCa is undefined (all values equal). Groups are resampled apart.
    """

    def statistic(*samples: np.ndarray, axis: int) -> np.ndarray:
        means = [np.mean(sample, axis=axis) for sample in samples]
        return means[0] if len(means) == 1 else means[0] - means[1]

    def interval(method: str) -> tuple[float, float]:
        found = stats.bootstrap(
            [np.asarray(group, float) for group in groups],
            statistic,
            n_resamples=resamples,
            confidence_level=LEVEL,
            method=method,
            vectorized=True,
            rng=np.random.default_rng(0),
        ).confidence_interval
        return float(found.low), float(found.high)

    with warnings.catch_warnings(), np.errstate(invalid='ignore', divide='ignore'):
        warnings.simplefilter('ignore', stats.DegenerateDataWarning)
        ends = interval('BCa')
    return ends if all(map(math.isfinite, ends)) else interval('percentile')


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) adjusted p values, in the order given.

    With m values ascending p_(1) <= ... <= p_(m): adjusted p_(k) = max_{j <= k} (m - j + 1) p_(j),
    at most 1. Calling those at or below alpha found keeps the probability of any false finding at
    alpha, however the tests depend on each other. Raises ValueError for a p value outside [0, 1].
    """
    for p in p_values:
        if not 0 <= p <= 1:
            raise ValueError(f'p_values holds {p}; a p value lies between 0 and 1.')
    m = len(p_values)
    adjusted, largest = [0.0] * m, 0.0
    for rank, i in enumerate(sorted(range(m), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (m - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One of WORDS for an arm, the adjusted p values behind it, and the reason as a short clause.

    `detectable` is the |difference| (nats per token) found with probability 0.8 after the hardest
    of Holm's steps, alpha / number of arms; None where an arm was not tested.
    """

    word: str
    p_holm: float | None
    p_equivalence_holm: float | None
    reason: str
    detectable: float | None = None


def judge(
    differences: Mapping[str, Difference | None],
    *,
    diverged: Mapping[str, tuple[int, int]] | None = None,
    planned: int = 0,
    level: float = LEVEL,
) -> dict[str, Verdict]:
    """A verdict on every arm against the same baseline.

    `differences` are by arm, None where no seed finished in both; `diverged` gives the numbers of
    verdict trials that diverged, (the arm's, the baseline's), and arms left out had none. `planned`
    counts the comparisons that will have been made in the end: those that are still missing are
    corrected for (as p = 1), so that no arm loses its word because others have finished.

    Holm's method is applied to the difference tests of all arms with at least 3 pairs, and
    separately to their equivalence tests: in each of the two families, a false word has probability
    at most 1 - level. Equivalent wins over better and worse: a difference shown to be smaller than
    the margin is of no interest, though it may be shown not to be zero. Divergence never helps: an
    arm with diverged trials is worse or undecided, one whose baseline diverged better or undecided.

    Raises ValueError where `diverged` names an arm that `differences` lacks.
    """
    diverged = diverged or {}
    if unknown := sorted(set(diverged) - set(differences)):
        raise ValueError(f'diverged names {unknown}; the arms are {sorted(differences)}.')
    tested = {arm: d for arm, d in differences.items() if d is not None and d.n >= MIN_PAIRS}
    family = max(planned, len(tested))
    missing = [1.0] * (family - len(tested))
    p_differ = holm([*(d.p for d in tested.values()), *missing])
    p_same = holm([*(d.p_equivalence for d in tested.values()), *missing])
    adjusted = dict(zip(tested, zip(p_differ, p_same, strict=True), strict=False))
    verdicts = {}
    for arm, difference in differences.items():
        lost = diverged.get(arm, (0, 0))
        if arm in tested:
            verdicts[arm] = _verdict(difference, *adjusted[arm], family, 1 - level, lost)
        else:
            n = difference.n if difference else 0
            reason = f'{n} finished seed{"s" * (n != 1)} in both, a verdict needs {MIN_PAIRS}'
            verdicts[arm] = Verdict('undecided', None, None, _diverged(*lost) + reason)
    return verdicts


def _verdict(
    difference: Difference,
    p_differ: float,
    p_same: float,
    arms: int,
    alpha: float,
    lost: tuple[int, int],
) -> Verdict:
    its, the_baselines = lost
    error = difference.detectable / detectable_difference(1.0, difference.df)
    detectable = detectable_difference(error, difference.df, alpha / arms)
    over = f' after Holm over {arms} arms' if arms > 1 else ''
    side = 'better' if difference.mean < 0 else 'worse'
    differs = p_differ <= alpha
    allowed = not (its if side == 'better' else the_baselines)
    if p_same <= alpha and not its and not the_baselines:
        word, reason = 'equivalent', f'equivalence {_p(p_same)}{over}'
        if differs:
            reason += f'; {side} by less than {difference.margin:g} nats, {_p(p_differ)}'
    elif differs and allowed:
        word, reason = side, f'{_p(p_differ)}{over}'
    elif differs:
        word, reason = 'undecided', f'{side} on the seeds left, {_p(p_differ)}{over}'
    else:
        word = 'undecided'
        reason = (
            f'{_p(p_differ)}, equivalence {_p(p_same)}{over}; differences from {detectable:.2g} up '
            'would have been found'
        )
    return Verdict(word, p_differ, p_same, _diverged(*lost) + reason, detectable)


def _diverged(its: int, the_baselines: int) -> str:
    counts = {'its': its, "the baseline's": the_baselines}
    clauses = [f'{count} of {whose} trials diverged; ' for whose, count in counts.items() if count]
    return ''.join(clauses)


def _p(p: float) -> str:
    return 'p < 0.001' if p < 0.001 else f'p = {p:.3f}'


def _checked(margin: float, **groups: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    if not 0 < margin < math.inf:
        raise ValueError(f'margin is {margin}; equivalence needs a positive margin in nats.')
    for name, values in groups.items():
        if len(values) == 0 or not all(map(math.isfinite, values)):
            raise ValueError(f'{name} is {list(values)}; finite losses, at least one, are needed.')
    return tuple(tuple(map(float, values)) for values in groups.values())


def _unknown(mean: float, margin: float, *, is_paired: bool) -> Difference:
    return Difference(mean, 1, *(None,) * 8, paired=is_paired, margin=margin, df=None)


def _difference(
    mean: float,
    n: int,
    sd: float,
    error: float,
    df: float,
    margin: float,
    is_paired: bool,
    groups: Sequence[Sequence[float]],
    resamples: int | None,
) -> Difference:
    """The statistics of a mean with standard error `error`; `groups` are what is resampled."""
    half = float(special.stdtrit(df, 0.5 + LEVEL / 2)) * error
    ends = (None, None)
    if resamples is not None and n >= MIN_PAIRS:
        ends = bootstrap(*groups, resamples=resamples)
    return Difference(
        mean,
        n,
        sd,
        mean - half,
        mean + half,
        *ends,
        p=2 * _tail(abs(mean), error, df) if mean else 1.0,
        p_equivalence=_tail(margin - abs(mean), error, df),
        detectable=detectable_difference(error, df),
        paired=is_paired,
        margin=margin,
        df=df,
    )


def _tail(excess: float, error: float, df: float) -> float:
    """P(t > excess / error); with no error, whether `excess` is not above zero."""
    if error == 0:
        return float(excess <= 0)
    return float(special.stdtr(df, -excess / error))
