"""The process of one contestant: builds its works, then times them on request.

python -m qkattn.benchmark.contestant '{"cores": [1], "works": [["qkattn", {...}]]}'

On its standard output stands one JSON object a line: first for every work {'seconds': of a call
after the first, 'steps': of a call, 'extra': ...} or {'failed': a sentence}; then for every line
'NUMBER CALLS' on its standard input {'seconds': of all calls}, until the input ends.
"""

import importlib
import json
import os
import resource
import sys
import time
import traceback
from typing import Any

from qkattn.benchmark.binding import pin
from qkattn.benchmark.work import WORKS, Work
from qkattn.run.memory import keep_freed_memory

OWN = 'qkattn.benchmark.peers.own'  # programs as qkattn's scripts run them


def main() -> None:
    order = json.loads(sys.argv[1])
    if order['cores']:
        pin(order['cores'])
    # What libraries print goes to standard error.
    answers = os.fdopen(os.dup(1), 'w', buffering=1)
    os.dup2(2, 1)
    works = []
    for name, settings in order['works']:
        work, answer = _built(name, settings)
        works.append(work)
        print(json.dumps(answer), file=answers)
    for line in sys.stdin:
        number, calls = map(int, line.split())
        print(json.dumps({'seconds': _seconds(works[number], calls)}), file=answers)


def _built(name: str, settings: dict[str, Any]) -> tuple[Work | None, dict[str, Any]]:
    """A work after its first call, and the answer that describes it."""
    start = time.perf_counter()
    try:
        module, function = WORKS.get(name, name).split(':')
        if module.startswith(OWN):
            keep_freed_memory()  # before an import starts a thread
        work = getattr(importlib.import_module(module), function)(**settings)
        work.run(1)
        built = time.perf_counter() - start
        seconds = _seconds(work, 1)
    except Exception as error:  # whatever a library raises, out of memory too: a row that failed
        traceback.print_exc()
        return None, {'failed': f'{type(error).__name__}: {error}'.splitlines()[0]}
    extra = {**work.extra, 'build_seconds': built, **_memory()}
    return work, {'seconds': seconds, 'steps': work.steps, 'extra': extra}


def _seconds(work: Work, calls: int) -> float:
    start = time.perf_counter()
    work.run(calls)
    return time.perf_counter() - start


def _memory() -> dict[str, int]:
    """Peak bytes of the process so far, and of its accelerator where that tells."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {'peak_bytes': peak * (1 if sys.platform == 'darwin' else 1024)}
    if 'jax' in sys.modules:
        stats = sys.modules['jax'].devices()[0].memory_stats()
        if stats:
            found['peak_device_bytes'] = stats['peak_bytes_in_use']
    elif 'torch' in sys.modules and sys.modules['torch'].cuda.is_available():
        found['peak_device_bytes'] = sys.modules['torch'].cuda.max_memory_allocated()
    return found


if __name__ == '__main__':
    main()
