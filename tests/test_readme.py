"""What the README shows is what the project does."""

import csv
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qkattn.config import Study, from_config_dict
from qkattn.errors import ConfigError
from qkattn.model.sites import validate
from qkattn.study import catalogue
from qkattn.study.arms import build_arms

ROOT = Path(__file__).parents[1]
README = (ROOT / 'README.md').read_text()


def between(begin: str, end: str) -> str:
    assert README.count(begin) == 1, begin
    return README.split(begin)[1].split(end)[0].strip()


def test_the_tables_are_generated():
    assert between(catalogue.BEGIN, catalogue.END) == catalogue.markdown().strip()


@pytest.fixture
def example(tmp_path, monkeypatch):
    code = between('<!-- example: signed_diagonal.py -->\n```python', '```')
    (tmp_path / 'signed_diagonal.py').write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield 'signed_diagonal:SignedDiagonal'
    sys.modules.pop('signed_diagonal', None)


def test_the_example_takes_part_in_a_study(example):
    (arm,) = build_arms(Study(variants=(f'{example}/vo',)))
    assert abs(arm.match.residual) <= 1e-3


def test_the_example_keeps_the_contract(example, tmp_path):
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', 'tests/attention/test_contract.py']
        + ['-p', 'no:cacheprovider', f'--cell={example}/vo'],
        cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), str(tmp_path)])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    assert 'contract suite: 1 cells run' in done.stdout


def test_every_path_and_module_that_it_names_exists():
    for path in re.findall(r'`((?:qkattn|experiments|configs|tests|launch)/[\w./]*)`', README):
        assert (ROOT / path).exists(), path
    for module in re.findall(r'-m (experiments\.\w+)', README):
        assert importlib.util.find_spec(module), module
    for image in re.findall(r'!\[[^]]*\]\(([^)]+)\)', README):
        assert (ROOT / image).exists(), image


@pytest.mark.parametrize('path', sorted((ROOT / 'configs').glob('*.py')), ids=lambda p: p.stem)
def test_every_config_is_valid(path):
    namespace: dict = {}
    exec(compile(path.read_text(), path, 'exec'), namespace)
    config = from_config_dict(namespace['get_config']())
    try:
        build_arms(config) if isinstance(config, Study) else validate(config)
    except ConfigError as error:
        pytest.fail(str(error))
    assert namespace['__doc__']


RESULTS = ROOT / 'experiments/results'


def recipe(config: str) -> str:
    """The line of the README's table of recipes."""
    (line,) = [x for x in README.splitlines() if x.startswith(f'| `configs/{config}.py`')]
    return line


def rows_of_table(study_name: str) -> dict[str, dict[str, str]]:
    lines = (RESULTS / study_name / 'table.csv').read_text().splitlines()
    return {row['variant']: row for row in csv.DictReader(lines)}


def test_the_character_model_is_as_good_as_its_log_says():
    (result,) = json.loads((RESULTS / 'char_lm_cpu/result.json').read_text())
    assert f'**{result["val_loss"]:.4f}** nats' in recipe('char_lm_cpu')
    assert f'{result["parameters"]["total"]:,} weights' in recipe('char_lm_cpu')


def test_the_translator_is_as_good_as_its_log_says():
    lines = (RESULTS / 'multi30k_tiny/scores.jsonl').read_text().splitlines()
    scores = {score['step']: score for score in map(json.loads, lines)}
    assert f'**{scores[4000]["bleu"]:.2f}** at step 4,000' in recipe('multi30k_tiny')
    assert f'{scores[3500]["bleu"]:.2f} at step 3,500' in recipe('multi30k_tiny')
    assert scores[4000]['bleu_signature'].startswith('nrefs:1|case:lc|eff:no|tok:13a')
    table = (RESULTS / 'multi30k_tiny/README.md').read_text()
    assert ' | '.join(f'{score["bleu"]:.2f}' for score in scores.values()) in table


@pytest.mark.parametrize(
    ('study_name', 'variants'),
    [
        ('mlm_small', ['shared_qk/vo']),
        (
            'translation_small',
            [f'qk/vo?encoder_variant={cell}' for cell in ('shared_qk/vo', 'qk/no_v', 'qk/no_o')],
        ),
    ],
)
def test_differences_are_those_of_the_tables(study_name, variants):
    rows = rows_of_table(study_name)
    for variant in variants:
        mean, low, high = (
            float(rows[variant][f'difference_{name}']) for name in ('mean', 'low', 'high')
        )
        assert f'{mean:+.3f} [{low:+.3f}, {high:+.3f}]' in recipe(study_name), variant


def test_accuracies_of_the_control_are_those_of_its_table():
    rows = rows_of_table('direction')
    for variant in ('qk/vo', 'symmetric/vo', 'shared_qk/vo'):
        said = f'{float(rows[variant]["test_accuracy_mean"]):.1%}'.replace('%', ' %')
        assert f'`{variant}` {said}' in recipe('direction'), (variant, said)
