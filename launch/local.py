#!/usr/bin/env python3
"""Runs a job of several processes on this machine.

  launch/local.py --processes=2 -- train --config=NAME --workdir=DIRECTORY
  launch/local.py --processes=2 --gpus_per_process=1 -- ablate --config=NAME --workdir=DIRECTORY

Lines of the log begin with the rank of their process. SIGTERM and Ctrl-C are passed on to all
processes, which save and end; a third Ctrl-C kills them. A job that was stopped from elsewhere
(75) is started again, one that crashed at most --retries times, one with a wrong setting (2) never.
--dry_run prints the commands, and does nothing. Standard library only. QKATTN_VENV is the virtual
environment (.venv in the repository). Exit code: that of the job.
"""

import argparse
import contextlib
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from arguments import DRY_RUN, EXIT_CONFIG, flag, leave, read, require_command, whole

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get('QKATTN_VENV') or ROOT / '.venv').expanduser()
PYTHON = VENV / 'bin/python'
EXIT_REQUEUE = 75
DELAY = 1.0  # seconds between a crash and the next start
ALONE = 60.0  # seconds to end in for the others, once a process has failed; then they are killed
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)

FLAGS = {
    '--processes': flag('processes of the job (1)', whole(1), 1),
    '--devices_per_process': flag('CPU devices per process, for trying things out', whole(1)),
    '--gpus_per_process': flag('GPUs per process; by default each sees all', whole(1)),
    '--retries': flag('how often a crashed job is started again (3)', whole(0), 3),
    '--grace': flag('seconds from a stop to a kill (300)', whole(1), 300),
    '--dry_run': DRY_RUN,
}
# Command lines and additional variables of processes by label.
Parts = dict[str, tuple[list[str], dict[str, str]]]


class Group:
    """Processes that run side by side and get the signals that this one gets."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._running: list[subprocess.Popen] = []
        self._deadline: float | None = None
        self.asked = False  # to stop
        self._interrupts = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def run(self, parts: Parts) -> list[int]:
        """Runs processes to their end; exit codes in order of their end.

        Once one has ended, the others have limited time.
        """
        if self.asked:
            return [EXIT_REQUEUE]
        self._deadline = None
        codes = []
        for command, variables in parts.values():
            process = subprocess.Popen(
                command,
                env={**os.environ, 'PYTHONUNBUFFERED': '1', **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
                preexec_fn=_end_with_parent,
            )
            self._running.append(process)
        readers = [
            threading.Thread(target=_copy, args=(source, to.buffer, f'[{label}] '), daemon=True)
            for label, process in zip(parts, self._running, strict=True)
            for source, to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        ]
        for reader in readers:
            reader.start()
        if self.asked:  # while they started
            self._send(signal.SIGTERM)
        while self._running:
            for process in self._running[:]:
                if (code := process.poll()) is not None:
                    self._running.remove(process)
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)  # what it has left running
                    codes.append(128 - code if code < 0 else code)
                    failed = codes[-1] not in (0, EXIT_REQUEUE)
                    self._end_within(min(ALONE, self._grace) if failed else self._grace)
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._send(signal.SIGKILL)
            time.sleep(0.05)
        for reader in readers:
            reader.join()
        return codes

    def _stop(self, number: int, frame: Any) -> None:
        self.asked = True
        if number == signal.SIGINT:
            self._interrupts += 1
        if self._interrupts == 2:
            say('waiting until the processes have saved; press Ctrl-C again to kill them')
        self._send(signal.SIGKILL if self._interrupts > 2 else signal.SIGTERM)
        self._end_within(self._grace)

    def _end_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _send(self, number: int) -> None:
        for process in self._running:
            process.send_signal(number)


def _end_with_parent() -> None:
    """In a child on Linux: asks for SIGTERM when the launcher dies and can pass nothing on."""
    if sys.platform == 'linux':
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _copy(source: IO[bytes], to: IO[bytes], prefix: str) -> None:
    for line in source:  # to its end, also without a reader: a full pipe would stop the process
        with contextlib.suppress(OSError):
            to.write(prefix.encode() + line.rstrip(b'\n') + b'\n')
            to.flush()


def outcome(codes: list[int]) -> int:
    """The exit code of a job: its first failure; 75 only if all ended with 0 or 75."""
    failed = [code for code in codes if code not in (0, EXIT_REQUEUE)]
    return failed[0] if failed else max(codes)


def ranks(options: argparse.Namespace) -> Parts:
    """The processes of a job by rank."""
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        address = f'127.0.0.1:{listener.getsockname()[1]}'
    parts = {}
    for rank in range(options.processes):
        variables = {}
        if options.processes > 1:
            variables = {
                'JAX_COORDINATOR_ADDRESS': address,
                'JAX_NUM_PROCESSES': str(options.processes),
                'JAX_PROCESS_ID': str(rank),
            }
        if (devices := options.devices_per_process) is not None:
            flags = f'{os.environ.get("XLA_FLAGS", "")} '.lstrip()
            flags += f'--xla_force_host_platform_device_count={devices}'
            variables |= {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags}
        if (gpus := options.gpus_per_process) is not None:
            first = rank * gpus
            visible = os.environ.get('CUDA_VISIBLE_DEVICES')
            all_gpus = visible.split(',') if visible else list(map(str, range(first + gpus)))
            if len(all_gpus) < first + gpus:
                leave(
                    f'CUDA_VISIBLE_DEVICES={visible} has no {first + gpus} GPUs for all processes'
                )
            variables['CUDA_VISIBLE_DEVICES'] = ','.join(all_gpus[first : first + gpus])
        parts[str(rank)] = [str(PYTHON), '-m', 'qkattn', *options.command], variables
    return parts


def supervise(group: Group, options: argparse.Namespace) -> int:
    """Runs a job until it is done, wrong, stopped from here, or has crashed too often."""
    crashes = 0
    while True:
        code = outcome(group.run(ranks(options)))
        if code in (0, EXIT_CONFIG) or group.asked:
            return code
        if code == EXIT_REQUEUE:
            say('stopped from elsewhere; starting again')
            continue
        if (crashes := crashes + 1) > options.retries:
            say(f'exit code {code}; no retry left of {options.retries}')
            return code
        say(f'exit code {code}; retry {crashes} of {options.retries}')
        until = time.monotonic() + DELAY
        while time.monotonic() < until and not group.asked:
            time.sleep(0.05)


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # the job goes on without a reader
        os.write(2, f'local: {text}\n'.encode())


def main() -> int:
    options = read(__doc__, FLAGS, sys.argv[1:])
    require_command(options)
    if options.devices_per_process and options.gpus_per_process:
        leave('--devices_per_process makes CPU devices; leave out --gpus_per_process, or this one')
    if options.dry_run:
        for label, (line, variables) in ranks(options).items():
            settings = [f'{name}={shlex.quote(value)}' for name, value in variables.items()]
            print(f'[{label}]', *settings, shlex.join(line))
        return 0
    if not PYTHON.exists():
        leave(f'{PYTHON} is missing; set QKATTN_VENV to the virtual environment of qkattn')
    return supervise(Group(options.grace), options)


if __name__ == '__main__':
    sys.exit(main())
