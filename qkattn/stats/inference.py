"""Confidence intervals and tests for means over seeds, and for differences from a baseline.

A difference is the loss of an arm minus the loss of the baseline, in nats per token. The arm is
better if the difference is negative. Runs are paired by seed: the runs of a pair share the data,
the order of the data and the initial random draws.
"""

import bisect
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy  # whose submodules are imported on first use

# Confidence level of all intervals.
LEVEL = 0.95
# The probability with which a test finds a detectable difference.
POWER = 0.8
# Equivalence margin in nats per token.
MARGIN = 0.005
# Minimum number of pairs of seeds for a decision.
MIN_PAIRS = 3
# Minimum number of values for leaving out outliers.
MIN_TO_LEAVE_OUT = 4
# Distance of an outlier from the median, in (robust) standard deviations.
APART = 5.0
# Minimum number of documents that represent a corpus.
MIN_DOCUMENTS = 100
# Deviations below this fraction of the mean are treated as rounding errors.
ROUNDING = 1e-12

# Ratio of standard deviation to median absolute deviation of a normal distribution.
_SD_PER_MAD = 1.4826
# Degrees of freedom with which a t distribution is practically normal.
_MANY = 1_000_000
# A number of pairs that stands for infinity.
_NEVER = 2**62


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The mean of n values with its 95 % t interval."""

    mean: float
    n: int
    # None if n is 1.
    sd: float | None  # with n - 1 in the denominator
    low: float | None
    high: float | None


def estimate(values: Sequence[float]) -> Estimate:
    """Estimates the mean of `values` and its 95 % t interval."""
    from_zero = _difference(
        values,
        margin=MARGIN,
        evaluation=(0.0, None),
        tuning=(0.0, 0.0),
        strata=[0] * len(values),
    )
    return Estimate(
        mean=from_zero.mean,
        n=from_zero.n,
        sd=from_zero.sd,
        low=from_zero.low,
        high=from_zero.high,
    )


@dataclasses.dataclass(frozen=True)
class Difference:
    """The mean of arm minus baseline over n pairs of seeds, with its interval and tests.

    Losses, errors and margins are in nats per token.

    Standard error. The variance of the mean is error_seeds^2 + error_evaluation^2, with `df`
    degrees of freedom (`combined`). error_evaluation is due to the choice of evaluation documents.

    Tuning. Settings that miss their optimum can only raise a loss, by at most `tuning_low` for the
    arm and `tuning_high` for the baseline (both may be infinite). So the difference at optimal
    settings lies between mean - tuning_low and mean + tuning_high. The interval and all tests allow
    for this range.

    Outliers. Outlying seeds, such as trials that nearly diverged, shift the mean and add variance.
    A finding has to hold both with and without these seeds. So each p value is the larger one of
    the two samples, and the interval covers both intervals. If the means of the two samples have
    opposite signs, `p` and `p_margin` are 1.

    Fields with a default are None for a single seed or an unknown evaluation error.
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
    # The p value for 'the difference is zero' (two-sided).
    p: float | None = None
    # The p value for '|difference| is less than `margin`': the sum of the one-sided p values at the
    # margin and at zero, so that a finding on the wrong side counts as an error.
    p_margin: float | None = None
    # The p value for '|difference| is `margin` or more', by two one-sided t tests (Schuirmann
    # 1987): the larger one of p_not_better and p_not_worse.
    p_equivalence: float | None = None
    # The p value for 'the difference is -`margin` or less'.
    p_not_better: float | None = None
    # The p value for 'the difference is `margin` or more' (non-inferiority).
    p_not_worse: float | None = None
    # The two parts of the standard error, and the degrees of freedom of the whole.
    error_seeds: float | None = None
    error_evaluation: float | None = None
    df: float | None = None
    # The difference without outlying seeds; None if no seed is an outlier.
    typical: 'Difference | None' = None


# Fields that are the larger one of the samples with and without outlying seeds.
_LARGER = ('high', 'p', 'p_margin', 'p_equivalence', 'p_not_better', 'p_not_worse')


def paired_test(
    differences: Sequence[float],
    margin: float = MARGIN,
    *,
    evaluation: tuple[float, float | None] | None = (0.0, None),
    tuning: tuple[float, float] = (0.0, 0.0),
    strata: Sequence[int] | None = None,
) -> Difference:
    """Estimates and tests the mean of the differences of n seeds.

    Args:
        differences: For each seed, the arm's loss minus the baseline's loss, nats per token.
        margin: The equivalence margin, nats per token.
        evaluation: The standard error due to the choice of documents, and its degrees of freedom,
            from `evaluation_error`; (error, None) for an exactly known error, and None for an
            unknown error.
        tuning: The most by which the losses of the arm and the baseline may exceed their losses at
            optimal settings, nats per token.
        strata: For each seed, the number of the study that it is from. Each study has its own mean,
            which takes one degree of freedom. By default, all seeds are from one study.

    Raises:
        ValueError: There are no differences, or a difference is not finite.
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

    typical_indices = [index for index in range(len(values)) if is_typical[index]]
    typical_values = [values[index] for index in typical_indices]
    typical_strata = [strata[index] for index in typical_indices]
    without_outliers = _difference(typical_values, margin, evaluation, tuning, typical_strata)
    # At least half of the values are typical, so both samples are tested.
    assert with_outliers.low is not None and without_outliers.low is not None

    combined_fields: dict[str, Any] = {'low': min(with_outliers.low, without_outliers.low)}
    for name in _LARGER:  # such as 'high' and 'p'
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
    """Estimates and tests the mean of all values, including outliers.

    With m strata, the variance of a value d_i is

        sd^2 = sum_i (d_i - mean of its stratum)^2 / (n - m).

    The arguments are those of `paired_test`.
    """
    mean = statistics.fmean(values)
    n = len(values)
    tuning_low, tuning_high = tuning
    untested = Difference(mean, n, margin, tuning_low, tuning_high)
    df_of_seeds = n - len(set(strata))
    if df_of_seeds < 1 or evaluation is None:
        return untested

    deviation_N = _subtract_centres(values, strata, centre=np.mean)
    sd = 0.0
    if not _is_rounding(deviation_N, mean):
        sd = float((deviation_N @ deviation_N / df_of_seeds) ** 0.5)
    error_seeds = sd / n**0.5
    error_evaluation, _ = evaluation
    error, df = combined([(error_seeds, df_of_seeds), evaluation])

    def upper_tail(excess: float) -> float:
        """Returns the probability that the sample mean exceeds the true mean by `excess`."""
        if error > 0:
            return float(scipy.special.stdtr(df, -excess / error))
        return float(excess <= 0)  # the sample mean is exact

    # The range of the difference at optimal settings.
    lowest = mean - tuning_low
    highest = mean + tuning_high
    # The smallest |difference| in this range, or a negative number if the range contains 0.
    smallest_size = max(lowest, -highest)
    p_one_sided = upper_tail(smallest_size)
    p_beyond_margin = upper_tail(smallest_size - margin)
    p_not_better = upper_tail(lowest + margin)
    p_not_worse = upper_tail(margin - highest)
    half_width = t_quantile(df) * error
    return dataclasses.replace(
        untested,
        sd=sd,
        low=lowest - half_width,
        high=highest + half_width,
        p=min(1.0, 2 * p_one_sided),
        p_margin=min(1.0, p_beyond_margin + p_one_sided),
        p_equivalence=max(p_not_better, p_not_worse),
        p_not_better=p_not_better,
        p_not_worse=p_not_worse,
        error_seeds=error_seeds,
        error_evaluation=error_evaluation,
        df=df,
    )


def t_quantile(df: float) -> float:
    """Returns the half-width of a 95 % t interval in standard errors."""
    return float(scipy.special.stdtrit(df, 0.5 + LEVEL / 2))


def combined(errors: Sequence[tuple[float, float | None]]) -> tuple[float, float]:
    """Combines independent standard errors, and returns the total and its degrees of freedom.

    By Satterthwaite (1946, Biometrics Bulletin 2:110),

        error^2 = sum_i error_i^2,    df = error^4 / sum_i (error_i^4 / df_i).

    Args:
        errors: Pairs (error_i, df_i). None as df_i stands for infinity: the error is known exactly.
    """
    variance = sum(error**2 for error, _ in errors)
    if not variance:
        # The formula for df would be 0 / 0, so add up the finite degrees of freedom.
        finite_dfs = [df for _, df in errors if df is not None]
        return 0.0, sum(finite_dfs)
    total_error = variance**0.5
    denominator = sum(error**4 / df for error, df in errors if df)
    if not denominator:
        return total_error, _MANY  # all errors are known exactly
    return total_error, min(variance**2 / denominator, _MANY)


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
    distance_N = np.abs(_subtract_centres(values, strata, centre=np.median))
    sd = _SD_PER_MAD * float(np.median(distance_N))
    agree_to_rounding = sd <= ROUNDING * abs(statistics.median(values))
    if len(values) < MIN_TO_LEAVE_OUT or agree_to_rounding:
        return [True] * len(values)
    return (distance_N <= APART * sd).tolist()


def _subtract_centres(
    values: Sequence[float], strata: Sequence[int], centre: Callable[[np.ndarray], float]
) -> np.ndarray:
    """Subtracts from each value the `centre` (mean or median) of its stratum."""
    values_N = np.array(values, float)
    strata_N = np.array(strata)
    for stratum in set(strata):
        is_member_N = strata_N == stratum
        values_N[is_member_N] -= centre(values_N[is_member_N])
    return values_N


def evaluation_error(nats_SC: np.ndarray, tokens_C: np.ndarray) -> tuple[float, float]:
    """Returns the standard error due to the choice of documents, and its degrees of freedom.

    Another sample of C documents would give another mean difference D between arm and baseline. By
    Bell and McCaffrey (2002), with documents as clusters of tokens,

        w_C = tokens_C / sum_C tokens_C
        D_C = (mean over S of nats_SC) / tokens_C
        D = sum_C w_C D_C
        variance = sum_C w_C^2 (D_C - D)^2 / (1 - w_C)
        df = (sum_C w_C^2)^2 / sum_C w_C^4 - 1, but at least 1.

    The degrees of freedom assume that all documents vary equally. The formula is approximate. If
    one document has most of the tokens, it tends to 0, but an estimated variance has at least one
    degree of freedom.

    Args:
        nats_SC: For S seeds, the nats of the arm minus the nats of the baseline, summed over each
            of C documents.
        tokens_C: The number of tokens of each document, above 0. C is 2 or more.
    """
    w_C = tokens_C / tokens_C.sum()
    D_C = nats_SC.mean(axis=0) / tokens_C
    D = w_C @ D_C
    deviation_C = D_C - D
    # Rounding errors must not count if all documents agree.
    if _is_rounding(deviation_C, D):
        deviation_C = np.zeros_like(deviation_C)

    variance = np.sum(w_C**2 * deviation_C**2 / (1 - w_C))
    df = np.sum(w_C**2) ** 2 / np.sum(w_C**4) - 1
    return float(variance**0.5), max(float(df), 1.0)


def detectable_difference(error: float, df: float, alpha: float = 1 - LEVEL) -> float:
    """Returns the |difference| that a two-sided t test at `alpha` finds with probability POWER.

    For example, an error of 0.002 with 9 degrees of freedom gives 0.0065 at alpha = 0.05.

    Args:
        error: The estimated standard error of the mean difference. It is corrected for its median
            bias: an estimated error is too low more often than too high.
        df: The degrees of freedom of `error`.
        alpha: The significance level.
    """
    chi2_median = scipy.special.chdtri(df, 0.5)
    corrected_error = error * (df / chi2_median) ** 0.5
    critical_t = scipy.special.stdtrit(df, 1 - alpha / 2)
    # The test statistic has a noncentral t distribution with noncentrality difference / error. It
    # must be below `critical_t` with probability 1 - POWER.
    noncentrality = scipy.special.nctdtrinc(df, 1 - POWER, critical_t)
    return float(noncentrality * corrected_error)


def _is_rounding(deviations: np.ndarray, mean: float) -> bool:
    """Whether all deviations from `mean` are as small as rounding errors."""
    return bool(np.max(np.abs(deviations)) <= ROUNDING * abs(mean))


def to_find(
    difference: Difference, apart: float, alpha: float = 1 - LEVEL
) -> tuple[int, float] | None:
    """Plans a study that can distinguish the mean difference from a bound.

    More documents are planned only if more seeds do not suffice.

    Args:
        difference: The difference in the present study.
        apart: The bound minus the mean, nats per token.
        alpha: The level of the two-sided test.

    Returns:
        The number of pairs of seeds, and the factor by which the number of documents grows. None if
        an error of the present study is unknown, or if imperfect tuning may reach the bound.
    """
    sd = difference.sd
    error_evaluation = difference.error_evaluation
    tuning = difference.tuning_high if apart > 0 else difference.tuning_low
    distance = abs(apart) - tuning  # the |difference| to detect
    if sd is None or error_evaluation is None or distance <= 0:
        return None

    def detectable_with(num_pairs: int, document_factor: float) -> float:
        """Returns the detectable |difference| of a planned study."""
        variance_seeds = sd**2 / num_pairs
        variance = variance_seeds + error_evaluation**2 / document_factor
        df = math.inf
        if variance_seeds:
            df = (num_pairs - 1) * (variance / variance_seeds) ** 2  # Satterthwaite
        return detectable_difference(variance**0.5, min(df, _MANY), alpha)

    def fewest_pairs(document_factor: float) -> int:
        """Returns the fewest pairs that detect `distance`, or _NEVER if no number suffices."""

        def suffices(num_pairs: int) -> bool:
            return detectable_with(num_pairs, document_factor) <= distance

        # `suffices` is false below some number of pairs and true from there on.
        return bisect.bisect_left(range(_NEVER), True, lo=MIN_PAIRS, key=suffices)

    num_pairs = fewest_pairs(document_factor=1.0)
    if num_pairs < _NEVER:
        return num_pairs, 1.0

    # The |difference| that is detectable with infinitely many seeds and the present documents.
    detectable = error_evaluation * detectable_difference(1.0, _MANY, alpha)
    # With f times the documents, its square becomes detectable^2 / f. Let this be distance^2 / 2,
    # which leaves half of the allowed variance for the seeds.
    document_factor = max(1.0, 2 * (detectable / distance) ** 2)
    return fewest_pairs(document_factor), document_factor
