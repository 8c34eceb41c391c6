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
from typing import IO, Any, NamedTuple

from arguments import (
    DRY_RUN,
    EXIT_CONFIG,
    at_least,
    exit_with,
    flag,
    read_command_line,
    require_command,
)

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get('QKATTN_VENV') or ROOT / '.venv').expanduser()
PYTHON = VENV / 'bin/python'
EXIT_REQUEUE = 75
DELAY = 1.0  # seconds between a crash and the next start
ALONE = 60.0  # seconds to end in for the others, once a process has failed; then they are killed
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)

FLAGS = {
    '--processes': flag('processes of the job (1)', at_least(1), 1),
    '--devices_per_process': flag('CPU devices per process, for trying things out', at_least(1)),
    '--gpus_per_process': flag('GPUs per process; by default each sees all', at_least(1)),
    '--retries': flag('how often a crashed job is started again (3)', at_least(0), 3),
    '--grace': flag('seconds from a stop to a kill (300)', at_least(1), 300),
    '--dry_run': DRY_RUN,
}


class Program(NamedTuple):
    """What one process of a job executes."""

    command: list[str]
    variables: dict[str, str]  # of its environment, in addition to those of the launcher


class Group:
    """Processes that run side by side and get the signals that this one gets."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._running: list[subprocess.Popen] = []
        self._deadline: float | None = None
        self.is_stopping = False  # whether this launcher has got SIGTERM or Ctrl-C
        self._interrupts = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def run(self, programs: dict[str, Program]) -> list[int]:
        """Runs the processes of a job to their end; returns exit codes, the first to end first.

        A process that is ended by signal N has the code 128 + N. Once one process has ended, the
        others are killed after a while: after `grace` seconds, or after ALONE if it has failed.
        `programs` are by the labels that begin their lines of the log.
        """
        if self.is_stopping:
            return [EXIT_REQUEUE]
        self._deadline = None
        for program in programs.values():
            self._running.append(_start(program))
        readers = []
        for label, process in zip(programs, self._running, strict=True):
            for pipe, output in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                arguments = (pipe, output.buffer, f'[{label}] ')
                readers.append(threading.Thread(target=_copy, args=arguments, daemon=True))
        for reader in readers:
            reader.start()
        if self.is_stopping:
            # The signal came while the processes were started.
            self._send(signal.SIGTERM)

        codes = []
        while self._running:
            for process in list(self._running):
                code = process.poll()
                if code is None:
                    continue
                self._running.remove(process)
                # Processes that it has started and left running.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                if code < 0:
                    code = 128 - code  # Popen has -N for signal N, and shells have 128 + N
                codes.append(code)
                has_failed = code not in (0, EXIT_REQUEUE)
                self._end_within(min(ALONE, self._grace) if has_failed else self._grace)
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._send(signal.SIGKILL)
            time.sleep(0.05)
        for reader in readers:
            reader.join()
        return codes

    def _stop(self, number: int, frame: Any) -> None:
        """Passes a signal on to the processes. A third Ctrl-C kills them."""
        self.is_stopping = True
        if number == signal.SIGINT:
            self._interrupts += 1
        if self._interrupts == 2:
            say('waiting until the processes have saved; press Ctrl-C again to kill them')
        self._send(signal.SIGKILL if self._interrupts > 2 else signal.SIGTERM)
        self._end_within(self._grace)

    def _end_within(self, seconds: float) -> None:
        """Sets the time at which the processes are killed, unless an earlier one is set."""
        deadline = time.monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _send(self, number: int) -> None:
        for process in self._running:
            process.send_signal(number)


def _start(program: Program) -> 'subprocess.Popen[bytes]':
    """Starts a program with pipes for its output."""
    return subprocess.Popen(
        program.command,
        env={**os.environ, 'PYTHONUNBUFFERED': '1', **program.variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches the launcher alone, which passes it on
        preexec_fn=_end_with_parent,
    )


def _end_with_parent() -> None:
    """In a child on Linux: asks for SIGTERM when the launcher dies and can pass nothing on."""
    if sys.platform == 'linux':
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _copy(pipe: IO[bytes], output: IO[bytes], prefix: str) -> None:
    """Copies the lines of a pipe, each with a prefix.

    The pipe is read to its end even if nobody reads the output. A full pipe would stop the process.
    """
    for line in pipe:
        with contextlib.suppress(OSError):
            output.write(prefix.encode() + line.rstrip(b'\n') + b'\n')
            output.flush()


def outcome(codes: list[int]) -> int:
    """Returns the exit code of a job: its first failure, or 75 if any process was stopped, or 0."""
    failed = [code for code in codes if code not in (0, EXIT_REQUEUE)]
    return failed[0] if failed else max(codes)


def programs_by_rank(options: argparse.Namespace) -> dict[str, Program]:
    """Returns what the processes of a job execute, by rank: '0', '1', ..."""
    # A free port, at which the processes find each other.
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        address = f'127.0.0.1:{listener.getsockname()[1]}'

    programs = {}
    for rank in range(options.processes):
        variables = {}
        if options.processes > 1:
            variables |= {
                'JAX_COORDINATOR_ADDRESS': address,
                'JAX_NUM_PROCESSES': str(options.processes),
                'JAX_PROCESS_ID': str(rank),
            }
        if options.devices_per_process is not None:
            count = f'--xla_force_host_platform_device_count={options.devices_per_process}'
            flags = f'{os.environ.get("XLA_FLAGS", "")} {count}'.lstrip()
            variables |= {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags}
        if options.gpus_per_process is not None:
            gpus = gpus_of_rank(rank, options.gpus_per_process)
            variables['CUDA_VISIBLE_DEVICES'] = ','.join(gpus)
        command = [str(PYTHON), '-m', 'qkattn', *options.command]
        programs[str(rank)] = Program(command, variables)
    return programs


def gpus_of_rank(rank: int, num_gpus: int) -> list[str]:
    """Returns the GPUs of a process, which ends the launcher if there are too few.

    With two GPUs per process, rank 1 has the third and fourth of CUDA_VISIBLE_DEVICES. Without this
    variable, these are '2' and '3'.
    """
    first = rank * num_gpus
    end = first + num_gpus
    visible = os.environ.get('CUDA_VISIBLE_DEVICES')
    if not visible:
        return [str(gpu) for gpu in range(first, end)]
    all_gpus = visible.split(',')
    if len(all_gpus) < end:
        exit_with(f'CUDA_VISIBLE_DEVICES={visible} has no {end} GPUs for all processes')
    return all_gpus[first:end]


def supervise(group: Group, options: argparse.Namespace) -> int:
    """Starts a job again until it is done, stopped by a signal, or cannot succeed.

    It cannot succeed if a setting is wrong, or if it has crashed more than --retries times. Returns
    its exit code.
    """
    crashes = 0
    while True:
        code = outcome(group.run(programs_by_rank(options)))
        if code in (0, EXIT_CONFIG) or group.is_stopping:
            return code
        if code == EXIT_REQUEUE:
            say('stopped from elsewhere; starting again')
            continue
        crashes += 1
        if crashes > options.retries:
            say(f'exit code {code}; no retry left of {options.retries}')
            return code
        say(f'exit code {code}; retry {crashes} of {options.retries}')
        next_start = time.monotonic() + DELAY
        while time.monotonic() < next_start and not group.is_stopping:
            time.sleep(0.05)


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # the job goes on without a reader
        os.write(2, f'local: {text}\n'.encode())


def main() -> int:
    options = read_command_line(__doc__, FLAGS, sys.argv[1:])
    require_command(options)
    if options.devices_per_process and options.gpus_per_process:
        exit_with(
            '--devices_per_process makes CPU devices; leave out --gpus_per_process, or this one'
        )
    if options.dry_run:
        for rank, program in programs_by_rank(options).items():
            settings = []
            for name, value in program.variables.items():
                settings.append(f'{name}={shlex.quote(value)}')
            print(f'[{rank}]', *settings, shlex.join(program.command))
        return 0
    if not PYTHON.exists():
        exit_with(f'{PYTHON} is missing; set QKATTN_VENV to the virtual environment of qkattn')
    return supervise(Group(options.grace), options)


if __name__ == '__main__':
    sys.exit(main())
