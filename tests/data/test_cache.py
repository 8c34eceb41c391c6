from qkattn.data.cache import data_root
from tests.data.refusals import refused
from tests.processes import start_python


def test_data_root_prefers_the_argument_then_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv('QKATTN_DATA', str(tmp_path / 'environment'))
    monkeypatch.setenv('HOME', str(tmp_path))
    assert data_root(tmp_path / 'argument') == tmp_path / 'argument'
    assert data_root() == tmp_path / 'environment'
    monkeypatch.delenv('QKATTN_DATA')
    assert data_root() == tmp_path / '.cache' / 'qkattn'
    with refused('data.data_dir=gs://bucket/x is a URL, but token files'):
        data_root('gs://bucket/x')


RACE = """
    import os, sys, time
    from pathlib import Path
    from qkattn.data.cache import prepared_once
    root = Path(sys.argv[1])

    def prepare():
        with (root / 'prepared').open('a') as file:
            file.write('x')
        time.sleep(0.1)
        if (root / 'prepared').read_text() == 'x':
            os._exit(9)
        (root / 'file').write_text('sound')

    print('ready', flush=True)
    while not (root / 'go').exists():
        time.sleep(0.001)
    print(prepared_once(root / 'lock', (root / 'file').read_text, prepare))
"""


def test_of_processes_that_race_one_prepares_and_another_if_it_is_killed(tmp_path):
    processes = [start_python(RACE, tmp_path) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == 'ready\n', process.communicate()
    (tmp_path / 'go').touch()
    outputs = [process.communicate(timeout=120) for process in processes]
    assert sorted(outputs) == [('', ''), ('sound\n', ''), ('sound\n', '')]
    assert sorted(process.returncode for process in processes) == [0, 0, 9]
    assert (tmp_path / 'prepared').read_text() == 'xx'
