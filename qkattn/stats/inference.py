"""Intervals and tests over seeds: means and differences from a baseline.

A difference is an arm's loss minus the baseline's, in nats per token: below zero is better. Seeds
pair the two: both arms saw the same data order and the same initial draws.
"""

import bisect
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import scipy  # whose submodules are imported on first use

LEVEL = 0.95  # of every interval
POWER = 0.8  # the probability with which a detectable difference is found
MARGIN = 0.005  # nats per token; arms closer than this are called equivalent
MIN_PAIRS = 3  # fewer seeds decide nothing
MIN_TO_LEAVE_OUT = 4  # the spread of fewer values is not known without the one that lies apart
APART = 5.0  # standard deviations, estimated from the median absolute deviation
MIN_DOCUMENTS = 100  # of text in an evaluation; fewer do not stand for the text they are from
ROUNDING = 1e-12  # a spread below this fraction of the mean is that of rounding, and taken as 0

_SD_PER_MAD = 1.4826  # the standard deviation of normal values by their median absolute deviation
_MANY = 1_000_000  # degrees of freedom: a t variable is normal
_NEVER = 2**62  # pairs: what so many do not find, none do


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
    from_zero = _difference(values, MARGIN, (0.0, None), (0.0, 0.0), [0] * len(values))
    return Estimate(from_zero.mean, from_zero.n, from_zero.sd, from_zero.low, from_zero.high)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Mean of arm minus baseline, nats per token, with intervals and tests over n pairs of seeds.

    The standard error se of the mean has a part from the seeds and one from the documents of the
    evaluation set, se^2 = error_seeds^2 + error_evaluation^2, with the degrees of freedom `df` of
    Satterthwaite (1946), se^4 / sum_i (error_i^4 / df_i). Noise that is specific to a seed and a
    document enters both, so se is rather too large. `sd` is that of one pair.

    Settings that miss their optimum raise a loss, never lower it. If the baseline's loss is at most
    u, and the arm's at most l above that of the best settings, the difference of the best settings
    lies between mean - l and mean + u: `tuning_low` is l and `tuning_high` is u, infinite where
    nothing bounds them. All of the following allow for both:

    `low`, `high`: the 95 % t interval. `p`: two-sided test of no difference. `p_margin`: test of a
    difference of less than `margin`, the one-sided p value at the margin plus that at zero, so that
    a difference in the wrong direction counts as false too. `p_equivalence`: two one-sided t tests
    (Schuirmann 1987) of a difference of `margin` or more in either direction; the larger p value.
    The two alone: `p_not_better`, of a mean of -`margin` or less, and `p_not_worse`, of one of
    `margin` or more (a test of non-inferiority, as a lower loss is better).

    A few seeds that lie apart, such as trials that nearly diverged, may shift a mean, or hide by
    the variance that they add what the others show. `typical` is the same difference without the
    seeds that lie apart; None if none does. A finding holds with and without them: each p value is
    the larger one of both, and 1 for a side that they do not share; `low` and `high` are the outer
    ends of both intervals. `mean`, `sd`, `df` and the errors are those of all seeds. Among values
    without outliers `typical` costs no power: less than 0.01 from 4 normal values on.

    With a single seed, or an error of evaluation that is not known, there are no errors, intervals
    and tests. If se is 0, or sd as small as the rounding of the values, the mean is taken as exact:
    p values are 0 or 1.
    """

    mean: float
    n: int
    margin: float
    tuning_low: float
    tuning_high: float
    sd: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_margin: float | None = None
    p_equivalence: float | None = None
    p_not_better: float | None = None
    p_not_worse: float | None = None
    error_seeds: float | None = None
    error_evaluation: float | None = None
    df: float | None = None
    typical: 'Difference | None' = None


# The fields of a Difference that are the larger ones with and without the seeds that lie apart.
_LARGER = ('high', 'p', 'p_margin', 'p_equivalence', 'p_not_better', 'p_not_worse')


def paired(
    differences: Sequence[float],
    margin: float = MARGIN,
    *,
    evaluation: tuple[float, float | None] | None = (0.0, None),
    tuning: tuple[float, float] = (0.0, 0.0),
    strata: Sequence[int] | None = None,
) -> Difference:
    """The mean of `differences`, arm minus baseline of the same seed (nats per token).

    `margin` and `tuning`, the largest losses by which arm and baseline may miss their optimum, are
    in nats per token. `evaluation` is what `evaluation_error` gives, with None for the degrees of
    freedom of an error that is known exactly; None if it is not known. `strata` says which study
    each difference is from: one sample, but each value varies around the mean of its own study, as
    studies tune to settings of their own. That takes a degree of freedom for each study. Raises
    ValueError for no differences, or one that is not finite.
    """
    values = [float(difference) for difference in differences]
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError(f'differences={values} must be one or more finite numbers.')
    if strata is None:
        strata = [0] * len(values)
    of_all = _difference(values, margin, evaluation, tuning, strata)
    is_near = _is_near(values, strata)
    if of_all.p is None or all(is_near):
        return of_all
    # A finding holds with and without the values that lie apart, so it is tested without them, too.
    near = [number for number in range(len(values)) if is_near[number]]
    of_near = _difference(
        [values[number] for number in near],
        margin,
        evaluation,
        tuning,
        [strata[number] for number in near],
    )
    # Half of the values or more are near, so both differences are tested.
    assert of_all.low is not None and of_near.low is not None
    fields = {name: max(getattr(of_all, name), getattr(of_near, name)) for name in _LARGER}
    fields['low'] = min(of_all.low, of_near.low)
    if of_all.mean * of_near.mean <= 0:  # they share no side
        fields['p'] = 1.0
        fields['p_margin'] = 1.0
    return dataclasses.replace(of_all, typical=of_near, **fields)


def _difference(
    values: Sequence[float],
    margin: float,
    evaluation: tuple[float, float | None] | None,
    tuning: tuple[float, float],
    strata: Sequence[int],
) -> Difference:
    """The difference of all values, whether they lie apart or not; arguments as of `paired`.

    With m strata, sd^2 = sum_i (d_i - mean of its stratum)^2 / (n - m), error_seeds = sd / sqrt(n),
    and the error of the mean, in units of se, is t distributed (`Difference`).
    """
    mean = statistics.fmean(values)
    n = len(values)
    untested = Difference(mean, n, margin, *tuning)
    df_of_seeds = n - len(set(strata))
    if df_of_seeds < 1 or evaluation is None:
        return untested
    apart_N = _centred(values, strata, np.mean)
    sd = 0.0
    if not _is_rounding(apart_N, mean):
        sd = float((apart_N @ apart_N / df_of_seeds) ** 0.5)
    error_seeds = sd / n**0.5
    error, df = combined([(error_seeds, df_of_seeds), evaluation])

    def tail(excess: float) -> float:
        """Probability that the error of the mean exceeds `excess`; 0 or 1 if it has none."""
        if error > 0:
            return float(scipy.special.stdtr(df, -excess / error))
        return float(excess <= 0)

    # Where the difference of the best settings may lie: see `Difference`.
    lowest = mean - tuning[0]
    highest = mean + tuning[1]
    least_size = max(lowest, -highest)  # of |mean|; negative if tuning explains it all
    half_width = quantile(df) * error
    p_not_better = tail(margin + lowest)
    p_not_worse = tail(margin - highest)
    return dataclasses.replace(
        untested,
        sd=sd,
        low=lowest - half_width,
        high=highest + half_width,
        p=min(1.0, 2 * tail(least_size)),
        p_margin=min(1.0, tail(least_size - margin) + tail(least_size)),
        p_equivalence=max(p_not_better, p_not_worse),
        p_not_better=p_not_better,
        p_not_worse=p_not_worse,
        error_seeds=error_seeds,
        error_evaluation=evaluation[0],
        df=df,
    )


def quantile(df: float) -> float:
    """Standard errors from the mean to either end of a 95 % t interval."""
    return float(scipy.special.stdtrit(df, 0.5 + LEVEL / 2))


def combined(errors: Sequence[tuple[float, float | None]]) -> tuple[float, float]:
    """The standard error of a sum of independent errors, and its degrees of freedom.

    By Satterthwaite (1946, Biometrics Bulletin 2:110),

        error^2 = sum_i error_i^2,    df = error^4 / sum_i (error_i^4 / df_i).

    `errors` are (error_i, df_i); a df_i of None is that of an error that is known exactly, whose
    term is 0.
    """
    variance = sum(error**2 for error, _ in errors)
    if not variance:  # nothing varies, by all degrees of freedom there are
        return 0.0, sum(df or 0 for _, df in errors)
    spread = sum(error**4 / df for error, df in errors if df)
    if not spread:
        return variance**0.5, _MANY
    return variance**0.5, min(variance**2 / spread, _MANY)


def typical(values: Sequence[float]) -> tuple[float, ...]:
    """The values without those that lie apart: further than APART from the median.

    In standard deviations, 1.4826 times the median absolute deviation, which up to half of the
    values cannot raise. All values if there are fewer than MIN_TO_LEAVE_OUT or half of them agree.
    Of 8 normal values one or more lie apart in 5 % of all samples, of 16 in 2 %.
    """
    is_near = _is_near(values, [0] * len(values))
    return tuple(values[number] for number in range(len(values)) if is_near[number])


def _is_near(values: Sequence[float], strata: Sequence[int]) -> list[bool]:
    """Which values are `typical`, each compared with the median of its stratum."""
    distance_N = np.abs(_centred(values, strata, np.median))
    spread = _SD_PER_MAD * float(np.median(distance_N))
    half_agree = spread <= ROUNDING * abs(statistics.median(values))
    if len(values) < MIN_TO_LEAVE_OUT or half_agree:
        return [True] * len(values)
    return (distance_N <= APART * spread).tolist()


def _centred(
    values: Sequence[float], strata: Sequence[int], centre: Callable[[np.ndarray], float]
) -> np.ndarray:
    """The values, each minus the `centre` (mean or median) of all values of its stratum."""
    values_N = np.array(values, float)
    strata_N = np.array(strata)
    for stratum in set(strata):
        is_member_N = strata_N == stratum
        values_N[is_member_N] -= centre(values_N[is_member_N])
    return values_N


def evaluation_error(nats_SC: np.ndarray, tokens_C: np.ndarray) -> tuple[float, float]:
    """Standard error of a difference due to the choice of documents, and its degrees of freedom.

    `nats_SC` is arm minus baseline by seed and document (cluster), nats summed over its tokens.
    With the share w_C = tokens_C / sum(tokens) of document C and its own difference D_C, the mean
    over seeds of nats_SC / tokens_C, the difference, its cluster-robust variance (Bell and
    McCaffrey 2002) and the degrees of freedom of documents that vary equally are

        D = sum_C w_C D_C
        variance = sum_C w_C^2 (D_C - D)^2 / (1 - w_C)
        df = (sum_C w_C^2)^2 / sum_C w_C^4 - 1.

    There must be two documents or more, each with tokens.
    """
    share_C = tokens_C / tokens_C.sum()
    difference_C = nats_SC.mean(axis=0) / tokens_C
    mean = share_C @ difference_C
    apart_C = difference_C - mean
    if _is_rounding(apart_C, mean):
        apart_C = np.zeros_like(apart_C)
    variance = np.sum(share_C**2 * apart_C**2 / (1 - share_C))
    df = np.sum(share_C**2) ** 2 / np.sum(share_C**4) - 1
    return float(variance**0.5), float(df)


def detectable_difference(error: float, df: float, alpha: float = 1 - LEVEL) -> float:
    """The |difference| that a two-sided t test at `alpha` finds with probability POWER.

    `error` is the standard error of the mean difference, in the unit of the result, as estimated
    with `df` degrees of freedom. Such an estimate is too low in more than half of all cases; it is
    divided by its median, sqrt(chi2_median(df) / df) times the true error. The statistic is
    noncentral t with noncentrality difference / error; the solution is the noncentrality at which
    it exceeds the critical value with probability POWER, in the difference's own direction.
    """
    critical = scipy.special.stdtrit(df, 1 - alpha / 2)  # a quantile of the t distribution
    chi2_median = scipy.special.chdtri(df, 0.5)
    unbiased = error * (df / chi2_median) ** 0.5
    # The noncentrality at which the distribution function at `critical` is 1 - POWER.
    noncentrality = scipy.special.nctdtrinc(df, 1 - POWER, critical)
    return float(noncentrality * unbiased)


def _is_rounding(apart: np.ndarray, mean: float) -> bool:
    """Whether the distances of values from their mean are no more than rounding."""
    return bool(np.max(np.abs(apart)) <= ROUNDING * abs(mean))


def to_find(
    difference: Difference, apart: float, alpha: float = 1 - LEVEL
) -> tuple[int, float] | None:
    """Pairs, and times as many documents, that tell a mean from a bound `apart` above (or below).

    `difference` is of the pairs there are, `apart` in nats per token, `alpha` the level of the
    test. n pairs have error_seeds = sd / sqrt(n), k times as many documents error_evaluation /
    sqrt(k); the error of tuning on that side stays. k is 1 where pairs suffice; otherwise each
    error gets half of the variance. The pairs that do not lie apart (`Difference.typical`) vary
    less, so they suffice too. None without a spread to plan with (one pair), and if tuning alone
    may reach the bound.
    """
    sd = difference.sd
    error_evaluation = difference.error_evaluation
    tuning = difference.tuning_high if apart > 0 else difference.tuning_low
    distance = abs(apart) - tuning
    if sd is None or error_evaluation is None or distance <= 0:
        return None

    def fewest_pairs(documents: float) -> int:
        """The pairs that suffice with so many times the documents; _NEVER if none do."""

        def suffice(n: int) -> bool:
            """Whether n pairs find a difference as large as the distance."""
            variance_seeds = sd**2 / n
            variance = sd**2 / n + error_evaluation**2 / documents
            df = math.inf
            if variance_seeds:
                df = (n - 1) * (variance / variance_seeds) ** 2  # Satterthwaite
            return detectable_difference(variance**0.5, min(df, _MANY), alpha) <= distance

        return bisect.bisect_left(range(_NEVER), True, lo=MIN_PAIRS, key=suffice)

    num_pairs = fewest_pairs(documents=1.0)
    if num_pairs < _NEVER:
        return num_pairs, 1.0
    # So many documents that half of the variance is left for the seeds.
    detectable = error_evaluation * detectable_difference(1.0, _MANY, alpha)
    documents = max(1.0, 2 * (detectable / distance) ** 2)
    return fewest_pairs(documents), documents
