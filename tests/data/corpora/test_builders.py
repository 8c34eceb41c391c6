import hashlib
import json
import socket
import sys
import time
from pathlib import Path

import pytest
import tensorflow_datasets as tfds

from qkattn.data.corpora import builders
from qkattn.errors import ConfigError
from tests.data.web import serving, unplug

TEXT = b'one\ntwo\n'


class Lines(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Lines of a file that is downloaded from `FILE`."""

    VERSION = tfds.core.Version('1.0.0')
    FILE = None

    @property
    def url_infos(self):
        return builders.url_infos([self.FILE])

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {'line': tfds.features.Text(), 'twice': {'line': tfds.features.Text()}}
            ),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        return {'train': self._generate_examples(dl_manager.download(self.FILE.url))}

    def _generate_examples(self, path):
        for number, line in enumerate(Path(path).read_text().split()):
            yield number, {'line': line, 'twice': {'line': 2 * line}}


@pytest.fixture
def source(monkeypatch):
    def point(url: str, content: bytes = TEXT) -> builders.SourceFile:
        file = builders.SourceFile(url, hashlib.sha256(content).hexdigest(), len(content))
        monkeypatch.setattr(Lines, 'FILE', file)
        return file

    return point


def prepare(data_dir, **options):
    return builders.prepare(lambda: Lines(data_dir=data_dir), data_dir=data_dir, **options)


def prepared(data_dir: Path) -> list[Path]:
    """What might be taken for a dataset, or would fill the disk without being one."""
    return [
        path
        for path in data_dir.rglob('*')
        if path.name in ('1.0.0', 'dataset_info.json')
        or 'incomplete' in path.name
        or '.tmp.' in path.name
    ]


def test_downloaded_file_becomes_a_dataset(tmp_path, source):
    (tmp_path / 'served').mkdir()
    (tmp_path / 'served' / 'lines.txt').write_bytes(TEXT)
    with serving(tmp_path / 'served') as url:
        source(f'{url}/lines.txt')
        builder = prepare(tmp_path / 'data')
    assert list(builders.texts(builder, 'train', 'line')) == [b'one', b'two']
    assert list(builders.texts(builder, 'train', 'twice', 'line')) == [b'oneone', b'twotwo']
    # Without the file: neither downloaded nor generated again.
    assert list(builders.texts(prepare(tmp_path / 'data'), 'train', 'line')) == [b'one', b'two']


def test_changed_download_is_refused(tmp_path, source):
    (tmp_path / 'served').mkdir()
    (tmp_path / 'served' / 'lines.txt').write_bytes(b'one\nten\n')
    with serving(tmp_path / 'served') as url:
        file = source(f'{url}/lines.txt')
        with pytest.raises(ConfigError, match=f'{file.url}.*wrong checksum.*{file.sha256}') as said:
            prepare(tmp_path / 'data', advice='do this')
    assert str(said.value).endswith('; do this.') and '\n' not in str(said.value)
    assert not prepared(tmp_path / 'data')


def test_file_that_the_server_lacks_is_named(tmp_path, source):
    with serving(tmp_path) as url:
        file = source(f'{url}/lines.txt')
        with pytest.raises(ConfigError, match=f'{file.url}.*404.*; do this'):
            prepare(tmp_path / 'data', advice='do this')


def test_no_network_is_one_sentence_at_once(tmp_path, source, monkeypatch):
    file = source('https://files.example.org/lines.txt')
    asked = unplug(monkeypatch)
    start = time.monotonic()
    with pytest.raises(ConfigError) as said:
        prepare(tmp_path / 'data', advice=builders.by_hand([file]))
    assert time.monotonic() - start < 5
    assert asked == ['files.example.org']
    assert str(said.value) == (
        'lines/1.0.0: https://files.example.org/lines.txt cannot be downloaded (Failed to resolve '
        "'files.example.org' ([Errno -2] Name or service not known)); fetch the files by hand and "
        'set data.manual_dir to the directory that holds lines.txt.'
    )
    assert not prepared(tmp_path / 'data')

    (tmp_path / 'lines.txt').write_bytes(TEXT)
    builder = prepare(tmp_path / 'data', files=[file], manual_dir=str(tmp_path))
    assert list(builders.texts(builder, 'train', 'line')) == [b'one', b'two']


def test_server_that_does_not_answer_is_given_up(tmp_path, source, monkeypatch):
    monkeypatch.setattr(builders, 'TIMEOUT', (0.2, 0.2))
    with socket.create_server(('127.0.0.1', 0)) as silent:
        source(f'http://127.0.0.1:{silent.getsockname()[1]}/lines.txt')
        start = time.monotonic()
        with pytest.raises(ConfigError, match=r'cannot be downloaded .*timed out'):
            prepare(tmp_path / 'data')
        assert time.monotonic() - start < 5


def test_manual_files_are_checked(tmp_path, source):
    file = source('https://files.example.org/lines.txt')
    options = {'files': [file], 'manual_dir': str(tmp_path)}
    path = tmp_path / 'lines.txt'
    with pytest.raises(ConfigError, match=f"'{path}' cannot be read .*{file.url} there"):
        prepare(tmp_path / 'data', **options)
    path.write_bytes(b'one\nten\n')
    with pytest.raises(ConfigError, match=f"'{path}' has sha256 .*, not {file.sha256}"):
        prepare(tmp_path / 'data', **options)
    assert not prepared(tmp_path / 'data')


@pytest.fixture
def ready(tmp_path, source):
    """A data directory with the dataset prepared."""
    file = source('https://files.example.org/lines.txt')
    (tmp_path / 'lines.txt').write_bytes(TEXT)
    prepare(tmp_path / 'data', files=[file], manual_dir=str(tmp_path))
    return tmp_path / 'data'


def test_prepared_dataset_is_opened_without_a_lock(ready):
    (ready / 'lines.lock').unlink()
    prepare(ready)
    assert not (ready / 'lines.lock').exists()


def test_what_a_killed_preparation_left_is_removed(tmp_path, source):
    file = source('https://files.example.org/lines.txt')
    (tmp_path / 'lines.txt').write_bytes(TEXT)
    data = tmp_path / 'data'
    for left in ('lines/incomplete.ABC_1.0.0', 'downloads/lines/somewhere.tmp.123'):
        (data / left).mkdir(parents=True)
        (data / left / 'part').write_bytes(bytes(100))
    prepare(data, files=[file], manual_dir=str(tmp_path))
    assert not [p for p in prepared(data) if 'incomplete' in p.name or '.tmp.' in p.name]
    assert (data / 'lines' / '1.0.0').is_dir()


def test_tfds_names_unfinished_directories_as_they_are_looked_for(tmp_path):
    with tfds.core.utils.incomplete_dir(str(tmp_path / '1.0.0')) as path:
        assert list(tmp_path.glob('incomplete.*')) == [Path(path)]


def test_directory_that_is_no_dataset_is_named(ready):
    (ready / 'lines' / '1.0.0' / 'dataset_info.json').unlink()
    with pytest.raises(ConfigError, match=r'lines/1.0.0.*holds no dataset.*delete it'):
        prepare(ready)


def test_format_without_random_access_is_named(ready):
    info = ready / 'lines' / '1.0.0' / 'dataset_info.json'
    values = json.loads(info.read_text())
    assert values['fileFormat'] == 'array_record'
    info.write_text(json.dumps(values | {'fileFormat': 'tfrecord'}))
    with pytest.raises(ConfigError, match='was prepared as tfrecord; delete that directory'):
        list(builders.texts(prepare(ready), 'train', 'line'))


def test_missing_package_is_named(tmp_path, source, monkeypatch):
    source('https://files.example.org/lines.txt')

    def needing(self, dl_manager):
        import apache_beam  # noqa: F401

    monkeypatch.setattr(Lines, '_split_generators', needing)
    monkeypatch.setitem(sys.modules, 'apache_beam', None)
    with pytest.raises(ConfigError, match='needs apache-beam: pip install apache-beam, or do this'):
        prepare(tmp_path / 'data', advice='do this')


def test_package_is_found_behind_an_error_raised_again():
    inner = ModuleNotFoundError("No module named 'tensorflow'", name='tensorflow')
    outer = ImportError('Failed to construct it')
    outer.__cause__ = inner
    assert 'pip install tensorflow' in builders.needs_package('x', outer, 'do this')
    assert 'broken binary' in builders.needs_package('x', ImportError('broken binary'), 'do this')
