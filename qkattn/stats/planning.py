"""How many seeds and documents a difference takes to be found."""

import bisect
import math

from qkattn.stats.inference import LEVEL, MIN_PAIRS, Difference, detectable_difference

MOST = 1_000_000  # pairs


def to_find(found: Difference, size: float, alpha: float = 1 - LEVEL) -> tuple[int, float] | None:
    """Pairs, and times as many documents, at which `detectable_difference` is at most `size`.

    n pairs have error_seeds = sd / sqrt(n), k times as many documents error_evaluation / sqrt(k);
    the errors of tuning stay. k is 1 where pairs suffice; otherwise each error gets half of the
    variance. The pairs that do not lie apart (`Difference.typical`) vary less, so they suffice too.

    Args:
      found: of the pairs there are.
      size: nats per token.
      alpha: the level of the test.

    Returns:
      None without a spread to plan with (one pair), and if tuning alone may hide `size`.
    """
    sd, evaluation = found.sd, found.error_evaluation
    rest = size - found.tuning_low - found.tuning_high
    if sd is None or evaluation is None or rest <= 0:
        return None

    def pairs(documents: float) -> int:
        def enough(n: int) -> bool:
            seeds, total = sd**2 / n, sd**2 / n + evaluation**2 / documents
            df = (n - 1) * (total / seeds) ** 2 if seeds else math.inf  # Satterthwaite
            return detectable_difference(total**0.5, min(df, MOST), alpha) <= rest

        return bisect.bisect_left(range(MOST), True, lo=MIN_PAIRS, key=enough)

    if (number := pairs(1.0)) < MOST:
        return number, 1.0
    documents = 2 * (evaluation * detectable_difference(1.0, MOST, alpha) / rest) ** 2
    return pairs(documents), documents
