"""Stop requests with real signals."""

import signal
import time

import pytest

from qkattn.errors import Stopped
from qkattn.jobs.signals import EXIT_CONFIG, EXIT_REQUEUE, StopRequest
from tests.processes import start_python, wait_for_results

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
        if sys.argv[1] == 'wait':
            time.sleep(60)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    sys.exit(EXIT_REQUEUE)
"""


# The signal, what follows, the exit code, and a part of standard error.
@pytest.mark.parametrize(
    ('first', 'then', 'exit_code', 'words'),
    [
        # The signal, what follows it (wait: the process goes on until a second interrupt), the
        # exit code, and words of the errors.
        (signal.SIGTERM, 'leave', EXIT_REQUEUE, ''),
        (signal.SIGINT, 'wait', -signal.SIGINT, 'KeyboardInterrupt'),
        (signal.SIGINT, 'leave unread', EXIT_REQUEUE, ''),  # as in `... 2>&1 | tee log`
    ],
)
def test_a_signal_asks_a_process_to_stop_and_a_second_interrupt_ends_it(
    first, then, exit_code, words
):
    process = start_python(WAIT_FOR_STOP, then)
    assert process.stdout.readline() == 'ready\n', process.stderr.read()
    if 'unread' in then:
        process.stderr.close()
    process.send_signal(first)
    assert process.stdout.readline() == 'saving\n'
    if then == 'wait':
        process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1] or ''
    assert process.returncode == exit_code, errors
    assert words in errors
    assert (EXIT_CONFIG, EXIT_REQUEUE) == (2, 75)  # which launchers know

    # Only a user at a terminal is told about the second interrupt.
    is_advised = first == signal.SIGINT and 'unread' not in then
    assert ('press Ctrl-C again' in errors) == is_advised


def test_a_request_to_stop_is_seen_in_blocks_that_begin_later():
    with StopRequest():
        with StopRequest() as inner:
            assert not inner.requested
        signal.raise_signal(signal.SIGTERM)
        with StopRequest() as inner:
            assert inner.requested
    assert not StopRequest.requested


def test_a_request_to_stop_in_an_inner_block_is_seen_outside():
    with StopRequest() as outer:
        with StopRequest():
            signal.raise_signal(signal.SIGTERM)
        assert outer.requested
        with pytest.raises(Stopped, match='nothing to save'):
            outer.defer_exit()
    assert not StopRequest.requested


# A signal comes while a file is written; 'held' is a program that has something to save.
WRITE_AND_WAIT = """
    import os, signal, sys, time
    from pathlib import Path
    from qkattn.jobs import signals
    from qkattn.storage import files, leases

    def stopped_on_the_way(path, sync=files._sync):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        sync(path)

    with signals.exit_on_signal(), signals.StopRequest() as stop:
        directory = Path(sys.argv[1])
        held = sys.argv[2] == 'held'
        lease = leases.acquire(directory / 'leases', 'run')
        if held:
            stop.defer_exit()
        files._sync = stopped_on_the_way
        files.write_atomic(directory / 'file', 'whole')
        time.sleep(0.5 if held else 60)
        print('requested' if stop.requested else '')
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1
"""


@pytest.mark.parametrize('held', ['not held', 'not held, unread', 'held'])
def test_exit_on_signal_leaves_a_clean_directory(held, tmp_path):
    """The signal ends the program after the file is written, and releases its lease.

    A program with something to save is not ended: it sees the request and ends by itself.
    """
    process = start_python(WRITE_AND_WAIT, tmp_path, held)
    if 'unread' in held:
        process.stderr.close()
    stdout, errors = process.communicate(timeout=60)
    expected = (EXIT_REQUEUE, '') if 'not' in held else (0, 'requested\n')
    assert (process.returncode, stdout) == expected, errors
    assert {path.name for path in tmp_path.iterdir()} == {'file', 'leases'}
    assert (tmp_path / 'file').read_text() == 'whole'
    (lease,) = (tmp_path / 'leases').iterdir()
    assert (lease.stat().st_mtime == 0) == ('not' in held)  # released


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_has_stopped_keeps_its_exit_code_where_a_signal_comes_again(number):
    """The last signal comes while Python shuts down, from a finalizer of an object in a module."""
    program = """
    import os, signal, sys
    from qkattn.errors import Stopped
    from qkattn.jobs import signals

    class Late:
        def __del__(self, kill=os.kill, pid=os.getpid(), number=int(sys.argv[1])):
            kill(pid, number)

    sys.late = Late()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with signals.exit_on_signal():
            raise Stopped('state saved')
    except Stopped:
        os.kill(os.getpid(), int(sys.argv[1]))
        sys.exit(signals.EXIT_REQUEUE)
    """
    ((code, _, errors),) = wait_for_results([start_python(program, int(number))])
    assert (code, errors) == (EXIT_REQUEUE, '')


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_dry_run_that_is_stopped_promises_nothing(number):
    """A launcher does not start it again, as it does after EXIT_REQUEUE."""
    program = """
    import time
    from qkattn.jobs import signals

    with signals.exit_on_signal(dry_run=lambda: True):
        print('ready', flush=True)
        time.sleep(60)
    """
    process = start_python(program)
    assert process.stdout.readline() == 'ready\n', process.stderr.read()
    process.send_signal(number)
    ((code, _, errors),) = wait_for_results([process])
    assert (code, errors) == (128 + number, 'interrupted\n')


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


@pytest.mark.parametrize(
    ('again', 'seconds', 'code', 'last'),
    [
        ([], 0, EXIT_REQUEUE, 'state saved; the same command resumes'),
        ([signal.SIGINT], 2, EXIT_REQUEUE, 'state saved; the same command resumes'),
        ([signal.SIGTERM] * 3, 2, EXIT_REQUEUE, 'state saved; the same command resumes'),
        ([signal.SIGINT] * 2, 60, 130, 'interrupted; the same command resumes from what is saved'),
    ],
    ids=['once', 'a second Ctrl-C', 'SIGTERM again', 'a third Ctrl-C'],
)
def test_signals_while_the_state_is_saved_are_ignored_but_for_a_third_interrupt(
    again, seconds, code, last
):
    """A third Ctrl-C is the way out of a save that hangs. Nothing ends in a traceback."""
    process = start_python(STOP_AND_SAVE, seconds)
    assert process.stdout.readline() == 'ready\n', process.stderr.read()
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == 'saving\n'
    for number in again:
        process.send_signal(number)
        time.sleep(0.5)  # signals of one kind that come at once are one
    assert process.wait(60) == code
    lines = [line for line in process.stderr.read().splitlines() if line]
    assert lines[0] == 'stopping after this step, and saving'
    assert lines[-1] == last
    waits = 'waiting until the state is saved; press Ctrl-C again to stop without it'
    assert lines[1:-1] == ([waits] if signal.SIGINT in again else [])


DELAY_READS = """
    import atexit, os, time

    def read_late(*arguments, read=os.read):
        content = read(*arguments)
        time.sleep(0.2)
        return content

    os.read = read_late
    atexit.register(time.sleep, 0.5)  # as long as the watcher is late, and longer
"""


def test_a_saved_state_is_not_called_nothing_to_save_where_the_watcher_is_late():
    """The main thread handles the signal, and saves, before the watcher has read its number."""
    process = start_python(DELAY_READS + STOP_AND_SAVE, 0)
    assert process.stdout.readline() == 'ready\n', process.stderr.read()
    process.send_signal(signal.SIGTERM)
    ((code, _, errors),) = wait_for_results([process])
    assert (code, errors) == (EXIT_REQUEUE, 'state saved; the same command resumes\n')


END_FROM_A_THREAD = """
    import os, sys, threading, time, types
    from pathlib import Path
    from qkattn.jobs import signals

    announce = lambda *ended: os.write(1, f'{ended}'.encode())
    signals.StopRequest.peers = types.SimpleNamespace(announce=announce)
    print('a result')
    with signals.no_interrupt:
        threading.Thread(target=signals.end, args=(signals.EXIT_REQUEUE, 'ended')).start()
        time.sleep(0.5)
        Path(sys.argv[1]).write_text('whole')
    time.sleep(60)
"""


def test_a_thread_that_ends_the_process_waits_for_its_output(tmp_path):
    """It waits for the block without interrupts, prints, and only then tells the other processes.

    Those may end this process as soon as they know.
    """
    process = start_python(END_FROM_A_THREAD, tmp_path / 'file', PYTHONUNBUFFERED='')
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (EXIT_REQUEUE, 'ended\n')
    assert printed == "a result\n(75, 'ended')"
    assert (tmp_path / 'file').read_text() == 'whole'
