"""What README.md and docs/ show is what the project does."""

import ast
import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from absl import flags

from qkattn.attention import SCORES, VALUES
from qkattn.config import Config, ModelConfig, Study
from qkattn.config.setting import settings
from qkattn.config.variant import Variant
from qkattn.jobs import cli
from qkattn.model.sites import validate
from qkattn.study import variant_catalogue, variant_tables
from qkattn.study.arms import build_arms
from qkattn.train.optimizer import check_optimizer
from tests.attention import examples  # noqa: F401, makes the modules of docs/extend.md importable
from tests.experiments.conftest import added_flags_removed
from tests.lanes import slow_except
from tests.launch.launchers import launch_here
from tests.processes import ROOT

README = (ROOT / 'README.md').read_text()
VARIANTS = (ROOT / 'docs/variants.md').read_text()
NAMES = ('README.md', 'CONTRIBUTING.md', 'CHANGELOG.md')
PAGES = [*(ROOT / name for name in NAMES), *sorted(ROOT.glob('docs/*.md'))]


def between(text: str, begin: str, end: str) -> str:
    assert text.count(begin) == 1, begin
    return text.split(begin)[1].split(end)[0].strip()


def test_stored_measurements_of_variants_are_up_to_date():
    measured = variant_catalogue.measured()
    assert json.loads(json.dumps(measured)) == variant_tables.stored()


def test_every_registered_score_and_value_is_documented():
    documented_variants = variant_catalogue.documented_variants()
    documented_scores = {score for score, _ in documented_variants}
    documented_values = {value for _, value in documented_variants}
    assert documented_scores >= set(SCORES)
    assert documented_values >= set(VALUES)


def test_the_page_of_variants_has_the_generated_table():
    generated = variant_tables.markdown(variant_tables.stored()).strip()
    begin = '<!-- catalogue: python -m experiments.variants --markdown -->'
    assert between(VARIANTS, begin, '<!-- end -->') == generated


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The score of the README's example, importable as 'signed_diagonal:SignedDiagonal'."""
    code = between(README, '<!-- example: signed_diagonal.py -->\n```python', '```')
    (tmp_path / 'signed_diagonal.py').write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield 'signed_diagonal:SignedDiagonal'
    sys.modules.pop('signed_diagonal', None)


@pytest.mark.slow
def test_the_example_passes_the_contract_tests(example, tmp_path):
    """The example of the README passes the tests that every attention variant must pass.

    `example` is the import path of its class, in a module in `tmp_path`.
    """
    tests = 'tests/attention/test_contract.py'
    options = ['-q', '-p', 'no:cacheprovider', f'--variant={example}/vo']
    python_path = os.pathsep.join([str(ROOT), str(tmp_path)])

    finished = subprocess.run(
        [sys.executable, '-m', 'pytest', tests, *options],
        cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': python_path},
        capture_output=True,
        text=True,
        timeout=600,
    )

    assert finished.returncode == 0, finished.stdout
    # At least ten tests have passed.
    assert re.search(r'\d\d passed', finished.stdout)


def test_every_path_that_a_page_names_exists():
    named = re.compile(r'`((?:qkattn|examples|experiments|configs|tests|launch|docs)/[\w./]*)`')
    for page in PAGES:
        for path in named.findall(page.read_text()):
            assert (ROOT / path).exists(), (page, path)


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page: those that GitHub makes from headings, and the IDs of <a> tags.

    The first heading 'Use a layer' has the anchor 'use-a-layer'. A second such heading has
    'use-a-layer-1'.
    """
    # In blocks of code, a line that begins with # is no heading.
    without_code = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.M | re.S)
    headings = re.findall(r'^#{1,6} +(.+?)[ #]*$', without_code, re.M)

    num_seen: Counter[str] = Counter()
    # A line such as <a id="name"></a> also makes an anchor.
    anchors_of_page = set(re.findall(r'^<a id="([\w-]+)"></a>$', without_code, re.M))
    for heading in headings:
        text = re.sub(r'\[([^]]*)\]\([^)]*\)', r'\1', heading)  # [text](target) -> text
        without_punctuation = re.sub(r'[^\w\- ]', '', text.lower())
        anchor = without_punctuation.replace(' ', '-')
        is_repeated = anchor in num_seen
        anchors_of_page.add(f'{anchor}-{num_seen[anchor]}' if is_repeated else anchor)
        num_seen[anchor] += 1
    return anchors_of_page


def test_every_link_leads_to_a_file_and_to_a_heading_in_it():
    """A link [text](path#anchor) on a page names an existing file, and an anchor in this file.

    For example, the heading 'Use a layer' has the anchor 'use-a-layer'.
    """
    path_and_anchor = re.compile(r'\]\(([^)#]*)#?([^)]*)\)')
    for page in PAGES:
        for path, anchor in path_and_anchor.findall(page.read_text()):
            if path.startswith('https://'):
                continue
            # A link without a path, such as [text](#anchor), leads to the same page.
            target = page.parent / path if path else page
            assert target.exists(), (page, path)
            if anchor:
                # Only pages have anchors.
                assert target.suffix == '.md', (page, path, anchor)
                assert anchor in anchors(target), (page, path, anchor)


def test_every_registry_that_contributors_need_exists():
    text = (ROOT / 'CONTRIBUTING.md').read_text()
    registries = re.findall(r'`(\w+)` in `(qkattn/[\w./]+\.py)`', text)
    assert len(registries) >= 10
    for name, path in registries:
        source = (ROOT / path).read_text()
        definition = rf'^(class |def )?{name}\b'
        assert re.search(definition, source, re.M), (name, path)


TABLE_FROM_ELSEWHERE = re.compile(
    r'^\| there.* \| here \|\n\|---\|---\|\n((?:\|.*\n)+)',
    re.MULTILINE,
)


def codes_here() -> set[str]:
    """The code in the column 'here' of the tables of docs/from_elsewhere.md."""
    text = (ROOT / 'docs/from_elsewhere.md').read_text()
    codes: set[str] = set()
    for rows in TABLE_FROM_ELSEWHERE.findall(text):
        for row in rows.splitlines():
            _, _there, here, *_ = row.split('|')
            codes.update(re.findall(r'`([^`]+)`', here))
    return codes


def config_with(name: str, value: str) -> Config:
    """Returns the default config with one setting changed.

    Args:
        name: Section and field of the setting, such as 'train.num_steps'.
        value: The text of the value, such as '100' for 100. If the text is no Python literal, such
            as 'muon', the value is the text itself.
    """
    section_name, field = name.split('.')
    with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(value)

    config = Config()
    section = dataclasses.replace(getattr(config, section_name), **{field: value})
    return dataclasses.replace(config, **{section_name: section})


def is_flag(code: str) -> bool:
    return code.startswith('--')


def is_variant(code: str) -> bool:
    """Whether the code is a variant, such as 'qk/vo', or a part of one, 'low_rank(rank=8)'."""
    name = code.partition('=')[0]
    return not is_flag(code) and ('/' in name or '(' in name)


CODES = sorted(codes_here())
FLAGS = [code for code in CODES if is_flag(code)]
VARIANTS_HERE = [code for code in CODES if is_variant(code)]
SETTINGS = [code for code in CODES if not is_flag(code) and not is_variant(code)]


def test_there_are_tables_for_users_of_other_codebases():
    assert len(CODES) > 50


@pytest.mark.parametrize('code', FLAGS)
def test_a_flag_named_for_users_of_other_codebases_exists(code):
    name = code.partition('=')[0].removeprefix('--')
    with added_flags_removed():
        runpy.run_module('experiments.train')
        assert name in flags.FLAGS


@pytest.mark.parametrize('code', VARIANTS_HERE)
def test_a_variant_named_for_users_of_other_codebases_is_valid(code):
    variant = Variant.parse(code)
    positions = 'rope' if 'rope_size' in code else 'learned'
    model = ModelConfig(**variant._asdict(), positions=positions)
    validate(Config(model=model))


@pytest.mark.parametrize('code', SETTINGS)
def test_a_setting_named_for_users_of_other_codebases_is_valid(code):
    name, has_value, value = code.partition('=')
    assert name in settings(Config)
    if has_value:
        config = config_with(name, value)
        validate(config)
        check_optimizer(config.optimizer, config.train.num_steps)


# Commands: every line of every ```sh block

OTHER_COMMANDS = (
    'git clone ',  # of this repository
    'launch/quickstart.sh',  # tests/test_setup.py; log in experiments/results/quickstart
    'launch/test.sh',
    'launch/docs.sh',  # .ci/run
    'launch/check_wheel.sh',  # .github/workflows/release.yml
    '.venv/bin/python -m pytest ',  # the example runs above
    '.venv/bin/python -m mypy',
    '.venv/bin/python -m ruff ',
)


def commands() -> list[str]:
    """Returns the commands in all ```sh blocks of the pages, without comments.

    Lines that end with a backslash are joined with the next line.
    """
    commands_of_pages = []
    for page in PAGES:
        if page.name == 'tutorial.md':
            continue  # tests/test_tutorial.py runs its commands
        blocks = re.findall(r'```sh\n(.*?)```', page.read_text(), re.S)
        for block in blocks:
            lines = block.replace('\\\n', ' ').splitlines()
            for line in lines:
                words = shlex.split(line, comments=True)
                if words:  # the line is neither empty nor a comment
                    commands_of_pages.append(shlex.join(words))
    return commands_of_pages


def started_by(launcher: str) -> str:
    """Returns the command that a launcher would start, after a dry run of the launcher.

    For example, 'launch/local.py -- train --config=small' gives
    '.venv/bin/python -m experiments.train --config=small'. The result is '' if the launcher starts
    no script.
    """
    head, separator, started = launcher.partition(' -- ')
    path, *flags_of_launcher = shlex.split(head)
    command = ['--', *shlex.split(started)] if separator else []
    name = Path(path).stem
    done = launch_here(name, *flags_of_launcher, '--dry_run', *command, env={**os.environ})
    assert done.returncode == 0, done.stderr
    return f'.venv/bin/python -m experiments.{started}' if started else ''


@functools.cache
def check_trains(config: Config | Study) -> None:
    """Raises ConfigError where a run cannot train, or the arms of a study cannot be built."""
    if isinstance(config, Study):
        build_arms(config)
    else:
        validate(config)


@pytest.mark.parametrize('build', slow_except([False], [False, True]), ids=['parsed', 'built'])
def test_every_command_is_accepted(example, outside, monkeypatch, build):
    """Every command that a page shows has flags and settings that its script accepts.

    Commands are parsed, not run. With `build`, the settings of a run are also validated, and the
    arms of a study are built. An arm is a variant with as many parameters as the baseline.
    """
    monkeypatch.chdir(ROOT)
    scripts = set()
    for command in commands():
        # A launcher starts a script on another machine. `started_by` returns the command of this
        # script, which is checked instead. It returns '' if the launcher starts no script.
        if re.match(r'launch/\w+\.py ', command):
            command = started_by(command)
            if not command:
                continue
        match = re.match(r'\.venv/bin/python -m experiments\.(\w+)', command)
        if match is None:
            # Known commands of other programs, such as `git clone`, are not checked here.
            assert command.startswith(OTHER_COMMANDS), command
            continue

        name = match[1]
        scripts.add(name)
        _python, _m, _module, *arguments = shlex.split(command)
        # Scripts read overrides of settings from sys.argv.
        monkeypatch.setattr(sys, 'argv', [name, *arguments])
        with added_flags_removed():
            script = runpy.run_module(f'experiments.{name}')  # defines its flags
            not_parsed = flags.FLAGS(sys.argv)
            assert not_parsed == [name], command
            if name in ('ablate', 'train'):
                config = cli.read_config(script['CONFIG'])
                if build:
                    check_trains(config)

    # The pages show each script of the package at least once.
    assert scripts == cli.shipped('experiments').keys()


@pytest.mark.parametrize('path', sorted((ROOT / 'configs').glob('*.py')), ids=lambda p: p.stem)
def test_every_config_is_valid(path):
    namespace = runpy.run_path(str(path))
    config = namespace['get_config']()
    check_trains(config)

    script = 'ablate' if isinstance(config, Study) else 'train'
    docstring = namespace['__doc__']
    assert f'-m experiments.{script} --config=configs/{path.name}' in docstring
    assert 'Expected' in docstring
    assert '\nTime: ' in docstring


def lines_shown_by(source: str, namespace: dict[str, Any]) -> list[str]:
    """Runs a cell of a notebook, and returns the lines that the notebook shows below it.

    The cell shows what it prints. If its last statement is an expression, it also shows its value.

    Args:
        source: The code of the cell.
        namespace: The global names of the notebook, which the cell may read and change.
    """
    tree = ast.parse(source)
    last_statement = tree.body[-1]
    has_value = isinstance(last_statement, ast.Expr)
    if has_value:
        # The last statement becomes the assignment `value = expression`.
        target = ast.Name('value', ast.Store())
        tree.body[-1] = ast.Assign([target], last_statement.value)
    code = compile(ast.fix_missing_locations(tree), 'cell', 'exec')

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, namespace)
        value = namespace.pop('value') if has_value else None
        if value is not None:
            print(repr(value))
    return printed.getvalue().splitlines()


def stored_lines(cell: dict[str, Any]) -> list[str]:
    """The lines of text in the stored output of a cell."""
    lines = []
    for output in cell['outputs']:
        text = output.get('text') or output['data'].get('text/plain', [])
        lines += [line.rstrip('\n') for line in text]
    return lines


@pytest.mark.slow
@pytest.mark.stored
def test_the_notebook_prints_its_stored_text():
    notebook = json.loads((ROOT / 'docs/notebook.ipynb').read_text())
    namespace: dict[str, Any] = {}
    for cell in notebook['cells']:
        if cell['cell_type'] == 'code':
            source = ''.join(cell['source'])
            assert lines_shown_by(source, namespace) == stored_lines(cell)
    assert plt.get_fignums(), 'the last cell draws'
    plt.close('all')
