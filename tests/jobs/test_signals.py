"""Stop requests with real signals."""

import signal
import time

import pytest

from qkattn.errors import Stopped
from qkattn.jobs.signals import EXIT_CONFIG, EXIT_REQUEUE, StopRequest
from tests.processes import ended, start_python

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


@pytest.mark.parametrize(
    ('first', 'then', 'exit_code', 'words'),
    [
        (signal.SIGTERM, 'leave', EXIT_REQUEUE, ''),
        (signal.SIGINT, 'wait', -signal.SIGINT, 'KeyboardInterrupt'),
        (signal.SIGINT, 'leave unread', EXIT_REQUEUE, ''),  # as in `... 2>&1 | tee log`
    ],
)
def test_one_signal_ends_a_process_in_order_two_interrupts_at_once(first, then, exit_code, words):
    process = start_python(WAIT_FOR_STOP, then)
    assert process.stdout.readline() == 'ready\n', process.stderr.read()
    if 'unread' in then:
        process.stderr.close()
    process.send_signal(first)
    assert process.stdout.readline() == 'saving\n'
    if then == 'wait':
        process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1] or ''
    assert (process.returncode, words in errors) == (exit_code, True), errors
    assert (EXIT_CONFIG, EXIT_REQUEUE) == (2, 75)  # which launchers know
    assert ('press Ctrl-C again' in errors) == (first == signal.SIGINT and 'unread' not in then)


def test_a_request_holds_in_later_inner_blocks():
    with StopRequest():
        with StopRequest() as inner:
            assert not inner.requested
        signal.raise_signal(signal.SIGTERM)
        with StopRequest() as inner:
            assert inner.requested
    assert not StopRequest.requested


def test_a_request_that_an_inner_block_missed_holds_outside():
    with StopRequest() as outer:
        with StopRequest():
            signal.raise_signal(signal.SIGTERM)
        assert outer.requested
        with pytest.raises(Stopped, match='nothing to save'):
            outer.defer_exit()
    assert not StopRequest.requested


LEAVE = """
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
    """Where a request is held, there is something to save: the program itself ends."""
    process = start_python(LEAVE, tmp_path, held)
    if 'unread' in held:
        process.stderr.close()
    stdout, errors = process.communicate(timeout=60)
    ends = (EXIT_REQUEUE, '') if 'not' in held else (0, 'requested\n')
    assert (process.returncode, stdout) == ends, errors
    assert {path.name for path in tmp_path.iterdir()} == {'file', 'leases'}
    assert (tmp_path / 'file').read_text() == 'whole'
    (lease,) = (tmp_path / 'leases').iterdir()
    assert (lease.stat().st_mtime == 0) == ('not' in held)  # released


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_was_stopped_ends_as_asked_where_it_is_asked_again(number):
    """Also while Python ends, which calls what is below a module's names last."""
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
    ((code, _, errors),) = ended([start_python(program, int(number))])
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
    ((code, _, errors),) = ended([process])
    assert (code, errors) == (128 + number, 'interrupted\n')


SAVE = """
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
def test_who_asks_again_while_the_state_is_saved_loses_nothing(again, seconds, code, last):
    """And no request ends in a traceback; a third Ctrl-C is the way out of a save that hangs."""
    process = start_python(SAVE, seconds)
    assert process.stdout.readline() == 'ready\n', process.stderr.read()
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == 'saving\n'
    for number in again:
        process.send_signal(number)
        time.sleep(0.5)  # signals of one kind that come at once are one
    assert process.wait(60) == code
    lines = [line for line in process.stderr.read().splitlines() if line]
    assert lines[0] == 'stopping after this step, and saving' and lines[-1] == last
    waits = 'waiting until the state is saved; press Ctrl-C again to stop without it'
    assert lines[1:-1] == ([waits] if signal.SIGINT in again else [])


READ_LATE = """
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
    process = start_python(READ_LATE + SAVE, 0)
    assert process.stdout.readline() == 'ready\n', process.stderr.read()
    process.send_signal(signal.SIGTERM)
    ((code, _, errors),) = ended([process])
    assert (code, errors) == (EXIT_REQUEUE, 'state saved; the same command resumes\n')


END = """
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
    """The others of a job, once they know of it, may end this process, too."""
    process = start_python(END, tmp_path / 'file', PYTHONUNBUFFERED='')
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (EXIT_REQUEUE, 'ended\n')
    assert printed == "a result\n(75, 'ended')" and (tmp_path / 'file').read_text() == 'whole'
