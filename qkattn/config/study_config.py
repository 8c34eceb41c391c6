"""The settings of a study."""

import dataclasses
from typing import Literal

from qkattn.config.run_config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """Coordinate-wise tuning of each arm before its verdict.

    The grids are trials.learning_rates, trials.weight_decays and those below. Those with several
    values are tuned one at a time, with the grids still to be tuned at their middle values: grids
    must ascend by one factor (2 is usual) and are extended by it until the best value is bracketed
    by a worse one on both sides.

    Attributes:
      seeds: of the screening trials; none of trials.seeds, which are for the verdict. Empty:
        nothing is tuned, every combination is run with trials.seeds, and there is no verdict.
      max_points: largest number of values per setting; an arm that needs more is reported as not
        bracketed.
      max_seeds: largest number of screening seeds; those after `seeds`, max(seeds) + 1, + 2, ...,
        are drawn while the best value of a setting is not significantly better than both sides.
      score_scales, init_embeddings, init_qks, init_vos, init_mlps: grids of the model's field of
        that name without the s; an empty one is not tuned.
    """

    seeds: tuple[int, ...] = ()
    max_points: int = 9
    max_seeds: int = 6
    score_scales: tuple[float, ...] = ()
    init_embeddings: tuple[float, ...] = ()
    init_qks: tuple[float, ...] = ()
    init_vos: tuple[float, ...] = ()
    init_mlps: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlsConfig:
    """Arms that say what a difference is due to; only in a study with tuning.

    Attributes:
      equal_shape: each variant that saves cost is also trained at the baseline's shape, which
        separates removing a matrix from spending what it saved.
      longer: the baseline and the arms that differ from it, or are equivalent, by the tests on the
        test split, are also trained `longer` times as many steps (warm-up and the intervals of
        evaluations and checkpoints grow alike), at a learning rate tuned there; None is off.
      longer_seeds: of their verdict; empty for trials.seeds.
    """

    equal_shape: bool = True
    longer: int | None = 4
    longer_seeds: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """An ablation at equal cost: variants x destinations x sizes x corpora, each arm tuned.

    Attributes:
      name, question: for the report.
      base: the settings that all arms share; trials.seeds are those of the verdict,
        trials.learning_rates and trials.weight_decays the grids.
      baseline: the variant to which the others are matched and compared.
      variants: 'score/value', with model fields as in 'qk/vo?num_kv_heads=1'.
      sizes: model fields of the baseline at each size, as in 'd_model=128&num_layers=2'.
      corpora: names of data sets, as in data.name, each with arms of its own; empty for
        base.data.name alone.
      match: the cost made equal: 'total' or 'non_embedding' parameters, 'flops' per token, 'cache'
        floats per token, or None for equal shapes.
      destinations: of the parameters that a variant saves, each an arm of its own:
        'd_model', 'd_ff', 'num_heads' (of the baseline's size), 'num_layers'.
      fill: the dimension that absorbs the rounding residual: 'd_ff' or None.
      tolerance: largest |residual| accepted, relative to the target.
      tuning: of each arm.
      controls: arms beside the variants.
      looks: numbers of verdict seeds at which the study may be looked at, ascending, the last one
        all of them: every arm is trained up to one look before any goes on. Empty: one look.
      margin: of equivalence: largest difference in loss that counts as none, in nats per token.
    """

    name: str = 'study'
    question: str | None = None
    base: Config = Config()
    baseline: str = 'qk/vo'
    variants: tuple[str, ...] = ('qk/vo',)
    sizes: tuple[str, ...] = ('d_model=128',)
    corpora: tuple[str, ...] = ()
    match: Literal['total', 'non_embedding', 'flops', 'cache'] | None = 'total'
    destinations: tuple[str, ...] = ('d_model',)
    fill: Literal['d_ff'] | None = 'd_ff'
    tolerance: float = 1e-3
    tuning: TuningConfig = TuningConfig()
    controls: ControlsConfig = ControlsConfig()
    looks: tuple[int, ...] = ()
    margin: float = 0.005
