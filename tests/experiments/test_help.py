"""--help says all that a script can be told."""

import pytest

from qkattn.config import Config, Study
from qkattn.config.setting import settings
from qkattn.convert.conversions import CONVERSIONS
from qkattn.jobs.cli import shipped

SCRIPTS = [name for name in shipped('experiments') if not name.startswith('_')]


def entries(text):
    """What follows each --flag up to the next one, as one line."""
    heads = [part.partition(':') for part in f'\n{text}'.split('\n  --')[1:]]
    return {name: ' '.join(rest.split('\n\n')[0].split()) for name, _, rest in heads}


@pytest.mark.parametrize('name', SCRIPTS)
def test_every_flag_has_a_type_and_a_default(script_here, name):
    done = script_here(name, '--help')
    assert done.returncode == 0 and not done.stderr
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith('python -m '))
    found = entries(done.stdout)
    assert found and all('; default ' in about for about in found.values())
    assert ('config' in found) == (name in ('train', 'ablate', 'prepare_data'))


def test_a_short_flag_shows_the_same(script_here):
    assert script_here('train', '-h').stdout == script_here('train', '--help').stdout


@pytest.mark.parametrize(('name', 'kind'), [('train', Config), ('ablate', Study)])
def test_every_field_has_type_bounds_default_and_description(script_here, name, kind):
    done = script_here(name, '--help')
    found, fields = entries(done.stdout), settings(kind)
    assert len(fields) > 60
    for field, setting in fields.items():
        head, _, rest = found[f'config.{field}'].partition('; default ')
        assert rest == f'{setting.default!r} {" ".join(setting.doc.split())}'
        assert head
    prefix = 'config.base.' if kind is Study else 'config.'
    assert found[f'{prefix}model.num_kv_heads'].startswith('int or None, at least 1')
    assert found[f'{prefix}model.dropout'].startswith('float, at least 0 and below 1; default 0.0')
    assert found[f'{prefix}trials.seeds'].startswith('tuple of int, at least 0 and below')
    assert found[f'{prefix}model.norm'].startswith("'layernorm' or 'rmsnorm'; default 'layernorm'")
    assert f'\n{prefix}model: A transformer.\n' in done.stdout


def test_conversions_are_listed_on_a_line_each(script_here):
    text = script_here('convert', '--help').stdout
    starts = {line.split(':')[0].strip() for line in text.splitlines()}
    for name, conversion in CONVERSIONS.items():
        assert name in starts and f'{name}: {conversion.summary}' in ' '.join(text.split())
