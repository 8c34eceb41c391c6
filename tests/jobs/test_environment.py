"""What the environment gets wrong is one sentence that names the variable, and is not retried."""

import pytest

from qkattn.jobs import cli, environment, machine
from tests.processes import ROOT, start_python, wait_for_results
from tests.refusals import refused

# Errors that jax raises if it cannot open a platform.
UNKNOWN_PLATFORM = RuntimeError(
    "Unable to initialize backend 'cdua': Backend 'cdua' is not in the list of known backends: "
    "['cpu', 'tpu']. (set JAX_PLATFORMS='' to automatically choose an available backend)"
)
NO_TPU_LIBRARY = RuntimeError(
    "Unable to initialize backend 'tpu': INTERNAL: Failed to open libtpu.so"
)


def no_device_error() -> AssertionError:
    """The error that jax raises if no platform of JAX_PLATFORMS has a device.

    It is an assertion without a message. Only its traceback shows that it comes from jax's
    xla_bridge.py.
    """
    code = compile('assert None is not None', '/jax/_src/xla_bridge.py', 'exec')
    try:
        exec(code)
    except AssertionError as error:
        return error


@pytest.mark.parametrize(
    ('platforms', 'accelerators', 'error', 'reason'),
    [
        pytest.param(
            'cdua', [], UNKNOWN_PLATFORM, "has no platform 'cdua', only cpu, tpu", id='misspelt'
        ),
        pytest.param(
            'cdua', ['0'], UNKNOWN_PLATFORM, "no platform 'cdua'", id='misspelt with a GPU'
        ),
        pytest.param(
            'cuda', [], no_device_error(), 'finds no device of this platform', id='no GPU'
        ),
        pytest.param('tpu', [], NO_TPU_LIBRARY, 'finds no device of this platform', id='no TPU'),
    ],
)
def test_a_platform_that_the_machine_lacks_is_a_wrong_setting(
    platforms, accelerators, error, reason, monkeypatch
):
    """An error of jax becomes one sentence, and exit code 2, which means a wrong setting.

    JAX_PLATFORMS names the platforms that jax may use. `accelerators` are the GPUs or TPUs of the
    machine that this process may use.
    """
    monkeypatch.setenv('JAX_PLATFORMS', platforms)
    monkeypatch.setattr(machine, 'accelerators', lambda platforms: accelerators)
    monkeypatch.setattr(machine, 'describe_accelerators', lambda: '4 NVIDIA GPUs')

    sentence, code = cli.outcome(error)

    assert code == 2
    assert sentence.startswith(f'JAX_PLATFORMS={platforms}: ')
    assert reason in sentence
    assert 'this machine has 4 NVIDIA GPUs; set JAX_PLATFORMS=cpu, or unset it' in sentence
    assert '\n' not in sentence


@pytest.mark.parametrize(
    # `accelerators` are the GPUs that jax may use. None means that the machine has accelerators
    # that cannot be listed, such as TPUs.
    ('platforms', 'accelerators', 'error'),
    [
        # The machine has what JAX_PLATFORMS names. It may be busy or broken.
        pytest.param('tpu', None, NO_TPU_LIBRARY, id='TPU may be busy'),
        pytest.param('cuda', ['0'], no_device_error(), id='GPU that fails'),
        # JAX_PLATFORMS cannot be wrong.
        pytest.param(None, [], NO_TPU_LIBRARY, id='JAX_PLATFORMS not set'),
        # The machine lacks a GPU, but these errors do not come from opening a platform.
        pytest.param('cuda', [], RuntimeError('a bug'), id='another error'),
        pytest.param('cuda', [], AssertionError(), id='another assertion'),
    ],
)
def test_an_error_with_another_cause_is_not_a_wrong_setting(
    platforms, accelerators, error, monkeypatch
):
    """An error is blamed on JAX_PLATFORMS only if the machine lacks the platform.

    Otherwise it is unexpected, and is shown with its traceback.
    """
    monkeypatch.delenv('JAX_PLATFORMS', raising=False)
    if platforms is not None:
        monkeypatch.setenv('JAX_PLATFORMS', platforms)
    monkeypatch.setattr(machine, 'accelerators', lambda platforms: accelerators)
    monkeypatch.setattr(machine, 'describe_accelerators', lambda: '4 NVIDIA GPUs')

    # None means that the error is unexpected, such as a bug.
    assert cli.outcome(error) is None


COUNT_FLAG = '--xla_force_host_platform_device_count'


def test_a_valid_number_of_cpu_devices_is_accepted(monkeypatch):
    monkeypatch.setenv('XLA_FLAGS', f'--other {COUNT_FLAG}=8')
    environment.check()


@pytest.mark.parametrize('count', ['', '=', '=abc', '=0', '=-1', '=2.5'])
def test_an_invalid_number_of_cpu_devices_is_refused(count, monkeypatch):
    flag = COUNT_FLAG + count
    monkeypatch.setenv('XLA_FLAGS', f'--other {flag} --another')
    with refused(f'XLA_FLAGS has {flag}, whose value must be a whole number of at least 1'):
        environment.check()


def test_a_working_directory_that_was_removed_is_refused(monkeypatch, tmp_path):
    removed = tmp_path / 'removed'
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()

    with refused('the working directory was removed; change to one that exists'):
        environment.check()
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize('platform', ['cuda', 'cdua'])
def test_a_script_ends_with_one_sentence_where_jax_has_no_such_platform(platform, tmp_path):
    """The machine has no GPU for 'cuda', and 'cdua' is misspelt. Training does not begin."""
    if machine.accelerators(None) != []:
        pytest.skip('this machine has accelerators')
    # This is what the command `qkattn train` runs.
    program = f"""
    import sys
    sys.path.insert(0, {str(ROOT)!r})
    sys.argv = ['qkattn', 'train', '--config=small', '--workdir={tmp_path}/run']
    from qkattn.__main__ import main
    main()
    """

    process = start_python(program, JAX_PLATFORMS=platform)
    code, printed, errors = wait_for_results([process])[0]

    assert code == 2
    assert printed == ''
    assert errors.startswith(f'JAX_PLATFORMS={platform}: JAX ')
    assert errors.count('\n') == 1
    # The run has made no directory.
    assert not list(tmp_path.iterdir())
