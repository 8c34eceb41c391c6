import concurrent.futures
import time

from qkattn.data.cache import data_root, prepared_once
from tests.refusals import refused


def test_data_root_prefers_the_argument_then_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv('QKATTN_DATA', str(tmp_path / 'environment'))
    monkeypatch.setenv('HOME', str(tmp_path))
    assert data_root(tmp_path / 'argument') == tmp_path / 'argument'
    assert data_root() == tmp_path / 'environment'
    monkeypatch.delenv('QKATTN_DATA')
    assert data_root() == tmp_path / '.cache' / 'qkattn'
    with refused('data.data_dir=gs://bucket/x is a URL, but token files'):
        data_root('gs://bucket/x')


def test_of_those_that_race_one_prepares_and_another_if_it_fails(tmp_path):
    prepared = []

    def prepare():
        prepared.append(len(prepared))
        time.sleep(0.1)
        if prepared == [0]:
            raise KeyError
        (tmp_path / 'file').write_text('sound')

    def opened(_):
        try:
            return prepared_once(tmp_path / 'lock', (tmp_path / 'file').read_text, prepare)
        except KeyError:
            return 'failed'

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        assert sorted(threads.map(opened, range(3))) == ['failed', 'sound', 'sound']
    assert prepared == [0, 1]
