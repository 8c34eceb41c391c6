import hashlib
import platform
import re
import sysconfig
from importlib import metadata
from pathlib import Path

import numpy as np

from qkattn.config import DataConfig
from qkattn.data.corpora import python_text
from qkattn.data.corpora.corpus import largest_size, split_of
from qkattn.data.corpora.corpus_registry import find
from tests.refusals import refused

PACKAGES = DataConfig(name='packages')


def test_stdlib_is_the_library_without_tests_and_tables(stdlib):
    paths = list(python_text.modules())
    assert paths == sorted(paths) and len(paths) > 200
    assert not [path for path in paths if {'test', 'encodings'} & set(path.split('/'))]
    corpus = find(DataConfig())
    assert corpus.version == f'py{platform.python_version()}-2.0.0'
    # The same in every version of the package and of Python, or published results lose meaning.
    splits = ' '.join(split_of(f'package.module_{i}', 40, 30) for i in range(4000))
    assert hashlib.sha256(splits.encode()).hexdigest()[:12] == '144b30107758'
    places = {'json/decoder.py': 'train', 'argparse.py': 'validation', 'json/tool.py': 'test'}
    for path, split in (places | {'json/__init__.py': split_of('json', 40, 30)}).items():
        assert path in corpus.names(split)
    # Its tokens are the bytes of the files of a split in order.
    for split in stdlib.splits:
        names = corpus.names(split)
        texts = [(Path(sysconfig.get_path('stdlib')) / name).read_bytes() for name in names]
        if split != 'train':
            limit = largest_size([*map(len, texts)])
            texts = [text[:limit].decode(errors='ignore').encode() for text in texts]
            assert stdlib.document_names(split) == names and len(names) >= 100
        expected = b''.join(text + b'\0' for text in texts)
        assert texts and np.asarray(stdlib.split(split)).tobytes() == expected


def test_packages_are_text_that_is_neither_a_test_nor_made_for_a_platform():
    requirements = Path(__file__).parents[3].joinpath('requirements.txt').read_text()
    pinned = re.findall(r'^([\w.-]+)==', requirements.split('# Tests')[0], re.M)
    assert set(python_text.DISTRIBUTIONS) <= set(pinned)
    names = find(PACKAGES).names
    assert names('test') == sorted(set(names('test'))) and len(names('test')) >= 100
    assert 'jax/_src/core.py' in names('train')
    for name in ('numpy/__config__.py', 'jaxlib/version.py', 'scipy/stats/tests/test_rank.py'):
        assert not any(name in names(split) for split in ('train', 'validation', 'test'))


def test_copies_scripts_and_almost_empty_files_are_left_out(tmp_path, monkeypatch):
    texts = {
        'a.py': b'x = 1\n' * 100,
        'b.py': b'x  =  1\n' * 100,  # a copy but for its spaces
        **{'c.py': b'y = 1\n', 'd.py': b'z = "\xff"\n' * 100, 'e.md': b'text\0' * 200},
    }
    others = 'f.md', '../bin/a.py', 'b-1.dist-info/c.md', 'a/tests/b.py', 'a.txt'
    texts |= dict.fromkeys(others, b'words \n' * 100)
    paths = [metadata.PackagePath(name) for name in texts]
    for path in paths:
        (tmp_path / 'site' / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / 'site' / path).write_bytes(texts[str(path)])
        path.dist = metadata.PathDistribution(tmp_path / 'site' / 'a.dist-info')
    monkeypatch.setattr(python_text, 'DISTRIBUTIONS', ('a',))
    monkeypatch.setattr(metadata, 'files', lambda name: paths)
    with refused("data.name='packages' cannot be read .*No package metadata.*requirements.txt"):
        find(PACKAGES)
    monkeypatch.setattr(metadata, 'version', lambda name: '1')
    monkeypatch.setattr(python_text, '_installed', python_text._installed.__wrapped__)
    corpus = find(PACKAGES)
    assert sorted(sum(map(corpus.names, corpus.splits), [])) == ['a.py', 'f.md']
    assert corpus.version == f'1.0.0-{hashlib.sha256(b"a==1").hexdigest()[:12]}'
    monkeypatch.setattr(metadata, 'files', lambda name: None)
    with refused("no list of files of .'a'"):
        corpus.names('train')
