"""A study of eight runs: where its time goes, and one process against worker processes."""

import tempfile
from pathlib import Path

from qkattn.benchmark import commands
from qkattn.benchmark.binding import pin
from qkattn.benchmark.measurement import Measurement
from qkattn.benchmark.session import Session
from qkattn.benchmark.targets import BEST, ONE_CORE, ONE_PROCESS, WORKERS
from qkattn.run.cores import usable
from qkattn.run.records import parse_json

# Overrides of the quickstart, eight runs of three trials, which takes minutes.
WHOLE: dict[str, object] = {}
TINY = {
    'base.trials.seeds': '(0,)',
    **{'base.train.num_steps': 40, 'base.train.eval_every': 20, 'base.train.checkpoint_every': 20},
    **{'base.optimizer.warmup_steps': 2, 'base.model.num_layers': 1, 'base.model.num_heads': 2},
    **{'base.model.context': 16, 'base.data.eval_sequences': 16, 'sizes': "('d_model=32',)"},
    **{'variants': "('qk/vo', 'shared_qk/vo')", 'tolerance': 5e-3},
}
SCALES = {'cpu': WHOLE, 'gpu': WHOLE, 'smoke': TINY}
# Phases of a run by the name of a row.
PHASES = {
    'data': ('preparing data',),
    'compiling and initializing': ('compiling', 'initializing'),
    'evaluating': ('evaluating', 'measuring'),
    'matching': ('matching parameters',),
    'report': ('writing the report',),
}


def run(session: Session) -> None:
    flags = commands.overrides(SCALES[session.scale.name])
    found: dict[str, list[Measurement]] = {}

    def rows(which: str) -> list[Measurement]:
        if not found:
            found.update(_measured(flags, all_ways=session.scale.name != 'smoke'))
        return found[which]

    cores = len(usable())
    title = f'{cores} core{"s" * (cores > 1)}'
    commands.record(session, f'workers, {title}', lambda: rows('workers'), ONE_PROCESS)
    commands.record(session, 'one process, by phase', lambda: rows('phases'), ONE_PROCESS)


def _measured(flags: list[str], all_ways: bool) -> dict[str, list[Measurement]]:
    """The study by each way, with a compilation cache that is empty every time.

    Without `all_ways`, in one process and by --workers=auto alone, from data that is not prepared.
    """
    cores, seconds = usable(), {}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        if all_ways:  # data is prepared, and files are read into memory, before any time counts
            _study(path / 'first', [*flags, '--dry_run'])
        one = _study(path / 'one', flags)
        seconds[ONE_PROCESS] = one.seconds
        auto = _study(path / 'auto', [*flags, '--workers=auto'])
        if all_ways:
            each = _study(path / 'each', [*flags, f'--workers={len(cores)}'])
            pin(cores[:1])
            try:
                seconds[ONE_CORE] = _study(path / 'slow', flags).seconds
            finally:
                pin(cores)
            seconds['a worker on each core'] = each.seconds
            seconds[BEST] = min(one.seconds, each.seconds)
        seconds[WORKERS] = auto.seconds
        lines = (path / 'one' / 'study' / 'results.jsonl').read_text().splitlines()
    results = {result['run']: result for result in map(parse_json, lines)}.values()
    ways = [Measurement(name, {}, [s], {'runs': len(results)}) for name, s in seconds.items()]
    phases = {'interpreter and imports': one.first_phase}
    phases |= {name: sum(one.phases[p] for p in of) for name, of in PHASES.items()}
    phases['training'] = sum(result['train_seconds'] for result in results)
    phases['checkpoints'] = sum(result['checkpoint_seconds'] for result in results)
    phases['rest, waiting included'] = one.seconds - sum(phases.values())
    rows = [Measurement(name, {}, [s]) for name, s in phases.items()]
    return {'workers': ways, 'phases': [ways[0], *rows]}


def _study(directory: Path, flags: list[str]) -> commands.Finished:
    return commands.run(
        *('ablate', '--config=quickstart', f'--workdir={directory / "study"}', *flags),
        environment={'JAX_COMPILATION_CACHE_DIR': str(directory / 'compiled')},
    )
