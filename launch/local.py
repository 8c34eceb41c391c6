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
ALONE = 60.0  # seconds between a failure of one process and a kill of the rest
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
    """The command of one process of a job."""

    command: list[str]
    variables: dict[str, str]  # added to the launcher's environment


class Group:
    """Parallel processes that get the launcher's signals."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._running: list[subprocess.Popen] = []
        self._deadline: float | None = None
        self.is_stopping = False  # whether this launcher has got SIGTERM or Ctrl-C
        self._interrupts = 0
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._stop)

    def run(self, programs: dict[str, Program]) -> list[int]:
        """Runs the processes of a job to their end.

        When a process ends, the rest have `grace` seconds to end, and at most ALONE seconds if the
        process failed. After that, the rest are killed.

        Args:
            programs: The program of each process, by the label that begins its log lines.

        Returns:
            The exit codes in the order in which the processes ended; 128 + N for signal N.
        """
        if self.is_stopping:
            return [EXIT_REQUEUE]
        self._deadline = None
        for program in programs.values():
            self._running.append(_start(program))
        readers = []
        for label, process in zip(programs, self._running, strict=True):
            readers += _readers(process, prefix=f'[{label}] ')
        for reader in readers:
            reader.start()
        if self.is_stopping:
            # A signal arrived while the processes were being started.
            self._send(signal.SIGTERM)

        codes = []
        while self._running:
            for process in list(self._running):
                code = process.poll()
                if code is not None:
                    self._running.remove(process)
                    codes.append(self._finish(process, code))
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._send(signal.SIGKILL)
            time.sleep(0.05)
        for reader in readers:
            reader.join()
        return codes

    def _finish(self, process: 'subprocess.Popen[bytes]', code: int) -> int:
        """Limits the time of the other processes after one has ended; returns its exit code.

        `code` is that of `Popen`, which is -N for signal N. The exit code is then 128 + N.
        """
        # The process may have left children running.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if code < 0:
            signum = -code
            code = 128 + signum
        has_failed = code not in (0, EXIT_REQUEUE)
        self._end_within(min(ALONE, self._grace) if has_failed else self._grace)
        return code

    def _stop(self, signum: int, frame: Any) -> None:
        """Handles a signal: sends SIGTERM to the processes, or SIGKILL on the third Ctrl-C."""
        self.is_stopping = True
        if signum == signal.SIGINT:
            self._interrupts += 1
        if self._interrupts == 2:
            say('waiting until the processes have saved; press Ctrl-C again to kill them')
        self._send(signal.SIGKILL if self._interrupts > 2 else signal.SIGTERM)
        self._end_within(self._grace)

    def _end_within(self, seconds: float) -> None:
        """Sets the time of the kill, if it is earlier than a time that is already set."""
        deadline = time.monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _send(self, signum: int) -> None:
        for process in self._running:
            process.send_signal(signum)


def _start(program: Program) -> 'subprocess.Popen[bytes]':
    """Starts a program with pipes for its output."""
    return subprocess.Popen(
        program.command,
        env={**os.environ, 'PYTHONUNBUFFERED': '1', **program.variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # only the launcher gets Ctrl-C
        preexec_fn=_end_with_parent,
    )


def _end_with_parent() -> None:
    """Makes Linux send SIGTERM to this process when the launcher dies."""
    if sys.platform == 'linux':
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _readers(process: 'subprocess.Popen[bytes]', prefix: str) -> list[threading.Thread]:
    """Returns threads that copy the output of a process to that of the launcher."""
    to_output = (process.stdout, sys.stdout.buffer, prefix)
    to_error = (process.stderr, sys.stderr.buffer, prefix)
    return [
        threading.Thread(target=_copy, args=to_output, daemon=True),
        threading.Thread(target=_copy, args=to_error, daemon=True),
    ]


def _copy(pipe: IO[bytes], output: IO[bytes], prefix: str) -> None:
    """Copies the lines of a pipe, each with a prefix."""
    for line in pipe:
        # Keep reading if the output is closed, because a full pipe would block the process.
        with contextlib.suppress(OSError):
            output.write(prefix.encode() + line.rstrip(b'\n') + b'\n')
            output.flush()


def outcome(codes: list[int]) -> int:
    """Returns the exit code of a job: its first failure, or 75 if any process was stopped, or 0."""
    failures = [code for code in codes if code not in (0, EXIT_REQUEUE)]
    return failures[0] if failures else max(codes)


def programs_by_rank(options: argparse.Namespace) -> dict[str, Program]:
    """Returns the programs of a job by rank: '0', '1', ..."""
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))  # 0 chooses a free port
        _, free_port = listener.getsockname()

    programs = {}
    for rank in range(options.processes):
        variables = {}
        if options.processes > 1:
            variables |= {
                'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{free_port}',
                'JAX_NUM_PROCESSES': str(options.processes),
                'JAX_PROCESS_ID': str(rank),
            }
        if options.devices_per_process is not None:
            device_flag = f'--xla_force_host_platform_device_count={options.devices_per_process}'
            user_flags = os.environ.get('XLA_FLAGS', '')
            xla_flags = f'{user_flags} {device_flag}'.lstrip()
            variables |= {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': xla_flags}
        if options.gpus_per_process is not None:
            gpus = gpus_of_rank(rank, options.gpus_per_process)
            variables['CUDA_VISIBLE_DEVICES'] = ','.join(gpus)
        command = [str(PYTHON), '-m', 'qkattn', *options.command]
        programs[str(rank)] = Program(command, variables)
    return programs


def gpus_of_rank(rank: int, num_gpus: int) -> list[str]:
    """Returns the `num_gpus` GPUs of a process. Too few GPUs end the launcher.

    With two GPUs per process, rank 1 gets the third and fourth of CUDA_VISIBLE_DEVICES, or '2' and
    '3' if it is not set.
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
    """Runs a job, and restarts it after a preemption or a crash; returns its exit code.

    A job is not restarted after a wrong setting, a signal, or more than --retries crashes.
    """
    crashes = 0
    while True:
        codes = group.run(programs_by_rank(options))
        code = outcome(codes)
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
            time.sleep(0.05)  # a signal ends the waiting


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # if standard error is closed
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
