"""A study: variants x sizes as cells of equal weight count, each trained as one stack of trials."""

import ast
import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Any

from qkattn import budget, runlog
from qkattn.attention import registry
from qkattn.attention.spec import SpecError
from qkattn.config import Config, ConfigError, ModelConfig, Study, fingerprint
from qkattn.train import train
from qkattn.validate import validate


@dataclasses.dataclass(frozen=True)
class Cell:
    """One point of the grid.

    Attributes:
      variant, size: as written in the study.
      config: the run, its widths solved for.
      match: how near its weights are to the baseline's.
    """

    variant: str
    size: str
    config: Config
    match: budget.Match

    @property
    def id(self) -> str:
        return fingerprint(self.config)

    @property
    def directory(self) -> str:
        """Relative to the study: readable, and one per configuration."""
        words = re.sub(r'[^\w.=]+', '-', f'{self.variant}-{self.size}').strip('-')
        return f'cells/{words}-{self.id}'


def parse_fields(text: str, where: str) -> dict[str, Any]:
    """'a=1&b=x' as model fields; ConfigError names an unknown field or a malformed part."""
    known = typing.get_type_hints(ModelConfig)
    fields = {}
    for part in filter(None, text.split('&')):
        name, equals, value = part.partition('=')
        if not equals or name not in known:
            raise ConfigError(
                f'{where}: {part!r} must be a model field as in d_model=128; '
                f'fields are {", ".join(known)}'
            )
        try:
            fields[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            fields[name] = value
    return fields


def parse_variant(text: str) -> dict[str, Any]:
    """'score/value?field=value' as model fields."""
    cell, _, fields = text.partition('?')
    try:
        score, value = registry.parse_cell(cell)
    except SpecError as error:
        raise ConfigError(f'variant {text!r}: {error}') from error
    return {'score': score, 'value': value, **parse_fields(fields, f'variant {text!r}')}


def expand(study: Study) -> list[Cell]:
    """The cells, sizes outermost, every config validated and matched; nothing compiles.

    Raises:
      ConfigError: a variant, a size or a setting that cannot work; MatchError among them.
    """
    for name in ('variants', 'sizes'):
        values = getattr(study, name)
        if not values or len(set(values)) != len(values):
            raise ConfigError(f'{name}={values} must hold at least one entry, none twice')
    if study.match not in ('total', 'non_embedding', None):
        raise ConfigError(f'match={study.match!r} must be total, non_embedding or None')
    if study.fill not in ('d_ff', None):
        raise ConfigError(f'fill={study.fill!r} must be d_ff or None')
    if study.tolerance <= 0:
        raise ConfigError(f'tolerance={study.tolerance} must be above 0')
    cells = []
    for size in study.sizes:
        at_size = parse_fields(size, f'size {size!r}')

        def model(variant: str, at_size: dict = at_size) -> ModelConfig:
            return dataclasses.replace(study.base.model, **at_size, **parse_variant(variant))

        baseline = dataclasses.replace(study.base, model=model(study.baseline))
        validate(baseline)
        target = budget.count(baseline.model)
        for variant in study.variants:
            found = _matched(study, model(variant), target)
            config = dataclasses.replace(study.base, model=found.config)
            validate(config)
            cells.append(Cell(variant, size, config, found))
    return cells


def _matched(study: Study, model: ModelConfig, target: dict[str, int]) -> budget.Match:
    which = study.match or 'total'
    wanted = budget.matched_weights(target, which)
    if study.match is None:
        weights = budget.count(model)
        return budget.Match(model, weights, wanted, weights['total'] / wanted - 1)
    return budget.match(model, wanted, which=which, fill=study.fill, tolerance=study.tolerance)


def table(cells: list[Cell]) -> str:
    """Weights, residual, FLOPs and cache of all cells."""
    one_size = len({cell.size for cell in cells}) == 1
    return budget.table(
        {cell.variant if one_size else f'{cell.variant} {cell.size}': cell.match for cell in cells}
    )


def run(study: Study, workdir: str | Path, *, command: list[str] | None = None) -> Path:
    """Trains every cell that is not finished and returns the study's directory.

    Each finished cell is in results.jsonl before the next begins; the same call goes on where an
    earlier one stopped.
    """
    cells = expand(study)
    path = runlog.make_directory(workdir)
    runlog.write_json(path / 'study.json', describe(study, cells, command))
    for number, cell in enumerate(cells):
        if not (path / cell.directory / 'result.json').exists():
            train(
                cell.config,
                path / cell.directory,
                command=command,
                description=f'{cell.variant} {cell.size}',
                cells_left=len(cells) - number - 1,
            )
        _write_results(study, cells, path)
    return path


def describe(study: Study, cells: list[Cell], command: list[str] | None) -> dict[str, Any]:
    """What study.json says: the declared grid, whether trained or not."""
    return {
        'name': study.name,
        'question': study.question,
        'baseline': study.baseline,
        'variants': study.variants,
        'sizes': study.sizes,
        'matched': study.match,
        'cells': [
            {'cell': c.id, 'variant': c.variant, 'size': c.size, 'directory': c.directory}
            for c in cells
        ],
        'command': ' '.join(command) if command else None,
    }


def _write_results(study: Study, cells: list[Cell], path: Path) -> None:
    lines = []
    for cell in cells:
        result = path / cell.directory / 'result.json'
        if not result.exists():
            continue
        about = {
            'study': study.name,
            'cell': cell.id,
            'variant': cell.variant,
            'size': cell.size,
            'target_weights': cell.match.target,
            'residual': cell.match.residual if study.match else None,
        }
        lines += [json.dumps({**about, **trial}) + '\n' for trial in runlog.read_json(result)]
    runlog.write_text(path / 'results.jsonl', ''.join(lines))
