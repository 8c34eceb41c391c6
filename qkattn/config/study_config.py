"""The settings of a study."""

import dataclasses
from typing import Literal

from qkattn.config.run_config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """Coordinate-wise tuning of each arm before its verdict.

    The grids are trials.learning_rates, trials.weight_decays and score_scales. Those with several
    values are tuned one at a time, with the grids still to be tuned at their middle values: grids
    must ascend by one factor (2 is usual) and are extended by it until the best value is bracketed
    by a worse one on both sides.

    Attributes:
      seeds: of the screening trials; none of trials.seeds, which are for the verdict. Empty:
        nothing is tuned, every combination is run with trials.seeds, and there is no verdict.
      max_points: largest number of values per setting; an arm that needs more is reported as not
        bracketed.
      score_scales: grid of model.score_scale; empty does not tune it.
    """

    seeds: tuple[int, ...] = ()
    max_points: int = 9
    score_scales: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """An ablation at equal cost: variants x destinations x sizes, each arm tuned on its own.

    Attributes:
      name, question: for the report.
      base: the settings that all arms share; trials.seeds are those of the verdict,
        trials.learning_rates and trials.weight_decays the grids.
      baseline: the variant to which the others are matched and compared.
      variants: 'score/value', with model fields as in 'qk/vo?num_kv_heads=1'.
      sizes: model fields of the baseline at each size, as in 'd_model=128&num_layers=2'.
      match: the cost made equal: 'total' or 'non_embedding' parameters, 'flops' per token, 'cache'
        floats per token, or None for equal shapes.
      destinations: of the parameters that a variant saves, each an arm of its own:
        'd_model', 'd_ff', 'num_heads' (of the baseline's size), 'num_layers'.
      fill: the dimension that absorbs the rounding residual: 'd_ff' or None.
      tolerance: largest |residual| accepted, relative to the target.
      tuning: of each arm.
      margin: of equivalence: largest difference in loss that counts as none, in nats per token.
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
