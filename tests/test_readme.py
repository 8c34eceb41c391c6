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


def test_tables_of_variants_are_generated():
    # The stored measurements of all variants are those that would be measured now.
    stored = variant_tables.stored()
    assert json.loads(json.dumps(variant_catalogue.measured())) == stored

    # Every registered score and value is documented.
    scores, values = map(set, zip(*variant_catalogue.documented_variants(), strict=True))
    assert scores >= {*SCORES}
    assert values >= {*VALUES}

    # The page has the table that is written from them.
    made = variant_tables.markdown(stored).strip()
    begin = '<!-- catalogue: python -m experiments.variants --markdown -->'
    assert between(VARIANTS, begin, '<!-- end -->') == made


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Import path of the score of the README's example."""
    code = between(README, '<!-- example: signed_diagonal.py -->\n```python', '```')
    (tmp_path / 'signed_diagonal.py').write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield 'signed_diagonal:SignedDiagonal'
    sys.modules.pop('signed_diagonal', None)


@pytest.mark.slow
def test_the_example_passes_the_contract_tests(example, tmp_path):
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', 'tests/attention/test_contract.py']
        + ['-p', 'no:cacheprovider', f'--variant={example}/vo'],
        cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), str(tmp_path)])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r'\d\d passed', done.stdout)


def test_every_path_that_a_page_names_exists():
    named = re.compile(r'`((?:qkattn|examples|experiments|configs|tests|launch|docs)/[\w./]*)`')
    for page in PAGES:
        for path in named.findall(page.read_text()):
            assert (ROOT / path).exists(), (page, path)


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    slugs: list[str] = []
    text = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.M | re.S)
    for title in re.findall(r'^#{1,6} +(.+?)[ #]*$', text, re.M):
        shown = re.sub(r'\[([^]]*)\]\([^)]*\)', r'\1', title)  # a link shows its text
        slugs.append(re.sub(r'[^\w\- ]', '', shown.lower()).replace(' ', '-'))
    seen: Counter[str] = Counter()
    numbered = set()
    for slug in slugs:
        numbered.add(f'{slug}-{seen[slug]}' if seen[slug] else slug)
        seen[slug] += 1
    return numbered


def test_every_link_leads_to_a_file_and_to_a_heading_in_it():
    for page in PAGES:
        for path, anchor in re.findall(r'\]\(([^)#]*)#?([^)]*)\)', page.read_text()):
            if path.startswith('https://'):
                continue
            target = page.parent / path if path else page
            assert target.exists(), (page, path)
            if anchor:
                assert target.suffix == '.md' and anchor in anchors(target), (page, path, anchor)


def test_every_registry_that_contributors_need_exists():
    text = (ROOT / 'CONTRIBUTING.md').read_text()
    named = re.findall(r'`(\w+)` in `(qkattn/[\w./]+\.py)`', text)
    assert len(named) >= 10
    for name, path in named:
        source = (ROOT / path).read_text()
        assert re.search(rf'^(class |def )?{name}\b', source, re.M), (name, path)


def codes_here() -> set[str]:
    """The code in the column 'here' of the tables of docs/from_elsewhere.md."""
    text = (ROOT / 'docs/from_elsewhere.md').read_text()
    codes = set()
    for table in re.findall(r'^\| there.* \| here \|\n\|---\|---\|\n((?:\|.*\n)+)', text, re.M):
        for row in table.splitlines():
            codes |= {*re.findall(r'`([^`]+)`', row.split('|')[2])}
    return codes


def config_with(name: str, value: str) -> Config:
    """The default settings with one of them changed; the value is Python, or text as it is."""
    section_name, field = name.split('.')
    with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(value)
    section = dataclasses.replace(getattr(Config(), section_name), **{field: value})
    return dataclasses.replace(Config(), **{section_name: section})


def test_there_are_tables_for_users_of_other_codebases():
    assert len(codes_here()) > 50


@pytest.mark.parametrize('code', sorted(codes_here()))
def test_a_setting_or_flag_that_users_of_other_codebases_are_told_exists(code):
    """A cell holds settings, with values or without, variants and flags."""
    name, has_value, value = code.partition('=')
    if name.startswith('--'):
        with added_flags_removed():
            runpy.run_module('experiments.train')
            assert name[2:] in flags.FLAGS
    elif '/' in name or '(' in name:
        variant = Variant.parse(code)
        positions = 'rope' if 'rope_size' in code else 'learned'
        validate(Config(model=ModelConfig(**variant._asdict(), positions=positions)))
    else:
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
    """Every command of every page, its continuation lines joined."""
    # tests/test_tutorial.py types those of the tutorial.
    pages = [page for page in PAGES if page.name != 'tutorial.md']
    blocks = [b for page in pages for b in re.findall(r'```sh\n(.*?)```', page.read_text(), re.S)]
    lines = '\n'.join(blocks).replace('\\\n', ' ').splitlines()
    stripped = [shlex.join(shlex.split(line, comments=True)) for line in lines]
    return [x for x in stripped if x]


def started_by(launcher: str) -> str:
    """The command that a launcher starts, after a dry run; '' where it starts none."""
    head, separator, started = launcher.partition(' -- ')
    path, *flags = shlex.split(head)
    behind = ['--', *shlex.split(started)] if separator else []
    done = launch_here(Path(path).stem, *flags, '--dry_run', *behind, env={**os.environ})
    assert done.returncode == 0, done.stderr
    return started and f'.venv/bin/python -m experiments.{started}'


@functools.cache
def check_trains(config: Config | Study) -> None:
    """Raises ConfigError where a run cannot train, or the arms of a study cannot be built."""
    build_arms(config) if isinstance(config, Study) else validate(config)


@pytest.mark.parametrize('build', slow_except([False], [False, True]), ids=['parsed', 'built'])
def test_every_command_is_accepted(example, outside, monkeypatch, build):
    """The scripts' own parsers parse the flags; settings and arms may also be built."""
    monkeypatch.chdir(ROOT)
    scripts = set()
    for command in commands():
        if re.match(r'launch/\w+\.py ', command):
            command = started_by(command)
        match = re.match(r'\.venv/bin/python -m experiments\.(\w+)', command)
        if not match:
            assert not command or command.startswith(OTHER_COMMANDS), command
            continue
        scripts.add(match[1])
        # Overrides of settings are read from sys.argv.
        monkeypatch.setattr(sys, 'argv', [match[1], *shlex.split(command)[3:]])
        with added_flags_removed():
            script = runpy.run_module(f'experiments.{match[1]}')
            assert len(flags.FLAGS(sys.argv)) == 1, command
            if match[1] in ('ablate', 'train'):
                config = cli.read_config(script['CONFIG'])
                if build:
                    check_trains(config)
    assert scripts == cli.shipped('experiments').keys()


@pytest.mark.parametrize('path', sorted((ROOT / 'configs').glob('*.py')), ids=lambda p: p.stem)
def test_every_config_is_valid(path):
    namespace = runpy.run_path(str(path))
    config = namespace['get_config']()
    check_trains(config)
    script = 'ablate' if isinstance(config, Study) else 'train'
    command = f'-m experiments.{script} --config=configs/{path.name}'
    assert all(part in namespace['__doc__'] for part in (command, 'Expected', '\nTime: '))


def lines_printed_by(source: str, namespace: dict[str, Any]) -> list[str]:
    """The lines that a cell prints, with the value of its last expression."""
    tree = ast.parse(source)
    if isinstance(last := tree.body[-1], ast.Expr):
        tree.body[-1] = ast.Assign([ast.Name('value', ast.Store())], last.value)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        exec(compile(ast.fix_missing_locations(tree), 'cell', 'exec'), namespace)
        if isinstance(last, ast.Expr) and (value := namespace.pop('value')) is not None:
            print(repr(value))
    return text.getvalue().splitlines()


@pytest.mark.slow
@pytest.mark.stored
def test_the_notebook_prints_its_stored_text():
    namespace: dict[str, Any] = {}
    for cell in json.loads((ROOT / 'docs/notebook.ipynb').read_text())['cells']:
        if cell['cell_type'] == 'code':
            texts = (o.get('text') or o['data'].get('text/plain', []) for o in cell['outputs'])
            stored = [line.rstrip('\n') for text in texts for line in text]
            assert lines_printed_by(''.join(cell['source']), namespace) == stored
    assert plt.get_fignums(), 'the last cell draws'
    plt.close('all')
