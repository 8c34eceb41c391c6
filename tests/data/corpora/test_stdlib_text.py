import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from qkattn.config import DataConfig
from qkattn.data.corpora import stdlib_text
from qkattn.data.corpora.corpus import largest_size
from qkattn.data.corpora.corpus_registry import find
from tests.data.refusals import refused

ROOT = Path(sysconfig.get_path('stdlib'))


@pytest.fixture(scope='module')
def paths():
    return stdlib_text.module_paths(ROOT)


def test_corpus_is_the_library_without_tests_and_tables(paths, tmp_path):
    assert {'json/decoder.py', 'argparse.py', 'asyncio/tasks.py'} <= set(paths)
    assert paths == sorted(paths)
    left_out = {'test', 'tests', 'encodings', 'tkinter', 'idlelib', 'pydoc_data', 'site-packages'}
    assert not [path for path in paths if left_out & set(path.split('/'))]
    assert not [path for path in paths if '_sysconfigdata' in path]
    assert len(paths) > 200
    with refused('holds no source files', FileNotFoundError):
        stdlib_text.module_paths(tmp_path)


def test_splits_are_about_40_30_30_and_follow_the_module_name():
    splits = [stdlib_text.split_of(f'module_{i}.py') for i in range(4000)]
    assert 0.38 < splits.count('train') / 4000 < 0.42
    assert 0.28 < splits.count('validation') / 4000 < 0.32
    assert 0.28 < splits.count('test') / 4000 < 0.32
    for i in range(100):
        assert stdlib_text.split_of(f'm{i}.py') == stdlib_text.split_of(f'm{i}/__init__.py')
    # The same in every version of the package and of Python, or published results lose meaning.
    assert stdlib_text.split_of('json/decoder.py') == 'train'
    assert stdlib_text.split_of('argparse.py') == 'validation'
    assert stdlib_text.split_of('json/tool.py') == 'test'


def test_tokens_are_the_bytes_of_the_files_of_a_split_in_order(stdlib, paths):
    for split in stdlib_text.SPLITS:
        names = [p for p in paths if stdlib_text.split_of(p) == split]
        texts = [(ROOT / name).read_bytes() for name in names]
        if split != 'train':
            limit = largest_size([len(text) for text in texts])
            texts = [text[:limit].decode(errors='ignore').encode() for text in texts]
            assert stdlib.document_names(split) == names
        assert texts and stdlib.split(split).tobytes() == b''.join(t + b'\0' for t in texts)


def test_evaluation_splits_have_at_least_100_documents_of_at_most_5_percent(stdlib):
    for split in ('validation', 'test'):
        ends = stdlib.document_ends(split)
        assert len(ends) >= 100
        assert np.diff(ends, prepend=0).max() <= 0.05 * ends[-1]


def test_version_names_the_interpreter_and_the_selection(stdlib, tmp_path):
    corpus = find(DataConfig(data_dir=str(tmp_path / 'data')))
    python = '.'.join(map(str, sys.version_info[:3]))
    assert corpus.version == stdlib.version == f'py{python}-{stdlib_text.VERSION}'
    assert (corpus.name, corpus.languages, corpus.splits) == ('stdlib', (), stdlib_text.SPLITS)
    assert not (tmp_path / 'data').exists()
