"""The commands of docs/tutorial.md, run in a clone with a generated text and tiny settings."""

import os
import random
import re
import shlex
import shutil
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.launchers import write_program
from tests.processes import GIT_IDENTITY, ROOT, git

PAGE = (ROOT / 'docs/tutorial.md').read_text()
# The commands of the page, with continuation lines joined.
COMMANDS = [
    shlex.join(shlex.split(command))
    for block in re.findall(r'```sh\n(.*?)```', PAGE, re.S)
    for command in block.replace('\\\n', ' ').splitlines()
]
# Settings of a study that is trained within seconds.
TINY = (
    '--config.sizes=("d_model=16",)',
    '--config.base.train.num_steps=20',
    '--config.base.train.eval_every=10',
    '--config.base.optimizer.warmup_steps=2',
    '--config.base.model.context=16',
    '--config.base.trials.seeds=(0,1,2)',
    '--config.tuning.max_points=3',
    '--config.tuning.max_seeds=2',
    '--config.tolerance=0.2',
)


def blocks(marker: str) -> list[str]:
    """The code blocks that follow a comment `<!-- marker -->`."""
    return re.findall(rf'<!-- {marker} -->\n```\w+\n(.*?)\n```', PAGE, re.S)


def test_the_config_on_the_page_is_the_file():
    (shown,) = blocks('config: configs/speeches.py')
    assert shown in (ROOT / 'configs/speeches.py').read_text()


@pytest.fixture(scope='module')
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A clone of this repository, and next to it a text in place of the downloaded one.

    The clone has one commit of all files, and the program .venv/bin/python. The text, plays.txt,
    has random short speeches instead of Shakespeare's plays.
    """
    if not (ROOT / '.git').exists() or shutil.which('git') is None:
        pytest.skip('the files of the clone are those that git knows')

    # Files are copied, because `git clone` would leave out changes that are not committed yet.
    clone = tmp_path_factory.mktemp('tutorial') / 'qkattn'
    copy_files(clone)
    # A study gives verdicts only if its code is committed.
    git(clone, 'init')
    git(clone, 'add', '--all')
    git(clone, 'commit', '--message=all')

    # Commands of the tutorial call .venv/bin/python. Here it runs the Python of the tests.
    call_this_python = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
    write_program(clone / '.venv/bin/python', call_this_python)

    plays = clone.parent / 'plays.txt'
    plays.write_text(random_speeches())

    yield clone

    shutil.rmtree(clone)


def copy_files(directory: Path) -> None:
    """Copies the files of the repository, with changes that are not committed yet."""
    listed = git(ROOT, 'ls-files', '--cached', '--others', '--exclude-standard')
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)


def random_speeches() -> str:
    """2500 speeches of 20 words each, out of 500 random words."""
    generator = random.Random(0)
    words = [''.join(generator.choices(string.ascii_lowercase, k=5)) for _ in range(500)]
    speeches = [' '.join(generator.choices(words, k=20)) for _ in range(2500)]
    return ''.join(f'{speech}.\n\n' for speech in speeches)


def run(directory: Path, command: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of the tutorial, with further flags, for at most ten minutes.

    `directory` is a clone of this repository. The command imports the modules of the clone.
    """
    environment = {**os.environ, **GIT_IDENTITY, 'PYTHONPATH': str(directory)}
    return subprocess.run(
        [*shlex.split(command), *flags],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def one_line(text: str) -> str:
    return ' '.join(text.split())


@pytest.mark.slow
def test_a_plan_prints_what_the_page_shows(clone):
    """The first commands of the tutorial print what the page shows.

    The download before them is not run. One command copies a config, and another plans a study with
    a mistake, which is refused. The last one plans the study without the mistake.
    """
    _download, copy, plan_with_error, plan = COMMANDS[:4]
    copied = run(clone, copy)
    assert copied.returncode == 0
    refused = run(clone, plan_with_error)
    assert refused.returncode == 2  # wrong settings
    planned = run(clone, plan)
    assert planned.returncode == 0, planned.stderr

    # On the page, the comment `<!-- warned -->` marks the text of the warning.
    (warning,) = blocks('warned')
    assert warning in planned.stderr

    # The page may break lines at other places.
    printed_text = f'{one_line(refused.stderr)} {one_line(planned.stdout)}'
    for shown_text in blocks('printed by the dry run'):
        assert one_line(shown_text) in printed_text


@pytest.mark.slow
def test_every_command_of_the_page_runs(clone):
    """All commands of the tutorial succeed, except for the mistake that the page shows.

    Commands that train a study also get the settings `TINY`, so that training takes seconds.
    """
    download, *other_commands = COMMANDS
    assert download.startswith('curl ')  # not run, because the fixture `clone` has a text

    for command in other_commands:
        trains = '--workdir=' in command
        flags = TINY if trains else ()
        finished = run(clone, command, *flags)
        # The page shows this mistake, which is refused with the exit code 2.
        is_mistake = 'documents=None' in command
        expected_exit_code = 2 if is_mistake else 0
        output = (command, finished.stdout, finished.stderr)
        assert finished.returncode == expected_exit_code, output

    # The study has been trained, and its report has been written.
    assert (clone / 'runs/speeches/report.html').exists()
    assert (clone / 'runs/speeches/plots').is_dir()
