"""What README.md and docs/ show is what the project does."""

import dataclasses
import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

from qkattn.attention import SCORES, VALUES
from qkattn.config import Study, from_config_dict
from qkattn.data.tasks.task_registry import rows_of
from qkattn.errors import ConfigError
from qkattn.jobs import cli
from qkattn.model.sites import validate
from qkattn.report.printed_numbers import check_numbers
from qkattn.study import variant_tables
from qkattn.study.arms import build_arms
from tests.attention import examples
from tests.experiments.conftest import added_flags_removed

ROOT = Path(__file__).parents[1]
README = (ROOT / 'README.md').read_text()
VARIANTS = (ROOT / 'docs/variants.md').read_text()
RECIPES = (ROOT / 'docs/recipes.md').read_text()
PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted(ROOT.glob('docs/*.md'))]
SCRIPTS = (
    'ablate',
    'benchmark',
    'convert',
    'generate',
    'prepare_data',
    'report',
    'train',
    'translate',
)
SCRIPTS += ('analyze', 'claims', 'explore', 'variants', 'verify')


def between(text: str, begin: str, end: str) -> str:
    assert text.count(begin) == 1, begin
    return text.split(begin)[1].split(end)[0].strip()


def test_the_tables_are_generated():
    made = variant_tables.markdown(variant_tables.stored()).strip()
    assert between(VARIANTS, variant_tables.BEGIN, variant_tables.END) == made
    counted = re.search(r'There are (\d+) scores and values', README)
    assert int(counted[1]) == len(SCORES) + len(VALUES)


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 130


def example_code() -> str:
    return between(README, '<!-- example: signed_diagonal.py -->\n```python', '```')


@pytest.fixture
def example(tmp_path, monkeypatch):
    (tmp_path / 'signed_diagonal.py').write_text(example_code())
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
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
    assert 'contract tests: 1 variant run' in done.stdout


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.stem)
def test_every_path_that_a_page_names_exists(page):
    text = page.read_text()
    for path in re.findall(r'`((?:qkattn|experiments|configs|tests|launch|docs)/[\w./]*)`', text):
        assert (ROOT / path).exists(), path
    for link in re.findall(r'\]\(([^)#]+)\)', text):
        assert link.startswith('https://') or (page.parent / link).exists(), link


def test_examples_of_extensions_are_short():
    lengths = {name: len(source.splitlines()) for name, source in examples.SOURCES.items()}
    assert len(lengths) >= 5 and max(lengths.values()) <= 40, lengths


def test_every_registry_that_contributors_need_exists():
    text = (ROOT / 'CONTRIBUTING.md').read_text()
    named = re.findall(r'`(\w+)` in `(qkattn/[\w./]+\.py)`', text)
    assert len(named) >= 10
    for name, path in named:
        source = (ROOT / path).read_text()
        assert re.search(rf'^(class |def )?{name}\b', source, re.M), (name, path)


# Commands: every line of every ```sh block

OTHER_COMMANDS = (
    'git clone ',  # of this repository
    'launch/quickstart.sh',  # tests/test_setup.py; log in experiments/results/quickstart
    'launch/test.sh',
    '.venv/bin/python -m pytest ',  # the example runs above
    '.venv/bin/python -m mypy',
    '.venv/bin/python -m ruff ',
)


def commands() -> list[str]:
    """Every command of every page, its continuation lines joined."""
    blocks = [b for page in PAGES for b in re.findall(r'```sh\n(.*?)```', page.read_text(), re.S)]
    lines = '\n'.join(blocks).replace('\\\n', ' ').splitlines()
    stripped = [shlex.join(shlex.split(line, comments=True)) for line in lines]
    return [x.removeprefix('PYTHONPATH=. ') for x in stripped if x]


def started_by(launcher: str) -> str:
    """The command that a launcher starts, after a dry run; '' where it starts none."""
    own, separator, started = launcher.partition(' -- ')
    behind = ['--', *shlex.split(started)] if separator else []
    command = [sys.executable, *shlex.split(own), '--dry_run', *behind]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return started and f'.venv/bin/python -m experiments.{started}'


def test_every_command_is_accepted(example, outside, monkeypatch):
    """Flags are parsed by the scripts' own parsers; settings and arms are built and validated."""
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
            if match[1] == 'ablate':
                build_arms(cli.read_config(script['CONFIG']))
            if match[1] == 'train':
                validate(cli.read_config(script['CONFIG']))
    assert scripts == set(SCRIPTS)


TIME = (
    r'\nTime: (\d+|one|two|three|four|five|six|seven|ten)( and a half)? (seconds|minutes)\b|'
    r'\nTime: not measured: needs a GPU\.'
)


@pytest.mark.parametrize('path', sorted((ROOT / 'configs').glob('*.py')), ids=lambda p: p.stem)
def test_every_config_is_valid(path):
    namespace: dict = {}
    exec(compile(path.read_text(), path, 'exec'), namespace)
    config = from_config_dict(namespace['get_config']())
    try:
        build_arms(config) if isinstance(config, Study) else validate(config)
    except ConfigError as error:
        pytest.fail(str(error))
    script = 'ablate' if isinstance(config, Study) else 'train'
    for part in (f'-m experiments.{script} --config=configs/{path.name}', 'Expected', 'Time'):
        assert part in namespace['__doc__'], part
    assert re.search(TIME, namespace['__doc__'])


RESULTS = ROOT / 'experiments/results'
EMBEDDED = ['direction', 'fair_small', 'initialization', 'mlm_small', 'phrases']
EMBEDDED += ['query_free_recipe', 'quickstart', 'small', 'translation_small']


@pytest.mark.parametrize('name', EMBEDDED)
def test_a_tenth_of_the_work_is_evaluation_or_the_header_says_how_much(name, data_dir):
    """A token that is only evaluated costs a third of one that is trained on."""
    namespace = runpy.run_path(str(ROOT / f'configs/{name}.py'))
    config = from_config_dict(namespace['get_config']())
    base = config.base if isinstance(config, Study) else config
    base = dataclasses.replace(base, data=dataclasses.replace(base.data, data_dir=data_dir))
    rows, train = rows_of(base), base.train
    validation, test = (
        min(rows.count(split), base.data.eval_sequences or rows.count(split))
        for split in ('validation', 'test')
    )
    assert train.num_steps % train.eval_every == 0
    evaluated = (train.num_steps // train.eval_every * validation + test) / 3
    share = evaluated / (evaluated + train.num_steps * train.batch_size)
    fraction = re.search(r'an? (\w+) of\s+the\s+work\s+is\s+evaluation', namespace['__doc__'])
    if share > 0.1:
        assert (RESULTS / name).exists(), 'without results that rest on it, it can change'
        assert fraction[1] == {5: 'fifth', 6: 'sixth', 7: 'seventh', 8: 'eighth'}[round(1 / share)]
    else:
        assert fraction is None


def test_printed_numbers_are_those_of_their_logs():
    assert sum(check_numbers(ROOT / 'docs/numbers.toml').values()) >= 15


def test_recipes_are_those_of_logs_that_are_no_tables():
    log = (RESULTS / 'quickstart/log.txt').read_text()
    minutes, seconds = re.search(r'^user\s+(\d+)m([\d.]+)s$', log, re.M).groups()
    assert f'{minutes} min {float(seconds):.0f} s of processor time' in RECIPES

    for name in ('small', 'phrases'):
        log = (RESULTS / name / 'log.txt').read_text()
        times = dict(re.findall(r'^(real|user|sys)\s+(\d+m[\d.]+)s$', log, re.M))
        minutes = {kind: map(float, text.split('m')) for kind, text in times.items()}
        real, user, system = (60 * m + s for m, s in minutes.values())
        sentence = f'Time: {user + system:.0f} seconds of processor time; {real:.0f} seconds on two'
        assert sentence in (ROOT / f'configs/{name}.py').read_text()

    lines = (RESULTS / 'multi30k_tiny/scores.jsonl').read_text().splitlines()
    scores = {score['step']: score for score in map(json.loads, lines)}
    bleu = {step: f'{score["bleu"]:.2f}' for step, score in scores.items()}
    assert scores[4000]['bleu_signature'].startswith('nrefs:1|case:lc|eff:no|tok:13a')
    assert ' | '.join(bleu.values()) in (RESULTS / 'multi30k_tiny/README.md').read_text()
