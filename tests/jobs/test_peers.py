"""Stop requests, failures, deaths and hangs in real jobs of two processes."""

import re
import signal

import pytest

from qkattn.jobs.signals import EXIT_CONFIG, EXIT_REQUEUE
from tests.lanes import slow_except
from tests.processes import start_job, wait_for_results

# A job with a failure. `stage` names what its processes do when something happens. `failure` is
# what process 1 does then.
JOB = """
    import hashlib, os, sys, time
    import jax, numpy as np
    from jax.experimental import multihost_utils
    from qkattn.jobs import agreement, bootstrap
    from qkattn.errors import ConfigError, Stopped
    from qkattn.jobs import cli, signals

    stage, failure = sys.argv[1:]
    bootstrap.HEARTBEAT = 8

    def hang():
        # Native code, in which no Python code handles a signal.
        hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)

    def fail():
        if failure == 'raise':
            raise ValueError('of one')
        if failure == 'config':
            raise ConfigError('a file of one host')
        if failure == 'exit':
            os._exit(0)
        hang()

    @signals.exit_on_signal()
    @bootstrap.in_job
    def main():
        rank = bootstrap.start().process_id
        print('ready', flush=True, file=sys.__stdout__)
        if stage == 'compiling':
            if rank == 0:
                hang()
            else:
                fail()
        with signals.StopRequest() as stop:
            if stage == 'arriving' and rank == 1:
                hang()
            stop.defer_exit()
            print('holding', flush=True, file=sys.__stdout__)
            print('a result')
            if stage in ('collective', 'agreement') and rank == 1:
                fail()
            if stage == 'collective':
                multihost_utils.process_allgather(np.arange(3))
            if stage == 'agreement':
                agreement.barrier('there')

            # Steps last 0.01 s in process 0 and 0.02 s in process 1.
            for step in range(2, 10**6, 2):
                time.sleep(0.01 * (rank + 1))
                if stop.should_stop(step):
                    agreement.barrier('saving')
                    time.sleep(1)
                    raise Stopped(f'stopped at step {step}')
                if step % 100 == 0:
                    agreement.barrier('in step')

    sys.argv[1:] = []
    cli.run(main)
"""


def start_job_until(line, stage, failure='none'):
    """Starts a job of two processes, and returns them once each has printed this line."""
    processes = start_job(JOB, 2, stage, failure, PYTHONUNBUFFERED='')
    for process in processes:
        assert f'{line}\n' in process.stdout, process.stderr.read()
    return processes


QUICK_STOPS = [([1], signal.SIGTERM)]
STOPS = [
    ([1], signal.SIGTERM),
    ([0], signal.SIGINT),
    ([0, 1, 1], signal.SIGTERM),
]


@pytest.mark.parametrize(('ranks', 'sent_signal'), slow_except(QUICK_STOPS, STOPS))
def test_a_signal_to_any_process_stops_all_at_the_same_step(ranks, sent_signal):
    """The processes `ranks` of a job get the signal. A step takes process 1 twice as long."""
    processes = start_job_until('holding', stage='loop')

    for rank in ranks:
        processes[rank].send_signal(sent_signal)
    results = wait_for_results(processes)

    # Both processes save. Their exit code asks for a new start.
    codes = [code for code, _, _ in results]
    assert codes == [EXIT_REQUEUE, EXIT_REQUEUE], results
    # Each process prints the step after which it stops.
    errors = ''.join(error for _, _, error in results)
    stop_steps = set(re.findall(r'stopped at step (\d+)', errors))
    assert len(stop_steps) == 1, results
    # Only process 0 prints results.
    printed = [text for _, text, _ in results]
    assert printed == ['a result\n', '']


@pytest.mark.slow
def test_a_process_that_exits_while_it_looks_at_its_peers_exits_with_0():
    """In each process, a thread checks whether the other process is alive, here nonstop."""
    source = """
        import time
        from qkattn.jobs import bootstrap, peers
        peers._INTERVAL = 0.0
        bootstrap.start()
        time.sleep(0.2)
    """
    results = wait_for_results(start_job(source, 2))

    # A result has the exit code, standard output and standard error of a process.
    assert results == [(0, '', ''), (0, '', '')]


@pytest.mark.slow
@pytest.mark.parametrize('stage', ['compiling', 'arriving'])
@pytest.mark.parametrize('ranks', [[0], [1], [0, 1]])
def test_a_stop_before_the_first_step_ends_all_processes_at_once(stage, ranks):
    processes = start_job_until('ready', stage)

    for rank in ranks:
        processes[rank].send_signal(signal.SIGTERM)
    results = wait_for_results(processes)

    for code, _, error in results:
        assert code == EXIT_REQUEUE, results
        assert 'nothing to save' in error


def start_failing_job(stage, failure='none'):
    line = 'ready' if stage == 'compiling' else 'holding'
    return start_job_until(line, stage, failure)


def wait_for_process(process):
    """Waits for a process, and returns its exit code and its standard error on one line."""
    code, _, error = wait_for_results([process], timeout=60)[0]
    return code, ' '.join(error.split())


@pytest.mark.slow
@pytest.mark.parametrize('stage', ['compiling', 'collective', 'agreement'])
@pytest.mark.parametrize(
    ('failure', 'expected_code', 'message'),
    [
        ('raise', 1, 'process 1 has ended with code 1: ValueError: of one'),
        ('config', EXIT_CONFIG, 'process 1 has ended with code 2: a file of one host'),
        ('exit', 1, 'heartbeats): 1'),  # jax names process 1
    ],
)
def test_process_0_ends_and_says_why_where_process_1_fails(stage, failure, expected_code, message):
    process_0, process_1 = start_failing_job(stage, failure)

    code, error = wait_for_process(process_0)
    process_1.kill()

    assert code == expected_code, error
    assert message in error


@pytest.mark.slow
@pytest.mark.parametrize('stage', ['compiling', 'collective', 'agreement'])
@pytest.mark.parametrize('sent_signal', [signal.SIGKILL, signal.SIGSTOP])
def test_process_0_ends_where_process_1_is_killed_or_hangs(stage, sent_signal):
    process_0, process_1 = start_failing_job(stage)

    process_1.send_signal(sent_signal)
    code, error = wait_for_process(process_0)
    process_1.kill()

    assert code == 1, error
    assert 'heartbeats): 1' in error  # jax names process 1


@pytest.mark.slow
@pytest.mark.parametrize('sent_signal', [signal.SIGKILL, signal.SIGSTOP])
def test_process_1_ends_where_process_0_is_killed_or_hangs(sent_signal):
    process_0, process_1 = start_failing_job('compiling')

    process_0.send_signal(sent_signal)
    code, error = wait_for_process(process_1)
    process_0.kill()

    assert code == 1, error
    assert 'another one died or hangs' in error
