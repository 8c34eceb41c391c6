import hashlib
import re
import sys
import sysconfig
from importlib import metadata
from pathlib import Path, PurePosixPath

import numpy as np
import pytest

from qkattn.config import DataConfig
from qkattn.data.corpora import python_text
from qkattn.data.corpora.corpus import largest_size, split_of
from qkattn.data.corpora.corpus_registry import find
from tests.data.refusals import refused

ROOT = Path(sysconfig.get_path('stdlib'))
REQUIREMENTS = Path(__file__).parents[3] / 'requirements.txt'
PACKAGES = DataConfig(name='packages')


@pytest.mark.parametrize(
    ('train', 'validation', 'digest'),
    [(40, 30, '144b30107758'), (80, 10, '719736a937bf'), (90, 5, 'e74034508a0b')],
)
def test_splits_follow_the_name(train, validation, digest):
    splits = [split_of(f'package.module_{i}', train, validation) for i in range(4000)]
    assert splits.count('train') == pytest.approx(40 * train, abs=80)
    assert splits.count('validation') == pytest.approx(40 * validation, abs=80)
    # The same in every version of the package, or published results lose meaning.
    assert hashlib.sha256(' '.join(splits).encode()).hexdigest()[:12] == digest


def test_stdlib_is_the_library_without_tests_and_tables(tmp_path):
    paths = python_text.modules(ROOT)
    assert {'json/decoder.py', 'argparse.py', 'asyncio/tasks.py'} <= set(paths)
    assert paths == sorted(paths) and len(paths) > 200
    left_out = {'test', 'tests', 'encodings', 'tkinter', 'idlelib', 'pydoc_data', 'site-packages'}
    assert not [path for path in paths if left_out & set(path.split('/'))]
    assert not [path for path in paths if '_sysconfigdata' in path]
    with refused('holds no source files', FileNotFoundError):
        python_text.modules(tmp_path)
    corpus = find(DataConfig(data_dir=str(tmp_path)))
    python = '.'.join(map(str, sys.version_info[:3]))
    assert (corpus.name, corpus.version) == ('stdlib', f'py{python}-2.0.0')
    # The same in every version of the package and of Python, or published results lose meaning.
    for path, split in (
        ('json/decoder', 'train'),
        ('argparse', 'validation'),
        ('json/tool', 'test'),
    ):
        assert f'{path}.py' in corpus.names(split)
    assert [python_text.module_name(f'm/x{end}.py') for end in ('', '/__init__')] == ['m.x'] * 2


def test_tokens_of_stdlib_are_the_bytes_of_the_files_of_a_split_in_order(stdlib):
    for split in stdlib.splits:
        names = find(DataConfig()).names(split)
        texts = [(ROOT / name).read_bytes() for name in names]
        if split != 'train':
            limit = largest_size([len(text) for text in texts])
            texts = [text[:limit].decode(errors='ignore').encode() for text in texts]
            assert stdlib.document_names(split) == names and len(names) >= 100
        expected = b''.join(text + b'\0' for text in texts)
        assert texts and np.asarray(stdlib.split(split)).tobytes() == expected


def test_packages_are_text_that_is_neither_a_test_nor_made_for_a_platform():
    pinned = re.findall(r'^([\w.-]+)==', REQUIREMENTS.read_text().split('# Tests')[0], re.M)
    assert set(python_text.DISTRIBUTIONS) <= set(pinned)
    corpus = find(PACKAGES)
    names = {split: corpus.names(split) for split in corpus.splits}
    assert names['test'] == sorted(set(names['test'])) and len(names['test']) >= 100
    assert 'jax/_src/core.py' in names['train']  # as in every version of the package
    names = sum(names.values(), [])
    assert {'numpy/ma/README.rst', 'requests/models.py'} <= set(names)
    assert {PurePosixPath(name).suffix for name in names} == {'.py', '.md', '.rst'}
    for name in ('numpy/__config__.py', 'jaxlib/version.py', 'scipy/stats/tests/test_rank.py'):
        assert name not in names
    kept = ('jax/core.py', 'docs/a.md')
    left_out = ('../bin/f2py.py', 'jax-1.dist-info/a.md', 'a/tests/b.py', 'a/b_test.py', 'a/b.txt')
    assert all(python_text.belongs(PurePosixPath(path)) for path in kept)
    assert not any(python_text.belongs(PurePosixPath(path)) for path in left_out)


def test_copies_and_almost_empty_files_are_left_out(tmp_path, monkeypatch):
    texts = {
        'a.py': b'x = 1\n' * 100,
        'b.py': b'x  =  1\n' * 100,  # a copy but for its spaces
        'c.py': b'y = 1\n',
        'd.py': b'z = "\xff"\n' * 100,
        'e.md': b'text\0' * 200,
        'f.md': b'words \n' * 100,
    }
    paths = [metadata.PackagePath(name) for name in texts]
    for path in paths:
        (tmp_path / path).write_bytes(texts[str(path)])
        path.dist = metadata.PathDistribution(tmp_path / 'a.dist-info')
    monkeypatch.setattr(python_text, 'DISTRIBUTIONS', ('a',))
    monkeypatch.setattr(metadata, 'version', lambda name: '1')
    monkeypatch.setattr(metadata, 'files', lambda name: paths)
    corpus = python_text.packages(PACKAGES)
    assert sorted(sum(map(corpus.names, corpus.splits), [])) == ['a.py', 'f.md']
    assert corpus.version == f'1.0.0-{hashlib.sha256(b"a==1").hexdigest()[:12]}'
    monkeypatch.setattr(metadata, 'version', lambda name: '2')
    changed = python_text.packages(PACKAGES)
    assert changed.version != corpus.version
    (tmp_path / 'f.md').unlink()
    with refused(r"f.md' cannot be read \(No such file"):
        changed.names('train')


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(python_text, 'DISTRIBUTIONS', ('no-such-package',))
    with refused("data.name='packages' .* no-such-package, which is not installed"):
        python_text.packages(PACKAGES)
    monkeypatch.setattr(python_text, 'DISTRIBUTIONS', ('numpy',))
    monkeypatch.setattr(metadata, 'files', lambda name: None)
    with refused('numpy was installed without a list of its files'):
        python_text.packages(PACKAGES).names('train')
