"""Intervals and tests over seeds: means and differences from a baseline.

A difference is an arm's loss minus the baseline's loss, in nats per token: a negative difference
means that the arm is better. Runs are paired by seed: both runs of a pair saw the same data in the
same order and the same initial draws.
"""

import bisect
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy  # whose submodules are imported on first use

# The confidence level of every interval.
LEVEL = 0.95
# A test finds a detectable difference with this probability.
POWER = 0.8
# Nats per token; arms closer than this are called equivalent.
MARGIN = 0.005
# Fewer pairs of seeds decide nothing.
MIN_PAIRS = 3
# No outlier is left out of fewer values, as the others would not show their own spread.
MIN_TO_LEAVE_OUT = 4
# A value is an outlier if it is further from the median than this many standard deviations. The
# standard deviation is estimated from the median absolute deviation.
APART = 5.0
# An evaluation on fewer documents does not represent the corpus that they are from.
MIN_DOCUMENTS = 100
# A spread below this fraction of the mean is due to rounding and is taken as 0.
ROUNDING = 1e-12

# Normal values have this ratio of standard deviation to median absolute deviation.
_SD_PER_MAD = 1.4826
# With this many degrees of freedom, a t variable is normal.
_MANY = 1_000_000
# If this many pairs do not find a difference, no number of pairs does.
_NEVER = 2**62


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The mean over n values with its 95 % t interval."""

    mean: float
    n: int
    sd: float | None  # with n - 1 in the denominator; None if n is 1, like the interval
    low: float | None
    high: float | None


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean of `values`. Two values or more also give sd and a 95 % t interval."""
    from_zero = _difference(
        values,
        margin=MARGIN,
        evaluation=(0.0, None),
        tuning=(0.0, 0.0),
        strata=[0] * len(values),
    )
    return Estimate(from_zero.mean, from_zero.n, from_zero.sd, from_zero.low, from_zero.high)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The mean of arm minus baseline over n pairs of seeds, with its intervals and tests.

    Losses, errors and margins are in nats per token.

    Standard error. Seeds and the documents of the evaluation set both add to the standard error se
    of the mean, se^2 = error_seeds^2 + error_evaluation^2. Its degrees of freedom `df` are those of
    Satterthwaite (1946), se^4 / sum_i (error_i^4 / df_i). Noise that is specific to a seed and a
    document enters both parts, so se is slightly too large.

    Tuning. Settings that miss their optimum raise a loss and never lower it. Let the arm's loss lie
    at most l above its loss at the best settings, and the baseline's at most u. Then the difference
    at the best settings lies between mean - l and mean + u. `tuning_low` is l and `tuning_high` is
    u; they are infinite if nothing bounds them. The interval and all tests allow for them.

    Outliers. A few outlying seeds, such as trials that nearly diverged, may shift the mean. They
    also add variance, which may hide what the other seeds show. `typical` is the difference without
    the outlying seeds. A finding has to hold with and without them, so each p value is the larger
    one of both samples, and `low` and `high` are the outer ends of both intervals. If the two means
    have opposite signs, `p` and `p_margin` are 1. For 4 or more normal values, this costs less than
    0.01 of power.

    Fields with a default are None with a single seed, and if the error of evaluation is not known.
    If se is 0, or sd is as small as rounding, the mean is taken as exact: p values are 0 or 1.
    """

    mean: float
    n: int
    margin: float
    tuning_low: float
    tuning_high: float
    sd: float | None = None  # of one pair
    # The 95 % t interval.
    low: float | None = None
    high: float | None = None
    # A small value rejects 'there is no difference' (two-sided).
    p: float | None = None
    # A small value rejects '|difference| is less than `margin`'. It is the one-sided p value at the
    # margin plus the one at zero. Because of the latter, a finding on the wrong side counts as
    # false, too.
    p_margin: float | None = None
    # A small value rejects '|difference| is `margin` or more', by two one-sided t tests (Schuirmann
    # 1987): the larger one of the next two p values.
    p_equivalence: float | None = None
    # A small value rejects 'the difference is -`margin` or less'.
    p_not_better: float | None = None
    # A small value rejects 'the difference is `margin` or more'. It is a test of non-inferiority,
    # as a lower loss is better.
    p_not_worse: float | None = None
    # The two parts of the standard error, and the degrees of freedom of their sum.
    error_seeds: float | None = None
    error_evaluation: float | None = None
    df: float | None = None
    # The same without the outlying seeds; None if no seed is an outlier. All other numbers but the
    # interval and the p values are those of all seeds.
    typical: 'Difference | None' = None


# With outlying seeds, these fields are the larger ones of the samples with and without them.
_LARGER = ('high', 'p', 'p_margin', 'p_equivalence', 'p_not_better', 'p_not_worse')


def paired_test(
    differences: Sequence[float],
    margin: float = MARGIN,
    *,
    evaluation: tuple[float, float | None] | None = (0.0, None),
    tuning: tuple[float, float] = (0.0, 0.0),
    strata: Sequence[int] | None = None,
) -> Difference:
    """Estimates and tests the mean of `differences`, one for each seed.

    Args:
        differences: The arm's loss minus the baseline's loss at the same seed, nats per token.
        margin: Arms that differ by less are equivalent, nats per token.
        evaluation: The standard error due to the choice of documents and its degrees of freedom,
            from `evaluation_error`. The degrees of freedom are None if the error is known exactly.
            `evaluation` is None if the error is not known.
        tuning: By how much the loss of the arm and of the baseline may at most exceed the loss at
            the best settings, nats per token.
        strata: The study of each difference, as a number. All differences form one sample, but
            studies tune their settings separately, so each difference varies around the mean of its
            own study. Each study takes one degree of freedom.

    Raises:
        ValueError: There are no differences, or one is not finite.
    """
    values = [float(difference) for difference in differences]
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError(f'differences={values} must be one or more finite numbers.')
    if strata is None:
        strata = [0] * len(values)
    with_outliers = _difference(values, margin, evaluation, tuning, strata)
    is_typical = _is_typical(values, strata)
    if with_outliers.p is None or all(is_typical):
        return with_outliers

    # A finding has to hold without the outliers as well.
    typical_indices = [index for index in range(len(values)) if is_typical[index]]
    without_outliers = _difference(
        [values[index] for index in typical_indices],
        margin,
        evaluation,
        tuning,
        [strata[index] for index in typical_indices],
    )
    # At least half of the values are typical, so both samples are tested.
    assert with_outliers.low is not None and without_outliers.low is not None

    combined_fields: dict[str, Any] = {'low': min(with_outliers.low, without_outliers.low)}
    for name in _LARGER:
        combined_fields[name] = max(getattr(with_outliers, name), getattr(without_outliers, name))
    have_same_sign = with_outliers.mean * without_outliers.mean > 0
    if not have_same_sign:
        combined_fields['p'] = 1.0
        combined_fields['p_margin'] = 1.0
    return dataclasses.replace(with_outliers, typical=without_outliers, **combined_fields)


def _difference(
    values: Sequence[float],
    margin: float,
    evaluation: tuple[float, float | None] | None,
    tuning: tuple[float, float],
    strata: Sequence[int],
) -> Difference:
    """Estimates and tests the mean of all values, outliers included; arguments as in `paired_test`.

    With m strata, sd^2 = sum_i (d_i - mean of its stratum)^2 / (n - m), error_seeds = sd / sqrt(n),
    and the error of the mean, in units of the standard error, is t distributed (`Difference`).
    """
    mean = statistics.fmean(values)
    n = len(values)
    tuning_low, tuning_high = tuning
    untested = Difference(mean, n, margin, tuning_low, tuning_high)
    df_of_seeds = n - len(set(strata))
    if df_of_seeds < 1 or evaluation is None:
        return untested

    deviation_N = _centred(values, strata, np.mean)
    sd = 0.0
    if not _is_rounding(deviation_N, mean):
        sd = float((deviation_N @ deviation_N / df_of_seeds) ** 0.5)
    error_seeds = sd / n**0.5
    error_evaluation, _ = evaluation
    error, df = combined([(error_seeds, df_of_seeds), evaluation])

    def tail(excess: float) -> float:
        """Returns the probability that the estimated mean exceeds the true one by `excess`."""
        if error > 0:
            return float(scipy.special.stdtr(df, -excess / error))
        return float(excess <= 0)  # an exact mean exceeds nothing

    # The difference at the best settings lies between these two (see `Difference`).
    lowest = mean - tuning_low
    highest = mean + tuning_high
    # The smallest |difference| in that range; negative if tuning may explain the whole mean.
    least_size = max(lowest, -highest)
    half_width = t_quantile(df) * error
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
        error_evaluation=error_evaluation,
        df=df,
    )


def t_quantile(df: float) -> float:
    """Returns the half-width of a 95 % t interval, in standard errors."""
    return float(scipy.special.stdtrit(df, 0.5 + LEVEL / 2))


def combined(errors: Sequence[tuple[float, float | None]]) -> tuple[float, float]:
    """Returns the standard error of a sum of independent errors, and its degrees of freedom.

    By Satterthwaite (1946, Biometrics Bulletin 2:110),

        error^2 = sum_i error_i^2,    df = error^4 / sum_i (error_i^4 / df_i).

    `errors` are pairs (error_i, df_i). A df_i of None means that error_i is known exactly, so its
    term in the sum for df is 0.
    """
    variance = sum(error**2 for error, _ in errors)
    if not variance:
        # The formula for df is 0 / 0; the degrees of freedom of all errors add up.
        return 0.0, sum(df or 0 for _, df in errors)
    error_of_sum = variance**0.5
    denominator = sum(error**4 / df for error, df in errors if df)
    if not denominator:
        return error_of_sum, _MANY  # every error above 0 is known exactly
    return error_of_sum, min(variance**2 / denominator, _MANY)


def typical(values: Sequence[float]) -> tuple[float, ...]:
    """Returns the values that are not outliers.

    An outlier lies more than APART standard deviations from the median. The standard deviation is
    estimated as 1.4826 times the median absolute deviation (MAD). No value is an outlier if there
    are fewer than MIN_TO_LEAVE_OUT values or the MAD is 0.

    A normal sample has an outlier with probability 5 % at 8 values and 2 % at 16.
    """
    # With a single stratum, all values are compared with one median.
    single_stratum = [0] * len(values)
    is_typical = _is_typical(values, strata=single_stratum)
    return tuple(value for value, is_kept in zip(values, is_typical, strict=True) if is_kept)


def _is_typical(values: Sequence[float], strata: Sequence[int]) -> list[bool]:
    """Returns for each value whether it is `typical`, compared with the median of its stratum."""
    distance_N = np.abs(_centred(values, strata, np.median))
    sd = _SD_PER_MAD * float(np.median(distance_N))
    half_agree = sd <= ROUNDING * abs(statistics.median(values))
    if len(values) < MIN_TO_LEAVE_OUT or half_agree:
        return [True] * len(values)
    return (distance_N <= APART * sd).tolist()


def _centred(
    values: Sequence[float], strata: Sequence[int], centre: Callable[[np.ndarray], float]
) -> np.ndarray:
    """Subtracts from each value the `centre` (mean or median) of all values of its stratum."""
    values_N = np.array(values, float)
    strata_N = np.array(strata)
    for stratum in set(strata):
        is_member_N = strata_N == stratum
        values_N[is_member_N] -= centre(values_N[is_member_N])
    return values_N


def evaluation_error(nats_SC: np.ndarray, tokens_C: np.ndarray) -> tuple[float, float]:
    """Returns the standard error due to the choice of documents, and its degrees of freedom.

    Another sample of evaluation documents would give another difference D between arm and baseline.
    With the share w_C of document C in all tokens, and its own difference D_C per token,

        w_C = tokens_C / sum_C tokens_C
        D_C = (mean over S of nats_SC) / tokens_C
        D = sum_C w_C D_C
        variance = sum_C w_C^2 (D_C - D)^2 / (1 - w_C)
        df = (sum_C w_C^2)^2 / sum_C w_C^4 - 1.

    This is the variance of D by Bell and McCaffrey (2002). It allows for dependence between the
    tokens of a document. The degrees of freedom assume that all documents vary equally.

    Args:
        nats_SC: Nats of the arm minus nats of the baseline, summed over the tokens of each document
            (cluster) C, for each seed S.
        tokens_C: The number of tokens of each document, above 0. There are two documents or more.
    """
    share_C = tokens_C / tokens_C.sum()  # w_C
    nats_C = nats_SC.mean(axis=0)
    difference_C = nats_C / tokens_C  # D_C
    mean = share_C @ difference_C  # D
    deviation_C = difference_C - mean
    # If all documents agree, rounding must not count as an error.
    if _is_rounding(deviation_C, mean):
        deviation_C = np.zeros_like(deviation_C)

    variance = np.sum(share_C**2 * deviation_C**2 / (1 - share_C))
    df = np.sum(share_C**2) ** 2 / np.sum(share_C**4) - 1
    return float(variance**0.5), float(df)


def detectable_difference(error: float, df: float, alpha: float = 1 - LEVEL) -> float:
    """Returns the |difference| that a two-sided t test at `alpha` finds with probability POWER.

    `error` is the standard error of the mean difference, estimated with `df` degrees of freedom.
    For example, an error of 0.002 with 9 degrees of freedom gives 0.0065 at alpha = 0.05.

    An estimate of the error is more often too low than too high: its median is the true error times
    sqrt(chi2_median(df) / df). The estimate is divided by that factor.

    The test statistic is noncentral t with noncentrality difference / error. The result is the
    difference at which the statistic exceeds the critical value, on the difference's own side, with
    probability POWER.
    """
    chi2_median = scipy.special.chdtri(df, 0.5)
    unbiased_error = error * (df / chi2_median) ** 0.5
    critical = scipy.special.stdtrit(df, 1 - alpha / 2)  # a quantile of the t distribution
    # At this noncentrality, the statistic stays below `critical` with probability 1 - POWER.
    noncentrality = scipy.special.nctdtrinc(df, 1 - POWER, critical)
    return float(noncentrality * unbiased_error)


def _is_rounding(deviations: np.ndarray, mean: float) -> bool:
    """Returns whether all deviations from `mean` are as small as its rounding."""
    return bool(np.max(np.abs(deviations)) <= ROUNDING * abs(mean))


def to_find(
    difference: Difference, apart: float, alpha: float = 1 - LEVEL
) -> tuple[int, float] | None:
    """Plans a study that can tell the mean difference from a bound.

    With n pairs of seeds, the error of seeds is sd / sqrt(n). With k times as many documents, the
    error of evaluation is error_evaluation / sqrt(k). The error of tuning stays as it is. If
    further pairs suffice, k is 1; otherwise the seeds and the documents each get half of the
    variance.

    Outlying seeds (`Difference.typical`) need no plan of their own. Without them the pairs vary
    less, so the same number suffices.

    Args:
        difference: The difference that the existing pairs show.
        apart: The bound minus the mean, nats per token; negative if the bound lies below the mean.
        alpha: The level of the two-sided test.

    Returns:
        The number of pairs n and the factor of documents k. None if the sd is not known (one pair),
        or if tuning alone may reach the bound.
    """
    sd = difference.sd
    error_evaluation = difference.error_evaluation
    tuning = difference.tuning_high if apart > 0 else difference.tuning_low
    distance = abs(apart) - tuning  # the |difference| that the planned study has to find
    if sd is None or error_evaluation is None or distance <= 0:
        return None

    def detectable_with(num_pairs: int, document_factor: float) -> float:
        """Returns the |difference| that n pairs and k times as many documents find."""
        variance_seeds = sd**2 / num_pairs
        variance = variance_seeds + error_evaluation**2 / document_factor
        df = math.inf
        if variance_seeds:
            df = (num_pairs - 1) * (variance / variance_seeds) ** 2  # Satterthwaite
        return detectable_difference(variance**0.5, min(df, _MANY), alpha)

    def fewest_pairs(document_factor: float) -> int:
        """Returns the fewest pairs that find `distance`, or _NEVER if no number of pairs does."""

        def suffice(num_pairs: int) -> bool:
            return detectable_with(num_pairs, document_factor) <= distance

        # More pairs find smaller differences, so bisection finds the first number that suffices.
        return bisect.bisect_left(range(_NEVER), True, lo=MIN_PAIRS, key=suffice)

    num_pairs = fewest_pairs(document_factor=1.0)
    if num_pairs < _NEVER:
        return num_pairs, 1.0

    # With this many documents, half of the variance is left for the seeds.
    detectable = error_evaluation * detectable_difference(1.0, _MANY, alpha)
    document_factor = max(1.0, 2 * (detectable / distance) ** 2)
    return fewest_pairs(document_factor), document_factor
