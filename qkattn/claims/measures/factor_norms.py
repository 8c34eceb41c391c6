"""Norms of factors and the rank of their products, from the checkpoints of a study."""

from pathlib import Path

import jax

from qkattn.analysis import means
from qkattn.claims.decided import Kind, Row, Speaks
from qkattn.convert import loading
from qkattn.model.transformer import Transformer
from qkattn.stats.inference import estimate
from qkattn.storage.records import read_json, write_json
from qkattn.study.tuning import SCREENING

FILE = 'measures/factors.json'
QUANTITIES = {
    'qk_factor_norm': "norm of the score's parameters",
    'qk_norm': 'norm of A[n]',
    'qk_effective_rank': 'effective rank of A[n]',
    'ov_factor_norm': "norm of the value's parameters",
    'ov_norm': 'norm of B[n]',
    'ov_effective_rank': 'effective rank of B[n]',
}


def record(directory: Path, scale: str) -> None:
    """Writes measures/factors.json: of every run but those of a screening, `measured` by trial."""
    found = []
    for run in sorted((directory / 'runs').iterdir()):
        if f'-{SCREENING}-' in run.name or not (run / 'result.json').exists():
            continue
        source = loading.load(run)
        alive = [model for model, well in zip(source.models, source.alive, strict=True) if well]
        model = source.model.config
        found.append(
            {
                'run': run.name,
                'variant': str(model.variant),
                'size': f'd_model={model.d_model}',
                'trials': [measured(model) for model in alive],
            }
        )
    (directory / FILE).parent.mkdir(parents=True, exist_ok=True)
    write_json(directory / FILE, {'scale': scale, 'runs': found})


def read(directory: Path) -> list[Row]:
    """A row for each arm and quantity: the mean over seeds with its interval; decides nothing.

    RunDirectoryError if the file is damaged.
    """
    path = directory / FILE
    if not path.exists():
        return []
    rows = []
    for run in read_json(path, {'runs': [{'variant': str, 'size': str, 'trials': list}]})['runs']:
        for name, what in QUANTITIES.items():
            values = [trial[name] for trial in run['trials'] if trial[name] is not None]
            if not values:
                continue
            of_seeds = estimate(values)
            rows.append(
                Row(
                    what=what,
                    kind=Kind.MEASURED,
                    context={'size': run['size']},
                    value=of_seeds.mean,
                    speaks=Speaks.BESIDE,
                    low=of_seeds.low,
                    high=of_seeds.high,
                    arm=run['variant'],
                    study=directory.name,
                )
            )
    return rows


def measured(model: Transformer) -> dict[str, float]:
    """QUANTITIES of one model, mean over layers and heads; NaN without one matrix a head."""
    found = jax.jit(means)(model)
    return {name: float(found[name]) for name in QUANTITIES}
