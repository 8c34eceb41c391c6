import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from qkattn.config import DataConfig
from qkattn.data import pipeline
from qkattn.data.corpora import stdlib_text
from qkattn.data.load import load
from qkattn.data.tasks.language import LanguageRows
from tests.processes import start_python

ROOT = Path(sysconfig.get_path('stdlib'))


def test_corpus_is_the_library_without_tests_and_tables():
    paths = stdlib_text.module_paths(ROOT)
    assert {'json/decoder.py', 'argparse.py', 'asyncio/tasks.py'} <= set(paths)
    assert paths == sorted(paths)
    left_out = {'test', 'tests', 'encodings', 'tkinter', 'idlelib', 'pydoc_data', 'site-packages'}
    assert not [path for path in paths if left_out & set(path.split('/'))]
    assert not [path for path in paths if '_sysconfigdata' in path]
    assert len(paths) > 200


def test_no_library_on_disk_is_one_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match='holds no source files'):
        stdlib_text.module_paths(tmp_path)


def test_splits_are_about_90_5_5_and_follow_the_module_name():
    splits = [stdlib_text.split_of(f'module_{i}.py') for i in range(4000)]
    assert 0.88 < splits.count('train') / 4000 < 0.92
    assert 0.04 < splits.count('validation') / 4000 < 0.06
    assert 0.04 < splits.count('test') / 4000 < 0.06
    for i in range(100):
        assert stdlib_text.split_of(f'm{i}.py') == stdlib_text.split_of(f'm{i}/__init__.py')
    # The same in every version of the package and of Python, or published results lose meaning.
    assert stdlib_text.split_of('json/decoder.py') == 'train'
    assert stdlib_text.split_of('http/client.py') == 'validation'
    assert stdlib_text.split_of('json/tool.py') == 'test'


@pytest.mark.parametrize('split', stdlib_text.SPLITS)
def test_tokens_are_the_bytes_of_the_files_of_a_split_in_order(stdlib, split):
    paths = [p for p in stdlib_text.module_paths(ROOT) if stdlib_text.split_of(p) == split]
    expected = b''.join((ROOT / path).read_bytes() + b'\0' for path in paths)
    assert paths and stdlib.split(split).tobytes() == expected


def test_version_names_the_interpreter_and_the_selection(stdlib):
    python = '.'.join(map(str, sys.version_info[:3]))
    assert stdlib.version == f'py{python}-{stdlib_text.VERSION}'


RACE = """
    import json, sys, time
    from pathlib import Path
    from qkattn.config import DataConfig
    from qkattn.data import pipeline
    from qkattn.data.load import load
    from qkattn.data.tasks.language import LanguageRows
    root = Path(sys.argv[1])
    print('ready', flush=True)
    while not (root / 'go').exists():
        time.sleep(0.001)
    dataset = load(DataConfig(data_dir=sys.argv[1]))
    batch = pipeline.train_batch(LanguageRows(dataset, 64), seed=3, step=12345, batch_size=4)
    tokens = batch['targets_BT'].tolist()
    print(json.dumps([dataset.identity(), tokens, 'tensorflow' in sys.modules]))
"""


def test_processes_that_race_for_an_empty_directory_read_the_same(stdlib, tmp_path):
    processes = [start_python(RACE, tmp_path) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == 'ready\n', process.communicate()
    (tmp_path / 'go').touch()
    batch = pipeline.train_batch(LanguageRows(stdlib, 64), seed=3, step=12345, batch_size=4)
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        # The rest of standard output, so preparation prints nothing there.
        assert json.loads(out) == [stdlib.identity(), batch['targets_BT'].tolist(), False]


KILLED = """
import os, sys
from qkattn.config import DataConfig
from qkattn.data.corpora import stdlib_text
from qkattn.data.load import load

def dies(root, paths):
    yield b'half'
    os._exit(9)

stdlib_text._texts = dies
load(DataConfig(data_dir=sys.argv[1]))
"""


def test_killed_preparation_is_done_again(stdlib, tmp_path):
    killed = subprocess.run([sys.executable, '-c', KILLED, str(tmp_path)], timeout=120)
    assert killed.returncode == 9
    assert load(DataConfig(data_dir=str(tmp_path))).identity() == stdlib.identity()
