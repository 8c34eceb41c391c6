"""Intervals and tests over seeds: means and differences from a baseline.

A difference is an arm's loss minus the baseline's, in nats per token: below zero is better. Seeds
pair the two where both arms saw the same data order and the same initial draws.
"""

import bisect
import dataclasses
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy  # whose submodules are imported on first use

LEVEL = 0.95  # of every interval; 1 - LEVEL is the family-wise error rate of every verdict
POWER = 0.8  # the probability with which a detectable difference is found
MARGIN = 0.005  # nats per token; arms closer than this are called equivalent
MIN_PAIRS = 3  # fewer seeds decide nothing
MIN_TO_LEAVE_OUT = 4  # the spread of fewer values is not known without the one that lies apart
APART = 5.0  # standard deviations, estimated from the median absolute deviation
MIN_DOCUMENTS = 100  # of text in an evaluation; fewer do not stand for the text they are from
RESAMPLES = 9999

_MANY = 1e6  # degrees of freedom: a t variable is normal
_MOST_PAIRS = 1_000_000
ROUNDING = 1e-12  # a spread below this fraction of the mean is that of rounding, and taken as 0
P_VALUES = ('p', 'p_margin', 'p_equivalence', 'p_not_better', 'p_not_worse')


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
    sd = math.sqrt(_variance(values))
    if sd == 0:
        return Estimate(mean, n, sd, mean, mean)
    low, high = scipy.stats.ttest_1samp(values, 0).confidence_interval(LEVEL)
    return Estimate(mean, n, sd, float(low), float(high))


@dataclasses.dataclass(frozen=True)
class Difference:
    """Mean of arm minus baseline, nats per token, with intervals and tests over n seeds.

    `n` counts pairs, or the trials of the smaller group where trials are not paired. `sd` is that
    of one difference: over pairs, or sqrt(sd_arm^2 + sd_baseline^2).

    The standard error se of the mean has a part from the seeds and one from the documents of the
    evaluation set, se^2 = error_seeds^2 + error_evaluation^2, with the degrees of freedom `df` of
    Satterthwaite (1946), se^4 / sum_i (error_i^4 / df_i). Noise that is specific to a seed and a
    document enters both, so se is rather too large.

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
    `detectable`: the |difference| found by `p` < 0.05 in its direction with probability 0.8 or
    more if these errors were the true ones; for one test, before correction for several arms.

    `bootstrap_low`, `bootstrap_high`: the 95 % bootstrap interval over seeds alone, a check of the
    normality that the t interval assumes; None with n < 3 or if turned off. It is too narrow at few
    seeds: with 8 normal values it covers the truth in 89 %, with 30 in 93 % of cases.

    A few seeds that lie apart, such as trials that nearly diverged, may shift a mean, or hide by
    the variance that they add what the others show. `typical` is the same difference without the
    seeds that lie apart; None if none does. A finding holds with and without them: each p value is
    the larger one of both, and 1 for a side that they do not share; `low` and `high` are the outer
    ends of both intervals and `detectable` is the larger one. `mean`, `sd`, `df` and the errors are
    those of all seeds. Among values without outliers `typical` costs no power: less than 0.01 from
    4 normal values on.

    With a single seed, or an error of evaluation that is not known, there are no errors, intervals
    and tests. If se is 0, or sd as small as the rounding of the values, the mean is taken as exact:
    p values are 0 or 1.
    """

    mean: float
    n: int
    sd: float | None
    low: float | None
    high: float | None
    bootstrap_low: float | None
    bootstrap_high: float | None
    p: float | None
    p_margin: float | None
    p_equivalence: float | None
    p_not_better: float | None
    p_not_worse: float | None
    detectable: float | None
    error_seeds: float | None
    error_evaluation: float | None
    tuning_low: float
    tuning_high: float
    paired: bool
    margin: float
    df: float | None
    typical: 'Difference | None' = None


def paired(
    differences: Sequence[float],
    margin: float = MARGIN,
    *,
    evaluation_error: float | None = 0.0,
    evaluation_df: float | None = None,
    tuning: tuple[float, float] = (0.0, 0.0),
    resamples: int | None = RESAMPLES,
) -> Difference:
    """The mean of `differences`, arm minus baseline of the same seed (nats per token).

    `margin` and `tuning`, the largest losses by which arm and baseline may miss their optimum, are
    in nats per token. `evaluation_error` and `evaluation_df` are what the function
    `evaluation_error` gives; a df of None means that the error is known exactly, an error of None
    that it is not known. With `resamples=None` there is no bootstrap. Raises ValueError for no
    differences, one that is not finite, a margin that is not positive, or a negative error.
    """
    groups = _checked(margin, evaluation_error, tuning, differences=differences)

    def of(groups: Sequence[Sequence[float]], resamples: int | None) -> Difference:
        (values,) = groups
        n = len(values)
        sd = math.sqrt(_variance(values)) if n > 1 else math.nan
        errors = [(sd / n**0.5, n - 1), (evaluation_error, evaluation_df)]
        mean = statistics.fmean(values)
        return _difference(groups, mean, n, sd, errors, tuning, margin, resamples)

    return _with_typical(of, groups, resamples)


def welch(
    arm: Sequence[float],
    baseline: Sequence[float],
    margin: float = MARGIN,
    *,
    evaluation_error: float | None = 0.0,
    evaluation_df: float | None = None,
    tuning: tuple[float, float] = (0.0, 0.0),
    resamples: int | None = RESAMPLES,
) -> Difference:
    """Mean of `arm` minus mean of `baseline` (nats per token), trials not paired.

    Variances may differ (Welch 1947): error_seeds^2 = s_a^2 / n_a + s_b^2 / n_b, with the degrees
    of freedom of Welch and Satterthwaite. Other arguments and errors as in `paired`.
    """
    groups = _checked(margin, evaluation_error, tuning, arm=arm, baseline=baseline)

    def of(groups: Sequence[Sequence[float]], resamples: int | None) -> Difference:
        mean = statistics.fmean(groups[0]) - statistics.fmean(groups[1])
        n = min(len(values) for values in groups)
        variances = [_variance(values) if n > 1 else math.nan for values in groups]
        own = [
            ((v / len(values)) ** 0.5, len(values) - 1)
            for v, values in zip(variances, groups, strict=True)
        ]
        errors = [_combined(own), (evaluation_error, evaluation_df)]
        sd = sum(variances) ** 0.5
        return _difference(groups, mean, n, sd, errors, tuning, margin, resamples)

    return _with_typical(of, groups, resamples)


def evaluation_error(nats_SC: np.ndarray, tokens_C: np.ndarray) -> tuple[float, float]:
    """Standard error of a difference due to the choice of documents, and its degrees of freedom.

    `nats_SC` is arm minus baseline by seed and document (cluster), nats summed over its tokens.
    The difference is D = sum_C d_C / sum_C tokens_C with d_C the mean over seeds. With the share
    w_C = tokens_C / sum(tokens) of document C and its own difference D_C = d_C / tokens_C, the
    cluster-robust variance is sum_C w_C^2 (D_C - D)^2 / (1 - w_C) (Bell and McCaffrey 2002). Its
    degrees of freedom are those of documents that vary equally: (sum w^2)^2 / sum w^4 - 1.

    Raises ValueError for fewer than two documents, shapes that differ, a document without tokens or
    a difference that is not finite.
    """
    nats_SC, tokens_C = np.asarray(nats_SC, float), np.asarray(tokens_C, float)
    if nats_SC.ndim != 2 or tokens_C.shape != nats_SC.shape[1:] or len(tokens_C) < 2:
        raise ValueError(
            f'nats_SC and tokens_C have shapes {nats_SC.shape} and {tokens_C.shape}; they must be '
            '(seeds, documents) and (documents,) with at least two documents.'
        )
    if not (np.isfinite(nats_SC).all() and nats_SC.size and (tokens_C > 0).all()):
        raise ValueError('nats_SC must be finite, and every document must have tokens.')
    share_C = tokens_C / tokens_C.sum()
    own_C = nats_SC.mean(axis=0) / tokens_C
    apart_C = own_C - share_C @ own_C
    if _is_rounding(apart_C, share_C @ own_C):
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
    critical = scipy.special.stdtrit(df, 1 - alpha / 2)
    unbiased = error * (df / scipy.special.chdtri(df, 0.5)) ** 0.5
    return float(scipy.special.nctdtrinc(df, 1 - POWER, critical) * unbiased)


def bootstrap(*groups: Sequence[float], resamples: int = RESAMPLES) -> tuple[float, float]:
    """95 % bootstrap interval of a mean, or of the first group's mean minus the second's.

    Bias-corrected and accelerated (BCa, Efron 1987), with the same random draws at every call;
    the percentile interval where BCa is undefined (all values equal). Groups are resampled apart.
    """
    arrays = [np.asarray(group, float) for group in groups]
    centres = [float(np.mean(values)) for values in arrays]
    centre = centres[0] - sum(centres[1:])
    rounding = ROUNDING * max(np.max(np.abs(values)) for values in arrays)

    def statistic(*samples: np.ndarray, axis: int) -> np.ndarray:
        first, *others = [np.mean(sample, axis=axis) for sample in samples]
        mean = first - others[0] if others else first
        # Permutations of a group have its mean, in whatever order they are summed: BCa counts ties.
        return np.where(np.abs(mean) <= rounding, 0.0, mean)

    def interval(method: str) -> tuple[float, float]:
        result = scipy.stats.bootstrap(
            [values - own for values, own in zip(arrays, centres, strict=True)],
            statistic,
            n_resamples=resamples,
            confidence_level=LEVEL,
            method=method,
            vectorized=True,
            rng=np.random.default_rng(0),
        ).confidence_interval
        return centre + float(result.low), centre + float(result.high)

    with warnings.catch_warnings(), np.errstate(invalid='ignore', divide='ignore'):
        warnings.simplefilter('ignore', scipy.stats.DegenerateDataWarning)
        ends = interval('BCa')
    return ends if all(map(math.isfinite, ends)) else interval('percentile')


def _checked(
    margin: float, error: float | None, tuning: tuple[float, float], **groups: Sequence[float]
) -> tuple[tuple[float, ...], ...]:
    if not 0 < margin < math.inf:
        raise ValueError(f'margin is {margin}; equivalence needs a positive margin in nats.')
    if not (0 <= (error or 0.0) < math.inf and all(miss >= 0 for miss in tuning)):
        raise ValueError(f'evaluation_error, tuning are {error}, {tuning}; neither is negative.')
    for name, values in groups.items():
        if len(values) == 0 or not all(map(math.isfinite, values)):
            raise ValueError(f'{name} is {list(values)}; finite losses, at least one, are needed.')
    return tuple(tuple(map(float, values)) for values in groups.values())


def _variance(values: Sequence[float]) -> float:
    """The variance of one value, n - 1 in the denominator; 0 if the spread is only rounding."""
    mean = float(np.mean(values))
    if _is_rounding(np.subtract(values, mean), mean):
        return 0.0
    return float(np.var(values, ddof=1))


def _is_rounding(apart: np.ndarray, mean: float) -> bool:
    return bool(np.max(np.abs(apart)) <= ROUNDING * abs(mean))


def _combined(errors: Sequence[tuple[float, float | None]]) -> tuple[float, float]:
    """The error of a sum of independent errors with degrees of freedom; None means exact."""
    total = sum(error**2 for error, _ in errors)
    if not total > 0:
        return total, sum(df or 0 for _, df in errors)
    spread = sum(error**4 / df for error, df in errors if df)
    return total**0.5, min(total**2 / spread, _MANY) if spread else _MANY


def typical(values: Sequence[float]) -> tuple[float, ...]:
    """The values without those that lie apart: further than APART from the median.

    In standard deviations, 1.4826 times the median absolute deviation, which up to half of the
    values cannot raise. All values if there are fewer than MIN_TO_LEAVE_OUT or half of them agree.
    Of 8 normal values one or more lie apart in 5 % of all samples, of 16 in 2 %.
    """
    median = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - median) for value in values)
    if len(values) < MIN_TO_LEAVE_OUT or spread <= ROUNDING * abs(median):
        return tuple(values)
    return tuple(value for value in values if abs(value - median) <= APART * spread)


def _with_typical(
    of: Callable[[Sequence[Sequence[float]], int | None], Difference],
    groups: Sequence[Sequence[float]],
    resamples: int | None,
) -> Difference:
    """The difference `of` groups; if some of their values lie apart, with `Difference.typical`."""
    every, left = of(groups, resamples), [typical(values) for values in groups]
    if every.p is None or list(map(len, left)) == list(map(len, groups)):
        return every
    others = of(left, None)
    fields = {
        name: choose(getattr(every, name), getattr(others, name))
        for choose, names in ((min, ('low',)), (max, ('high', 'detectable', *P_VALUES)))
        for name in names
    }
    if every.mean * others.mean <= 0:
        fields |= {'p': 1.0, 'p_margin': 1.0}
    return dataclasses.replace(every, typical=others, **fields)


def _difference(
    groups: Sequence[Sequence[float]],
    mean: float,
    n: int,
    sd: float,
    errors: Sequence[tuple[float | None, float | None]],
    tuning: tuple[float, float],
    margin: float,
    resamples: int | None,
) -> Difference:
    """A mean with `errors` from seeds and evaluation, and their degrees of freedom."""
    fields: dict[str, Any] = dict.fromkeys(f.name for f in dataclasses.fields(Difference))
    fields |= {'mean': mean, 'n': n, 'paired': len(groups) == 1, 'margin': margin}
    fields |= {'tuning_low': tuning[0], 'tuning_high': tuning[1]}
    known = [(error, df) for error, df in errors if error is not None]
    if n < 2 or len(known) < len(errors):
        return Difference(**fields)
    error, df = _combined(known)

    def tail(excess: float) -> float:
        """Probability that the error of the mean exceeds `excess`."""
        return float(scipy.special.stdtr(df, -excess / error)) if error > 0 else float(excess <= 0)

    half = float(scipy.special.stdtrit(df, 0.5 + LEVEL / 2)) * error
    low, high = mean - tuning[0], mean + tuning[1]
    beyond = max(low, -high)  # what is left of |mean|; negative if tuning explains it all
    not_better, not_worse = tail(margin + low), tail(margin - high)
    fields |= {
        'sd': sd,
        'low': low - half,
        'high': high + half,
        'p': min(1.0, 2 * tail(beyond)),
        'p_margin': min(1.0, tail(beyond - margin) + tail(beyond)),
        'p_equivalence': max(not_better, not_worse),
        'p_not_better': not_better,
        'p_not_worse': not_worse,
        'detectable': detectable_difference(error, df) + sum(tuning),
        'error_seeds': errors[0][0],
        'error_evaluation': errors[1][0],
        'df': df,
    }
    if resamples is not None and n >= MIN_PAIRS:
        ends = bootstrap(*groups, resamples=resamples)
        fields |= {'bootstrap_low': ends[0], 'bootstrap_high': ends[1]}
    return Difference(**fields)


def to_find(
    difference: Difference, size: float, alpha: float = 1 - LEVEL
) -> tuple[int, float] | None:
    """Pairs, and times as many documents, at which `detectable_difference` is at most `size`.

    `difference` is of the pairs there are, `size` in nats per token, `alpha` the level of the test.
    n pairs have error_seeds = sd / sqrt(n), k times as many documents error_evaluation / sqrt(k);
    the errors of tuning stay. k is 1 where pairs suffice; otherwise each error gets half of the
    variance. The pairs that do not lie apart (`Difference.typical`) vary less, so they suffice too.
    None without a spread to plan with (one pair), and if tuning alone may hide `size`.
    """
    sd, evaluation = difference.sd, difference.error_evaluation
    rest = size - difference.tuning_low - difference.tuning_high
    if sd is None or evaluation is None or rest <= 0:
        return None

    def pairs(documents: float) -> int:
        def enough(n: int) -> bool:
            seeds, total = sd**2 / n, sd**2 / n + evaluation**2 / documents
            df = (n - 1) * (total / seeds) ** 2 if seeds else math.inf  # Satterthwaite
            return detectable_difference(total**0.5, min(df, _MOST_PAIRS), alpha) <= rest

        return bisect.bisect_left(range(_MOST_PAIRS), True, lo=MIN_PAIRS, key=enough)

    if (number := pairs(1.0)) < _MOST_PAIRS:
        return number, 1.0
    documents = 2 * (evaluation * detectable_difference(1.0, _MOST_PAIRS, alpha) / rest) ** 2
    return pairs(documents), documents
