"""Simulated studies: rates of false decisions, coverage of intervals, power.

Every study goes through the planner's tuning and the decisions of a report. Loss is a curve in
ln(learning rate), a parabola or skewed, with noise, in nats per token; the arms' true losses at
their optima are known, so it is known which decisions are false. The draws are fixed.
"""

import copy
import dataclasses
import functools
import math

import numpy as np
import pytest

from qkattn.config import TuningConfig
from qkattn.stats import decision, inference
from qkattn.stats.decision import ABOVE_ZERO, BELOW_ZERO, Decision
from qkattn.study.tuning import KNOBS, tune

NOISE = 0.0097  # of one trial
LEVEL_NOISE = 0.01  # that all arms and values share, by seed
FLAT, SHARP = 0.01, 0.2  # second derivative of the loss by ln(learning rate)
GRIDS = dict.fromkeys(KNOBS, (1.0,)) | {'learning_rate': (0.002, 0.004, 0.008, 0.016)}
CHOICES = ('vertex', 'minimax')  # of TuningConfig.choice
ARMS = 7
MARGIN = inference.MARGIN
ALLOWED = 0.055  # rate of false decisions: 5 % and the noise of a simulation
MANY = 80  # seeds, which show a small bias
BAD = 0.2  # by which a bad trial is worse


@dataclasses.dataclass(frozen=True)
class Shape:
    """The loss of an arm: curvature / 2 x^2 (1 + cubic x) at x = ln(value / optimum).

    It follows its tangent beyond the inflection. ln(optimum) differs between seeds with standard
    deviation `spread`, and a share of `bad` trials ends BAD nats worse.
    """

    curvature: float = SHARP
    cubic: float = 0.0
    spread: float = 0.0
    bad: float = 0.0

    def excess(self, x):
        """Over the optimum, in nats."""
        turn = -1 / (3 * self.cubic) if self.cubic else math.inf
        near = np.where(x / turn > 1, turn, x)  # the slope at the inflection is curvature / 2 turn
        return self.curvature / 2 * (near**2 * (1 + self.cubic * near) + near * (x - near))


# The shapes of the baseline and of the arms.
CASES = {
    'all flat': (Shape(FLAT), Shape(FLAT)),
    'flat arms, sharp baseline': (Shape(), Shape(FLAT)),
    'sharp arms, flat baseline': (Shape(FLAT), Shape()),
    'all sharp': (Shape(), Shape()),
    'all nearly constant': (Shape(0.001), Shape(0.001)),
    'cubic part of 0.25': (Shape(cubic=0.25), Shape(cubic=0.25)),
    'cubic part of 0.46': (Shape(cubic=0.46), Shape(cubic=0.46)),
    'cubic arms': (Shape(), Shape(cubic=0.46)),
    'cubic baseline': (Shape(cubic=0.46), Shape()),
    'optima by seed': (Shape(spread=0.15), Shape(spread=0.15)),
    'bad trials of the baseline': (Shape(bad=0.1), Shape()),
    'bad trials of the arms': (Shape(), Shape(bad=0.1)),
    'bad trials': (Shape(bad=0.1), Shape(bad=0.1)),
}


@dataclasses.dataclass
class Arm:
    """A simulated arm: loss(v) = level + excess(ln(v / optimum)) + noise."""

    rng: np.random.Generator
    shape: Shape
    level: float = 0.0

    def __post_init__(self):
        self.optimum = float(np.exp(self.rng.uniform(math.log(0.002), math.log(0.016))))

    @property
    def mean(self):
        """The mean loss at the optimum, bad trials included."""
        return self.level + self.shape.bad * BAD

    def aparts(self, number):
        """How far the optima of seeds lie apart."""
        return self.rng.normal(0, self.shape.spread, number)

    def loss(self, value, seeds, apart):
        """The losses of one trial for each of the seeds' own levels and optima."""
        excess = self.shape.excess(math.log(value / self.optimum) - apart)
        excess -= self.shape.curvature / 2 * self.shape.spread**2  # the mean at the best value
        bad = BAD * (self.rng.random(len(seeds)) < self.shape.bad)
        return self.level + excess + bad + seeds + self.rng.normal(0, NOISE, len(seeds))

    def tuned(self, seeds, choice):
        """The sweep of its learning rate, as the planner asks for it; `seeds` are their levels."""
        limits, measured = TuningConfig(seeds=(100, 101), choice=choice), {}
        apart = dict(zip(seeds, self.aparts(len(seeds)).tolist(), strict=True))
        while (plan := tune(GRIDS, limits, measured)).knob is not None:
            drawn = [np.array([values[s] for s in plan.seeds]) for values in (seeds, apart)]
            for at in map(plan.at, plan.values):
                losses = self.loss(at[0], *drawn)
                measured.setdefault(at, {}).update(zip(plan.seeds, losses.tolist(), strict=True))
        return plan.sweeps['learning_rate']


@functools.lru_cache(1)
def tuned(case, studies, choice):
    """The arms of studies, the baseline first, with their sweeps."""
    rng = np.random.default_rng(list(CASES).index(case))
    made = []
    for _ in range(studies):
        levels = dict(zip(range(100, 200), rng.normal(0, LEVEL_NOISE, 100), strict=True))
        baseline, others = CASES[case]
        arms = [Arm(rng, shape) for shape in (baseline, *[others] * ARMS)]
        made.append([(arm, arm.tuned(levels, choice)) for arm in arms])
    return made


@dataclasses.dataclass
class Counts:
    """Over studies: those decided falsely; over their arms: tested, covered, effects found."""

    false: int = 0
    tested: int = 0
    covered: int = 0
    found: int = 0
    sought: int = 0
    detectable: list[float] = dataclasses.field(default_factory=list)

    @property
    def coverage(self):
        return self.covered / self.tested


def is_false(decided, true):
    """Whether a decision contradicts the true difference."""
    if decided in BELOW_ZERO + ABOVE_ZERO:
        side = 1 if decided in ABOVE_ZERO else -1
        beyond = decided in (Decision.BETTER, Decision.WORSE)
        return side * true <= 0 or (beyond and abs(true) < MARGIN * (1 - 1e-9))
    return decided is Decision.EQUIVALENT and abs(true) >= MARGIN


def simulate(case, num_seeds, studies, effect=0.0, choice='vertex'):
    """Counts over `studies`.

    The first arm differs by `effect`, up and down in turns, which is found if it is decided in the
    right direction. A decision is false if it contradicts the difference of the means, or that
    without bad trials.
    """
    rng = np.random.default_rng([list(CASES).index(case), num_seeds, int(effect != 0)])
    counts = Counts()
    for number, pairs in enumerate(tuned(case, studies, choice)):
        levels_S, shift = rng.normal(0, LEVEL_NOISE, num_seeds), effect * (-1) ** number
        arms, sweeps = [copy.copy(arm) for arm, _ in pairs], [sweep for _, sweep in pairs]
        for arm in arms:
            arm.rng = rng
        arms[1].level = shift
        losses = [
            arm.loss(sweep.chosen, levels_S, arm.aparts(num_seeds))
            for arm, sweep in zip(arms, sweeps, strict=True)
        ]
        misses = [
            s.at_worst if s.bracketed and s.at_worst is not None else math.inf for s in sweeps
        ]
        differences = {
            i: inference.paired(losses[i] - losses[0], tuning=(misses[i], misses[0]))
            for i in range(1, len(arms))
            if max(misses[i], misses[0]) < math.inf
        }
        judged = decision.judge(differences, planned=ARMS)
        means = {i: arms[i].mean - arms[0].mean for i in differences}
        counts.false += any(
            is_false(one.decision, true)
            for i, one in judged.items()
            for true in {arms[i].level, means[i]}
        )
        counts.tested += len(differences)
        counts.covered += sum(d.low <= means[i] <= d.high for i, d in differences.items())
        counts.detectable += [one.detectable for one in judged.values()]
        if effect and 1 in judged:
            counts.sought += 1
            counts.found += judged[1].decision in (BELOW_ZERO if shift < 0 else ABOVE_ZERO)
    return counts


@pytest.mark.parametrize('choice', CHOICES)
@pytest.mark.parametrize(
    'case',
    ['flat arms, sharp baseline', 'cubic arms', 'cubic baseline', 'bad trials of the arms'],
)
def test_neither_tuning_nor_skewed_sweeps_nor_bad_trials_decide(case, choice):
    """At 5.5 % or less, more than 4 of 24 have a probability below 1 %.

    Without the error of tuning, more than half of the studies with cubic sweeps decide falsely.
    """
    counts = simulate(case, MANY, 24, choice=choice)
    assert counts.false <= 4 and counts.tested >= 0.97 * 24 * ARMS
    assert case.startswith('bad') or counts.coverage >= 0.94


@pytest.mark.slow
@pytest.mark.parametrize('num_seeds', [8, 16, MANY])
@pytest.mark.parametrize('choice', CHOICES)
@pytest.mark.parametrize('case', CASES)
def test_studies_are_decided_falsely_at_most_once_in_twenty(case, choice, num_seeds):
    counts = simulate(case, num_seeds, 400, choice=choice)
    assert counts.false <= ALLOWED * 400
    if case == 'all nearly constant':
        assert counts.tested < 0.05 * 400 * ARMS
        return
    if not case.startswith('bad'):  # few seeds do not show how rare bad trials shift a mean
        assert counts.coverage >= 0.94
    assert counts.tested >= 0.97 * 400 * ARMS
    effect = float(np.median(counts.detectable))
    shifted = simulate(case, num_seeds, 400, effect, choice)
    least = 0.65 if case.startswith('bad') else 0.78
    assert shifted.found >= least * shifted.sought


@pytest.mark.parametrize(
    ('true', 'sd'),
    [((1.0,) * 6, 0.003), ((0.0, 0.0, 0.999, 0.999, 1.0, 4.0), 0.006)],
)
def test_studies_rarely_decide_wrongly(true, sd):
    """Whatever the true differences, given here in margins, of arms that share their baseline."""
    rng, count, num_seeds, true = np.random.default_rng(0), 1000, 8, MARGIN * np.array(true)
    arms = rng.normal(0.0, sd / 2**0.5, (count, len(true), num_seeds)) + true[:, None]
    arms -= rng.normal(0.0, sd / 2**0.5, (count, 1, num_seeds))

    def wrong(studies):
        judged = [
            decision.judge(dict(enumerate(map(inference.paired, s)))).items() for s in studies
        ]
        return np.mean([any(is_false(j.decision, true[i]) for i, j in arms) for arms in judged])

    errors = 4 * (0.05 * 0.95 / count) ** 0.5
    assert 0.02 <= wrong(arms) <= 0.05 + errors
    assert abs(wrong(arms[:, :1]) - 0.05) <= errors
