"""What a scale costs before it starts: runs, tokens, FLOPs, and time from a measured warm-up."""

import dataclasses
from collections.abc import Iterable, Iterator

import jax

from qkattn.claims.claim import Claim
from qkattn.claims.studies import names_of, study_of
from qkattn.config import Study
from qkattn.study import estimate, plan
from qkattn.study.arms import build_arms
from qkattn.study.estimate import Cost, Speed

_HEAD = f'{"study":<20}{"claims":<14}{"runs":>6}{"trials":>8}{"tokens":>10}{"FLOPs":>10}  time'


def lines(
    claims: Iterable[Claim], scale: str, flops_per_second: float | None = None
) -> Iterator[str]:
    """The plan of the studies of claims, a line each and one of their sum, as it is made.

    Time is that of this machine's device, or of one GPU: FLOPs over the speed of a warm-up at the
    smallest size of each study, and the compilation of each run. Arms that are trained longer are
    counted as if all were.

    Args:
      flops_per_second: instead of a warm-up. At scale gpu, a CPU cannot warm up for a GPU: without
        this number there is no time.
    """
    claims = list(claims)
    yield _HEAD
    total = Cost(0, 0, 0, 0.0, 0.0)
    timed = flops_per_second is not None or scale != 'gpu' or jax.default_backend() != 'cpu'
    for name in names_of(claims):
        if (study := study_of(name, scale)) is None:
            continue
        cost = _cost(study, flops_per_second, timed)
        serves = ','.join(claim.name for claim in claims if name in claim.studies)
        yield _line(name, serves, cost, timed)
        pairs = zip(dataclasses.astuple(total), dataclasses.astuple(cost), strict=True)
        total = Cost(*(a + b for a, b in pairs))
    yield _line('total', '', total, timed)
    device = jax.devices()[0].device_kind
    if flops_per_second is not None:
        yield f'hours of one device that trains at {flops_per_second:.3g} FLOP/s'
    elif timed:
        yield f'hours of one process on {device}, from a warm-up of each study'
    else:
        yield (
            f'time takes a warm-up on a GPU, and this device is {device}: give the command there, '
            'or --flops_per_second'
        )


def _cost(study: Study, flops_per_second: float | None, timed: bool) -> Cost:
    arms = build_arms(study)
    runs = [*plan.least(study, arms), *plan.lengthened(study, arms)]
    if flops_per_second is not None or not timed:
        speed = Speed(flops_per_second or float('inf'), 0.0)
    else:
        speed = estimate.measure(min(runs, key=lambda run: run.arm.match.target))
    return estimate.cost(runs, dict.fromkeys(study.sizes, speed))


def _line(name: str, serves: str, cost: Cost, timed: bool) -> str:
    hours = cost.seconds / 3600
    took = f'{hours:,.1f} h' if hours >= 1 else f'{cost.seconds / 60:,.1f} min'
    return (
        f'{name:<20}{serves:<14}{cost.runs:>6,}{cost.trials:>8,}{cost.tokens:>10.3g}'
        f'{cost.flops:>10.3g}  {took if timed else "not measured"}'
    )
