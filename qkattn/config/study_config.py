"""The settings of a study."""

import dataclasses
from typing import Literal

from qkattn.config.run_config import Config
from qkattn.config.setting import setting

Choice = Literal['vertex', 'minimax']  # how a value is chosen from a sweep
Destination = Literal['d_model', 'd_ff', 'num_heads', 'num_layers']  # where saved parameters go


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """Tuning of each arm, one setting at a time.

    A setting is tuned if its grid has several values. The grids are trials.learning_rates,
    trials.weight_decays and the grids below. Their values must ascend by a constant factor, such as
    2. A grid is extended by this factor until its best value lies between worse values. Settings
    that are not yet tuned have the middle value of their grid.
    """

    seeds: tuple[int, ...] = setting(
        (), 'Screening seeds, none of trials.seeds; empty is no tuning and no verdict.', least=0
    )
    max_points: int = setting(
        9, 'Most values per setting; an arm that needs more is not bracketed.', least=1, most=1000
    )
    max_seeds: int = setting(
        6,
        'Most screening seeds, drawn while the best value is not significant.',
        least=1,
        most=1000,
    )
    max_excess: float | None = setting(
        None,
        'Seeds are also drawn while a loss may lie this far above its optimum; nats/token.',
        above=0,
    )
    choice: Choice = setting(
        'vertex', "Of a sweep: 'vertex' of the parabola, or 'minimax', with the best bounded loss."
    )
    score_scales: tuple[float, ...] = setting((), 'Grid of model.score_scale, if any.', above=0)
    init_embeddings: tuple[float, ...] = setting((), 'Grid of model.init_embedding.', above=0)
    init_qks: tuple[float, ...] = setting((), 'Grid of model.init_qk.', above=0)
    init_vos: tuple[float, ...] = setting((), 'Grid of model.init_vo.', above=0)
    init_mlps: tuple[float, ...] = setting((), 'Grid of model.init_mlp.', above=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlsConfig:
    """Arms that isolate the cause of a difference; only in a study with tuning."""

    equal_shape: bool = setting(True, "Variants also train at the baseline's shape.")
    longer: int | None = setting(
        4, 'The baseline and decided arms also train this many times as long; None is off.', least=2
    )
    longer_seeds: tuple[int, ...] = setting(
        (), 'Seeds of the verdict of longer training; empty is trials.seeds.', least=0
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """An ablation at equal cost: variants x destinations x sizes x corpora.

    All arms share the settings of `base`. Verdicts use the seeds in `base.trials.seeds`.
    """

    name: str = setting('study', 'Name in the report.')
    question: str | None = setting(None, 'Question in the report.')
    repeats: str | None = setting(
        None, 'Study beside this one, by its directory, that other seeds repeat.', path=True
    )
    base: Config = Config()
    baseline: str = setting('qk/vo', 'The variant to which the others are matched and compared.')
    variants: tuple[str, ...] = setting(
        ('qk/vo',), "'score/value', with model fields as in 'qk/vo?num_kv_heads=1'.", filled=True
    )
    sizes: tuple[str, ...] = setting(
        ('d_model=128',), "The baseline's sizes, as in 'd_model=128&num_layers=2'.", filled=True
    )
    corpora: tuple[str, ...] = setting(
        (), 'Data sets, as in data.name, each with its arms; empty is base.data.name.', path=True
    )
    match: Literal['total', 'non_embedding', 'flops', 'cache'] | None = setting(
        'total',
        'Matched cost: total or non_embedding parameters, flops or cache per token; or None.',
    )
    destinations: tuple[Destination, ...] = setting(
        ('d_model',),
        'Where saved parameters go: d_model, d_ff, num_heads or num_layers.',
        filled=True,
    )
    fill: Literal['d_ff'] | None = setting('d_ff', 'Absorbs the rounding residual; None is off.')
    tolerance: float = setting(1e-3, 'Largest |residual|, relative to the target.', above=0)
    tuning: TuningConfig = TuningConfig()
    controls: ControlsConfig = ControlsConfig()
    margin: float = setting(
        0.005, 'Largest difference that counts as none, nats per token.', above=0
    )
    expected: tuple[str, ...] = setting(
        (), "Positive controls: known effects, as in 'qk/vo?num_heads=1 is worse'."
    )
