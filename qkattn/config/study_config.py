"""The settings of a study, typed and frozen; `qkattn.config` exports them."""

import dataclasses
from typing import Literal

from qkattn.config.run_config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """How each arm of a study finds settings of its own before its verdict.

    The grids are trials.learning_rates, trials.weight_decays and score_scales. Those with several
    values are tuned, one after another, each at the middle of the grids still to come: they must
    ascend by one factor (2 is usual) and are extended by it until the best value has a worse one on
    both sides.

    Attributes:
      seeds: of the screening trials; none of trials.seeds, which are kept for the verdict. Empty:
        nothing is tuned, every combination is run with trials.seeds, and there is no verdict.
      max_points: most values tried of each setting; an arm that needs more is reported as not
        bracketed.
      score_scales: grid of model.score_scale; empty leaves it as it is.
    """

    seeds: tuple[int, ...] = ()
    max_points: int = 9
    score_scales: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """An ablation at equal cost: arms x sizes, each arm at settings of its own.

    Attributes:
      name, question: for the report.
      base: what all arms share; trials.seeds are those of the verdict, trials.learning_rates and
        trials.weight_decays the grids.
      baseline: the variant that the others are matched to and compared with.
      variants: 'score/value', with model fields as in 'qk/vo?num_kv_heads=1'.
      sizes: model fields of the baseline at each size, as in 'd_model=128&num_layers=2'.
      match: what is made equal: 'total' or 'non_embedding' weights, 'flops' per token, 'cache'
        bytes per token, or None for equal shapes.
      destinations: where the weights go that a variant saves, each of them an arm of its own:
        'd_model', 'd_ff', 'num_heads' (of the baseline's size), 'num_layers'.
      fill: the second knob that takes up what the first leaves: 'd_ff' or None.
      tolerance: largest |residual| accepted, relative to the target.
      tuning: how settings are found.
      margin: differences of the loss below it, in nats per token, count as none (equivalence).
    """

    name: str = 'study'
    question: str | None = None
    base: Config = Config()
    baseline: str = 'qk/vo'
    variants: tuple[str, ...] = ('qk/vo',)
    sizes: tuple[str, ...] = ('d_model=128',)
    match: Literal['total', 'non_embedding', 'flops', 'cache'] | None = 'total'
    destinations: tuple[str, ...] = ('d_model',)
    fill: Literal['d_ff'] | None = 'd_ff'
    tolerance: float = 1e-3
    tuning: TuningConfig = TuningConfig()
    margin: float = 0.005
