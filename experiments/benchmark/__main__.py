"""Times training and decoding beside other implementations, on this machine.

python -m experiments.benchmark --suite=steps
python -m experiments.benchmark --suite=cpu --out=runs/benchmark    # all of docs/performance.md
"""

import concurrent.futures
import dataclasses
import difflib
import importlib.metadata
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from absl import flags

from qkattn.benchmark import session, targets
from qkattn.benchmark.session import SCALES, Options, Session
from qkattn.benchmark.shape import RECIPE
from qkattn.benchmark.suites.steps import NEEDS, PEERS
from qkattn.benchmark.suites.suite_registry import COLLECTIONS, COMMANDS, SUITES
from qkattn.benchmark.summary import text
from qkattn.config import Config, from_json
from qkattn.config.calls import split_variant
from qkattn.config.extras import missing_extra
from qkattn.errors import ConfigError
from qkattn.model.sites import validate
from qkattn.run import cli, cores, signals

SUITE = flags.DEFINE_list(
    'suite',
    None,
    f'What is measured: {", ".join(SUITES)}; or several at a scale: {", ".join(COLLECTIONS)}.',
)
OUT = flags.DEFINE_string(
    'out',
    None,
    'Directory of results, runs/benchmark/SUITE by default; what the same code on the same machine '
    'has measured there is not measured again.',
)
SCALE = flags.DEFINE_string('scale', None, f'Sizes: {", ".join(SCALES)}; of suites, cpu.')
PEER = flags.DEFINE_list(
    'peers',
    None,
    f'Other implementations: {", ".join(PEERS)}; by default those that are installed.',
)
CORES = flags.DEFINE_list('cores', None, 'Numbers of cores; by default one and all.')
WIDTHS = flags.DEFINE_list('widths', None, 'Widths at which variants are compared.')
CONTEXTS = flags.DEFINE_list('contexts', None, 'Context lengths that are compared.')
DTYPES = flags.DEFINE_list('dtypes', None, 'dtypes that are compared: float32, bfloat16.')
GRID = flags.DEFINE_bool(
    'grid', False, 'Variants at every width, context and dtype, not at the first context and dtype.'
)
VARIANTS = flags.DEFINE_list('variants', None, "Variants that are compared, as in 'qk/vo,qk/no_v'.")
ROUNDS = flags.DEFINE_integer('rounds', None, 'Timed rounds of each group.', lower_bound=1)
AGAIN = flags.DEFINE_bool('again', False, 'Measures again what the directory has.')

log = logging.getLogger('qkattn.benchmark')


@signals.leaving_at_once()
def main() -> None:
    if not SUITE.value:
        raise ConfigError('--suite=NAME is required, e.g. --suite=smoke')
    jax.config.update('jax_platforms', 'cpu')  # the accelerator's memory is for the contestants
    names, scale = chosen_suites(SUITE.value)
    if scale == 'smoke':
        os.environ['XLA_FLAGS'] = ' '.join([os.environ.get('XLA_FLAGS', ''), *quick_to_compile()])
    options = Options(
        scale=dataclasses.replace(SCALES[scale], **asked()),
        cores=tuple(_whole('cores', CORES.value or (), len(cores.usable()))),
        peers=chosen_peers(),
        again=AGAIN.value,
    )
    directory = Path(OUT.value or f'runs/benchmark/{"-".join(SUITE.value)}')
    measured = Session(directory, options)

    def measure(suites: Iterable[str]) -> None:
        for name in suites:
            SUITES[name](measured.of(name))

    try:
        if scale == 'smoke':  # whose times mean nothing
            races, commands = (
                [name for name in names if (name in COMMANDS) == command] for command in (0, 1)
            )
            with concurrent.futures.ThreadPoolExecutor() as pool:
                for done in [pool.submit(measure, suites) for suites in (races, commands)]:
                    done.result()
        else:
            measure(names)
    finally:
        if measured.groups:
            files = session.finish(directory)
    print('\n\n'.join(text(group) for group in measured.groups))
    if scale != 'smoke':  # whose sizes say nothing about a target
        print('\n'.join(targets.lines(measured.groups, bool(measured.facts['accelerators']))))
    print('\n'.join(str(directory / name) for name in files))


def quick_to_compile() -> Iterator[str]:
    """Flags with which XLA compiles for a CPU in a tenth of the time, and programs are slower."""
    yield '--xla_backend_optimization_level=0'
    yield '--xla_cpu_parallel_codegen_split_count=1'
    if importlib.metadata.version('jaxlib').startswith('0.10.'):  # later ones lack the choice
        yield '--xla_cpu_use_fusion_emitters=false'


def chosen_suites(asked_for: Iterable[str]) -> tuple[list[str], str]:
    """Names of the suites, without collections, and the scale."""
    for name in asked_for:
        _known('suite', name, [*SUITES, *COLLECTIONS])
    scales = {name for name in asked_for if name in COLLECTIONS} or {'cpu'}
    if SCALE.value is not None:
        scales = {_known('scale', SCALE.value, SCALES)}
    if len(scales) > 1:
        raise ConfigError(f'--suite={",".join(asked_for)} names {len(scales)} collections; run one')
    names = [own for name in asked_for for own in COLLECTIONS.get(name, (name,))]
    return list(dict.fromkeys(names)), scales.pop()


def chosen_peers() -> tuple[str, ...]:
    """The peers that are installed; ConfigError for one that was asked for and is not."""
    if PEER.value is not None:
        for name in PEER.value:
            _known('peers', name, PEERS)
            if name in NEEDS and (missing := missing_extra(*NEEDS[name])):
                raise missing
        return tuple(PEER.value)
    absent = {name: missing for name in NEEDS if (missing := missing_extra(*NEEDS[name]))}
    for name, missing in absent.items():
        log.warning('peer %s is left out: %s', name, missing)
    return tuple(name for name in PEERS if name not in absent)


def asked() -> dict[str, Any]:
    """The fields of the scale that flags replace."""
    found: dict[str, Any] = {'grid': GRID.value}
    if WIDTHS.value:
        found['widths'] = tuple(_whole('widths', WIDTHS.value))
    if CONTEXTS.value:
        found['contexts'] = tuple(_whole('contexts', CONTEXTS.value))
    if DTYPES.value:
        found['dtypes'] = tuple(
            _known('dtypes', name, ('float32', 'bfloat16')) for name in DTYPES.value
        )
    if VARIANTS.value:
        found['only'] = tuple(checked_variants(VARIANTS.value))
    if ROUNDS.value:
        found['rounds'] = ROUNDS.value
    return found


def checked_variants(names: Iterable[str]) -> Iterator[str]:
    """The variants; the standard one, to which ratios are, first.

    Raises:
      ConfigError: one that is malformed, unknown or does not fit.
    """
    for name in dict.fromkeys(['qk/vo', *names]):
        try:
            score, value = split_variant(name)
            validate(from_json(Config, RECIPE.config(score=score, value=value)))
        except ValueError as error:
            raise ConfigError(f'--variants={name}: {error}') from error
        yield name


def _whole(flag: str, values: Iterable[str], most: int | None = None) -> list[int]:
    numbers = []
    for value in values:
        if not value.isdecimal() or int(value) < 1 or (most is not None and int(value) > most):
            upto = '' if most is None else f' to {most}, the cores that this process may use'
            raise ConfigError(f'--{flag}={value} must be a whole number from 1{upto}')
        numbers.append(int(value))
    return numbers


def _known(flag: str, name: str, known: Iterable[str]) -> str:
    if name not in (known := list(known)):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f', did you mean {near[0]!r}?' if near else ';'
        raise ConfigError(f'unknown --{flag}={name}{hint} known are {", ".join(known)}')
    return name


if __name__ == '__main__':
    cli.run(main)
