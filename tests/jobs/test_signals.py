"""Stop requests with real signals."""

import os
import signal
import subprocess
import time

import pytest

from qkattn.errors import Stopped
from qkattn.jobs.signals import EXIT_CONFIG, EXIT_REQUEUE, StopRequest
from tests.processes import start_python, wait_for_results

SIGTERM_AND_SIGINT = [signal.SIGTERM, signal.SIGINT]


def start_until_ready(source: str, *arguments: object) -> subprocess.Popen:
    """Starts a program, and returns its process once it has printed 'ready'."""
    process = start_python(source, *arguments)
    assert process.stdout.readline() == 'ready\n', process.stderr.read()
    return process


def test_exit_codes_are_those_that_launchers_know():
    assert EXIT_CONFIG == 2
    assert EXIT_REQUEUE == 75


# Waits for a stop request, and then for as many seconds as its argument says.
WAIT_FOR_STOP = """
    import signal, sys, time
    from qkattn.jobs.signals import EXIT_REQUEUE, StopRequest
    # A shell starts background jobs with SIGINT ignored; its default is what a second one needs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with StopRequest() as stop:
        print('ready', flush=True)
        while not stop.requested:
            time.sleep(0.01)
        print('saving', flush=True)
        time.sleep(float(sys.argv[1]))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    sys.exit(EXIT_REQUEUE)
"""
ADVICE = 'press Ctrl-C again'  # for a user at a terminal


def test_sigterm_asks_a_process_to_stop():
    process = start_until_ready(WAIT_FOR_STOP, 0)

    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == 'saving\n'

    _, errors = process.communicate(timeout=60)
    assert process.returncode == EXIT_REQUEUE, errors
    assert ADVICE not in errors


def test_a_second_interrupt_ends_a_process_that_was_asked_to_stop():
    """The first Ctrl-C (SIGINT) only asks to stop. It prints what a second Ctrl-C does."""
    # After the first signal, the process saves for 60 seconds.
    process = start_until_ready(WAIT_FOR_STOP, 60)

    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == 'saving\n'
    process.send_signal(signal.SIGINT)

    # A negative return code means that this signal has ended the process.
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT, errors
    assert 'KeyboardInterrupt' in errors
    # ADVICE is 'press Ctrl-C again'.
    assert ADVICE in errors


def test_an_interrupt_stops_a_process_whose_errors_nobody_reads():
    """In `qkattn ... 2>&1 | tee log`, Ctrl-C also ends tee, which reads standard error."""
    process = start_until_ready(WAIT_FOR_STOP, 0)
    process.stderr.close()

    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == 'saving\n'

    process.communicate(timeout=60)
    assert process.returncode == EXIT_REQUEUE


def test_a_request_to_stop_is_seen_in_blocks_that_begin_later():
    with StopRequest():
        with StopRequest() as before:
            assert not before.requested
        signal.raise_signal(signal.SIGTERM)
        with StopRequest() as after:
            assert after.requested
    assert not StopRequest.requested


def test_a_request_to_stop_in_an_inner_block_is_seen_outside():
    with StopRequest() as outer:
        with StopRequest():
            signal.raise_signal(signal.SIGTERM)
        assert outer.requested
        with pytest.raises(Stopped, match='nothing to save'):
            outer.defer_exit()
    assert not StopRequest.requested


# A signal comes while a file is written. The second argument is 'True' for a program that has
# something to save.
WRITE_AND_WAIT = """
    import os, signal, sys, time
    from pathlib import Path
    from qkattn.jobs import signals
    from qkattn.storage import files, leases

    directory = Path(sys.argv[1])
    has_state_to_save = sys.argv[2] == 'True'
    sync = files._sync

    def sync_after_a_signal(path):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        sync(path)

    with signals.exit_on_signal(), signals.StopRequest() as stop:
        lease = leases.acquire(directory / 'leases', 'run')
        if has_state_to_save:
            stop.defer_exit()
        files._sync = sync_after_a_signal
        files.write_atomic(directory / 'file', 'whole')
        time.sleep(0.5 if has_state_to_save else 60)
        print('requested' if stop.requested else '')
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1
"""


def assert_file_is_whole(directory):
    """Checks what `WRITE_AND_WAIT` leaves in its directory: a file and one lease."""
    assert sorted(os.listdir(directory)) == ['file', 'leases']
    assert os.listdir(directory / 'leases') == ['run.0']
    assert (directory / 'file').read_text() == 'whole'


def is_released(lease):
    """Whether a lease is released. Its file then has the modification time 0."""
    return lease.stat().st_mtime == 0


@pytest.mark.parametrize('errors_are_read', [True, False])
def test_exit_on_signal_ends_a_program_between_writes(errors_are_read, tmp_path):
    """A program without state to save gets SIGTERM while it writes a file.

    It finishes the file, releases its lease, and ends. A lease is a lock file with an owner.
    """
    has_state_to_save = False
    process = start_python(WRITE_AND_WAIT, tmp_path, has_state_to_save)
    if not errors_are_read:
        process.stderr.close()
    printed, errors = process.communicate(timeout=60)

    assert process.returncode == EXIT_REQUEUE, errors
    # The program would print something if it went on after the signal.
    assert printed == ''
    assert_file_is_whole(tmp_path)
    assert is_released(tmp_path / 'leases' / 'run.0')


def test_exit_on_signal_does_not_end_a_program_with_state_to_save(tmp_path):
    """The program gets SIGTERM while it writes a file, goes on, and ends with 0."""
    process = start_python(WRITE_AND_WAIT, tmp_path, True)
    printed, errors = process.communicate(timeout=60)

    assert process.returncode == 0, errors
    assert printed == 'requested\n'
    assert_file_is_whole(tmp_path)
    assert not is_released(tmp_path / 'leases' / 'run.0')


@pytest.mark.parametrize('sent_signal', SIGTERM_AND_SIGINT)
def test_a_later_signal_keeps_the_exit_code(sent_signal):
    """After `Stopped` is raised, a program ignores signals until it has ended.

    The first signal comes while the program handles `Stopped`. The second signal comes while
    Python shuts down: `sys.late` sends it when Python deletes this object.
    """
    program = """
    import os, signal, sys
    from qkattn.errors import Stopped
    from qkattn.jobs import signals

    sent_signal = int(sys.argv[1])

    class SignalAtShutdown:
        def __del__(self, kill=os.kill, pid=os.getpid(), sent_signal=sent_signal):
            kill(pid, sent_signal)

    sys.late = SignalAtShutdown()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with signals.exit_on_signal():
            raise Stopped('state saved')
    except Stopped:
        os.kill(os.getpid(), sent_signal)
        sys.exit(signals.EXIT_REQUEUE)
    """

    process = start_python(program, int(sent_signal))
    code, _, errors = wait_for_results([process])[0]

    assert code == EXIT_REQUEUE
    assert errors == ''


@pytest.mark.parametrize('sent_signal', SIGTERM_AND_SIGINT)
def test_a_dry_run_that_is_stopped_is_not_requeued(sent_signal):
    """A dry run has nothing to resume from, so its exit code asks for no new start."""
    program = """
    import time
    from qkattn.jobs import signals

    with signals.exit_on_signal(dry_run=lambda: True):
        print('ready', flush=True)
        time.sleep(60)
    """
    process = start_until_ready(program)

    process.send_signal(sent_signal)
    code, _, errors = wait_for_results([process])[0]

    assert code == 128 + sent_signal  # a shell reports a signal by this code
    assert errors == 'interrupted\n'


# After a stop request, saves for as many seconds as its argument says.
STOP_AND_SAVE = """
    import signal, sys, time
    from qkattn.errors import Stopped
    from qkattn.jobs import cli, signals

    @signals.exit_on_signal()
    def main():
        with signals.StopRequest() as stop:
            stop.defer_exit()
            print('ready', flush=True)
            while not stop.requested:
                time.sleep(0.01)
            print('saving', flush=True)
            until = time.monotonic() + float(sys.argv[1])
            while time.monotonic() < until:
                time.sleep(0.01)
            raise Stopped('state saved')

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    except Stopped as error:
        cli.exit_with(*cli.outcome(error))
"""
SAVED = 'state saved; the same command resumes'


def interrupt_and_read_errors(
    save_seconds: float, later_signals: list[signal.Signals]
) -> tuple[int, list[str]]:
    """Interrupts a program by Ctrl-C (SIGINT), and sends it later signals while it saves.

    Args:
        save_seconds: How long the program STOP_AND_SAVE saves.
        later_signals: The later signals.

    Returns:
        The exit code, and the lines of standard error without empty ones.
    """
    process = start_until_ready(STOP_AND_SAVE, save_seconds)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == 'saving\n'
    for later_signal in later_signals:
        process.send_signal(later_signal)
        time.sleep(0.5)  # equal signals that come at once are delivered once
    code = process.wait(60)
    lines = process.stderr.read().splitlines()
    return code, [line for line in lines if line]


@pytest.mark.parametrize(
    ('save_seconds', 'later_signals'),
    [
        pytest.param(0, [], id='no later signal'),
        pytest.param(2, [signal.SIGTERM, signal.SIGTERM, signal.SIGTERM], id='SIGTERM'),
    ],
)
def test_sigterm_while_the_state_is_saved_is_ignored(save_seconds, later_signals):
    code, lines = interrupt_and_read_errors(save_seconds, later_signals)

    assert code == EXIT_REQUEUE
    assert lines == ['stopping after this step, and saving', SAVED]


def test_a_second_interrupt_while_the_state_is_saved_is_ignored():
    code, lines = interrupt_and_read_errors(2, [signal.SIGINT])

    assert code == EXIT_REQUEUE
    assert lines == [
        'stopping after this step, and saving',
        'waiting until the state is saved; press Ctrl-C again to stop without it',
        SAVED,
    ]


def test_a_third_interrupt_ends_a_save_that_hangs():
    code, lines = interrupt_and_read_errors(60, [signal.SIGINT, signal.SIGINT])

    assert code == 128 + signal.SIGINT
    assert lines == [
        'stopping after this step, and saving',
        'waiting until the state is saved; press Ctrl-C again to stop without it',
        'interrupted; the same command resumes from what is saved',
    ]


# Delays the thread that reads the numbers of signals, and lets it finish before the process ends.
DELAY_READS = """
    import atexit, os, time

    def read_late(*arguments, read=os.read):
        content = read(*arguments)
        time.sleep(0.2)
        return content

    os.read = read_late
    atexit.register(time.sleep, 0.5)
"""


def test_a_saved_state_is_reported_where_the_watcher_is_late():
    """The watcher is a thread that reads signals, and ends a program that has nothing to save.

    Here the state is saved before the watcher has read the signal. The watcher must not report
    that there was nothing to save.
    """
    # Reads of the watcher are delayed by 0.2 s, and saving takes no time.
    process = start_until_ready(DELAY_READS + STOP_AND_SAVE, 0)

    process.send_signal(signal.SIGTERM)
    code, _, errors = wait_for_results([process])[0]

    assert code == EXIT_REQUEUE
    assert errors == 'state saved; the same command resumes\n'


# A thread ends the process while the main thread writes a file. `announce` tells the other
# processes of a job, which may then end this process. Here, it only prints its arguments.
END_FROM_A_THREAD = """
    import os, sys, threading, time, types
    from pathlib import Path
    from qkattn.jobs import signals

    def announce(*arguments):
        os.write(1, f'{arguments}'.encode())

    signals.StopRequest.peers = types.SimpleNamespace(announce=announce)
    print('a result')
    with signals.no_interrupt:
        threading.Thread(target=signals.end, args=(signals.EXIT_REQUEUE, 'ended')).start()
        time.sleep(0.5)
        Path(sys.argv[1]).write_text('whole')
    time.sleep(60)
"""


def test_a_thread_that_ends_the_process_waits_for_its_output(tmp_path):
    path = tmp_path / 'file'
    process = start_python(END_FROM_A_THREAD, path, PYTHONUNBUFFERED='')
    printed, errors = process.communicate(timeout=60)

    assert process.returncode == EXIT_REQUEUE
    assert errors == 'ended\n'
    # The file and the result are written before other processes are told.
    assert path.read_text() == 'whole'
    assert printed == "a result\n(75, 'ended')"


# The reader of the output hangs: the pipe is full. The argument says what the main thread does.
END_WHILE_THE_READER_HANGS = """
    import os, sys, time
    from qkattn.jobs import signals

    def fill_pipe():
        os.set_blocking(1, False)
        try:
            while True:
                os.write(1, 1024 * b'x')
        except BlockingIOError:
            os.set_blocking(1, True)

    signals._LONGEST_WRITE = 0.2
    with signals.exit_on_signal():
        fill_pipe()
        print('a result')  # stays in the buffer
        print('ready', file=sys.stderr, flush=True)
        if sys.argv[1] == 'prints':
            sys.stdout.flush()
        if sys.argv[1] == 'has one pipe':
            os.dup2(1, 2)
        time.sleep(600)
"""


@pytest.mark.parametrize('main_thread', ['sleeps', 'prints', 'has one pipe'])
def test_a_process_ends_although_the_reader_of_its_output_hangs(main_thread):
    process = start_python(END_WHILE_THE_READER_HANGS, main_thread, PYTHONUNBUFFERED='')
    assert process.stderr.readline() == 'ready\n'
    time.sleep(0.5)  # until the main thread sleeps or waits for the reader

    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(timeout=30) == EXIT_REQUEUE
    finally:
        process.kill()


# The disk hangs: a thread holds the lock of writes forever, or a heartbeat never returns. Then
# the second argument says who ends the process: 'signal' is SIGTERM from the test, and 'thread' is
# a thread such as the one that watches a job.
END_WHILE_A_DISK_HANGS = """
    import sys, threading, time
    from pathlib import Path
    from qkattn.jobs import signals
    from qkattn.storage import leases

    signals._LONGEST_WRITE = 0.2
    directory, ended_by, hangs = sys.argv[1:]
    is_hanging = threading.Event()

    def hang(*_):
        is_hanging.set()
        time.sleep(600)

    def write():
        with signals.no_interrupt:
            hang()

    with signals.exit_on_signal():
        if hangs == 'heartbeat':
            leases._BEATS = 100 * leases.EXPIRY  # every 10 ms
            leases._File.renew = hang
        leases.acquire(Path(directory), 'run')
        if hangs == 'write':
            threading.Thread(target=write, daemon=True).start()
        is_hanging.wait()
        print('ready', flush=True)
        if ended_by == 'thread':
            signals.end(signals.EXIT_REQUEUE, 'ended')
        time.sleep(600)
"""


@pytest.mark.parametrize('ended_by', ['signal', 'thread'])
@pytest.mark.parametrize('hangs', ['write', 'heartbeat'])
def test_a_process_ends_although_its_disk_hangs(ended_by, hangs, tmp_path):
    """A process waits _LONGEST_WRITE seconds for its writes and its lease, and then ends."""
    process = start_until_ready(END_WHILE_A_DISK_HANGS, tmp_path, ended_by, hangs)

    if ended_by == 'signal':
        process.send_signal(signal.SIGTERM)
    code, _, errors = wait_for_results([process], timeout=30)[0]

    assert code == EXIT_REQUEUE, errors
    # Releasing the lease has to wait for the write or the heartbeat. So the lease expires instead.
    assert not is_released(tmp_path / 'run.0')
