"""What the environment gets wrong is one sentence that names the variable, and is not retried."""

import pytest

from qkattn.jobs import cli, environment, machine
from tests.processes import ROOT, start_python, wait_for_results
from tests.refusals import refused

UNKNOWN = (
    "Unable to initialize backend 'cdua': Backend 'cdua' is not in the list of known backends: "
    "['cpu', 'tpu']. (set JAX_PLATFORMS='' to automatically choose an available backend)"
)
FAILED = "Unable to initialize backend 'tpu': INTERNAL: Failed to open libtpu.so"


def no_backend_at_all() -> AssertionError:
    """As jax raises it where none of the platforms that are asked for has a device."""
    try:
        exec(compile('assert None is not None', '/jax/_src/xla_bridge.py', 'exec'))
    except AssertionError as error:
        return error


# The value of JAX_PLATFORMS, the accelerators of the machine (None: not known), the error of jax,
# and a part of our sentence; None where the error may pass or has another cause.
PLATFORMS = {
    'misspelt': ('cdua', [], RuntimeError(UNKNOWN), "has no platform 'cdua', only cpu, tpu"),
    'misspelt beside GPUs': ('cdua', ['0'], RuntimeError(UNKNOWN), "no platform 'cdua'"),
    'no GPU': ('cuda', [], no_backend_at_all(), 'finds no device of this platform'),
    'no TPU': ('tpu', [], RuntimeError(FAILED), 'finds no device of this platform'),
    'a TPU that is busy': ('tpu', None, RuntimeError(FAILED), None),
    'GPUs that fail': ('cuda', ['0'], no_backend_at_all(), None),
    'no variable': (None, [], RuntimeError(FAILED), None),
    'another error': ('cuda', [], RuntimeError('a bug'), None),
    'another assertion': ('cuda', [], AssertionError(), None),
}


@pytest.mark.parametrize('name', PLATFORMS)
def test_a_platform_that_cannot_be_opened_is_a_wrong_setting(name, monkeypatch):
    # JAX_PLATFORMS, what the machine has, the error of JAX, and the reason we give (None: it is no
    # error of the setting).
    value, accelerators, error, reason = PLATFORMS[name]
    monkeypatch.delenv('JAX_PLATFORMS', raising=False)
    if value is not None:
        monkeypatch.setenv('JAX_PLATFORMS', value)
    monkeypatch.setattr(machine, 'accelerators', lambda platforms: accelerators)
    monkeypatch.setattr(machine, 'describe_accelerators', lambda: '4 NVIDIA GPUs')
    outcome = cli.outcome(error)
    if reason is None:
        assert outcome is None
        return
    sentence, code = outcome
    assert sentence.startswith(f'JAX_PLATFORMS={value}: ')
    assert reason in sentence
    assert 'this machine has 4 NVIDIA GPUs; set JAX_PLATFORMS=cpu, or unset it' in sentence
    assert code == 2
    assert '\n' not in sentence


@pytest.mark.parametrize('count', ['', '=', '=abc', '=0', '=-1', '=2.5'])
def test_a_number_of_cpu_devices_that_xla_cannot_make_is_refused(count, monkeypatch):
    flag = '--xla_force_host_platform_device_count'
    monkeypatch.setenv('XLA_FLAGS', f'--other {flag}=8')
    environment.check()
    monkeypatch.setenv('XLA_FLAGS', f'--other {flag}{count} --another')
    with refused(f'XLA_FLAGS has {flag}{count}, whose value must be a whole number of at least 1'):
        environment.check()


def test_a_working_directory_that_was_removed_is_refused(monkeypatch, tmp_path):
    gone = tmp_path / 'gone'
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with refused('the working directory was removed; change to one that exists'):
        environment.check()
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize('value', ['cuda', 'cdua'])
def test_a_script_ends_with_one_sentence_where_jax_has_no_such_platform(value, tmp_path):
    if machine.accelerators(None) != []:
        pytest.skip('this machine has accelerators')
    program = f"""
    import sys
    sys.path.insert(0, {str(ROOT)!r})
    sys.argv = ['qkattn', 'train', '--config=small', '--workdir={tmp_path}/run']
    from qkattn.__main__ import main
    main()
    """
    ((code, printed, errors),) = wait_for_results([start_python(program, JAX_PLATFORMS=value)])
    assert (code, printed) == (2, '')
    assert errors.startswith(f'JAX_PLATFORMS={value}: JAX ')
    assert errors.count('\n') == 1
    assert not list(tmp_path.iterdir())
