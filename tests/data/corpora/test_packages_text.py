import hashlib
import re
from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest

from qkattn.config import DataConfig
from qkattn.data.corpora import packages_text
from qkattn.data.corpora.corpus_registry import find
from tests.data.refusals import refused

REQUIREMENTS = Path(__file__).parents[3] / 'requirements.txt'


@pytest.fixture(scope='module')
def corpus():
    return find(DataConfig(name='packages'))


def test_distributions_are_pinned_and_installed_with_the_package():
    pinned = re.findall(r'^([\w.-]+)==', REQUIREMENTS.read_text().split('# Tests')[0], re.M)
    assert set(packages_text.DISTRIBUTIONS) <= set(pinned)


def test_evaluation_splits_have_many_documents_and_none_is_large(corpus):
    documents = corpus.documents(None)
    for split in ('validation', 'test'):
        names = corpus.names(split)
        sizes = [len(text) for text in documents[split]]
        assert len(names) == len(sizes) >= 100
        assert names == sorted(set(names))
        assert max(sizes) <= 0.05 * sum(sizes)
    assert sum(len(text) for text in documents['train']) > 2 * 10**7


def test_documents_are_text_that_is_neither_a_test_nor_made_for_a_platform(corpus):
    names = [name for split in corpus.splits for name in corpus.names(split)]
    assert {'jax/_src/core.py', 'numpy/ma/README.rst', 'requests/models.py'} <= set(names)
    assert {PurePosixPath(name).suffix for name in names} == {'.py', '.md', '.rst'}
    for name in ('numpy/__config__.py', 'jaxlib/version.py', 'scipy/stats/tests/test_rank.py'):
        assert name not in names
    kept = ('jax/core.py', 'docs/a.md')
    left_out = ('../bin/f2py.py', 'jax-1.dist-info/a.md', 'a/tests/b.py', 'a/b_test.py', 'a/b.txt')
    assert [packages_text.belongs(PurePosixPath(p)) for p in kept + left_out] == [True] * 2 + [
        False
    ] * 5


def test_copies_and_almost_empty_files_are_left_out(tmp_path, monkeypatch):
    texts = {
        'a.py': b'x = 1\n' * 100,
        'b.py': b'x  =  1\n' * 100,  # a copy but for its spaces
        'c.py': b'y = 1\n',
        'd.py': b'z = "\xff"\n' * 100,
        'e.md': b'text\0' * 200,
        'f.md': b'words \n' * 100,
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    paths = [metadata.PackagePath(name) for name in texts]
    for path in paths:
        path.dist = metadata.PathDistribution(tmp_path / 'a.dist-info')
    monkeypatch.setattr(packages_text, 'DISTRIBUTIONS', ('a',))
    monkeypatch.setattr(metadata, 'version', lambda name: '1')
    monkeypatch.setattr(metadata, 'files', lambda name: paths)
    found = packages_text.corpus(DataConfig(name='packages'))
    names = [name for split in found.splits for name in found.names(split)]
    assert sorted(names) == ['a.py', 'f.md']
    digest = hashlib.sha256(b'a==1').hexdigest()[:12]
    assert found.version == f'{packages_text.VERSION}-{digest}'
    monkeypatch.setattr(metadata, 'version', lambda name: '2')
    assert packages_text.corpus(DataConfig(name='packages')).version != found.version


def test_splits_follow_the_name():
    splits = [packages_text.split_of(f'package/module_{i}.py') for i in range(4000)]
    assert 0.78 < splits.count('train') / 4000 < 0.82
    assert 0.09 < splits.count('validation') / 4000 < 0.11
    # The same in every version of the package, or published results lose meaning.
    assert packages_text.split_of('jax/_src/core.py') == 'train'


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(packages_text, 'DISTRIBUTIONS', ('no-such-package',))
    with refused("data.name='packages' .* no-such-package, which is not installed"):
        packages_text.corpus(DataConfig(name='packages'))
    monkeypatch.setattr(packages_text, 'DISTRIBUTIONS', ('numpy',))
    monkeypatch.setattr(metadata, 'files', lambda name: None)
    with refused('numpy was installed without a list of its files'):
        packages_text.corpus(DataConfig(name='packages')).names('train')
