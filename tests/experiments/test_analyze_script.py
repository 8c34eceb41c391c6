"""Runs, exported parameters and GPT-2 files measured from the command line; refusals."""

import json

import jax
import numpy as np
import pandas as pd
import pytest
from flax import nnx

from qkattn.config import ModelConfig
from qkattn.data.tasks.language import LanguageRows
from qkattn.model import build
from qkattn.train import exported
from tests.convert.test_published import make_tensors, write

SIZES = {'d_model': 16, 'num_layers': 2, 'num_heads': 2, 'context': 12, 'vocab_size': 257}


def succeed(done):
    assert done.returncode == 0, done.stderr
    return done.stdout


def save(path, **fields):
    config = ModelConfig(**{**SIZES, **fields})
    model = build(config, key=jax.random.key(0))
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    exported.save(path, config, params, origin={})


def test_a_run_is_measured_on_its_own_data_or_on_a_text(script_here, trained_run, tmp_path):
    (tmp_path / 'run').symlink_to(trained_run[1])
    printed = succeed(script_here('analyze', 'run'))
    assert printed.startswith('run: qk/vo, 1 layers\n') and 'attention 0' in printed
    flags = ('--text=def f(x):', '--reference=run', '--out=out')
    one = succeed(script_here('analyze', '--source=run', *flags))
    other = succeed(script_here('analyze', '--source=run', '--text=def f(x):', '--trial=1'))
    assert one != other and 'drift' not in other
    table = pd.read_csv(tmp_path / 'out/analysis.csv')
    written = json.loads((tmp_path / 'out/analysis.json').read_text())
    assert len(table) == len(written['rows']) and written['step'] == 12
    heads = table[(table['quantity'] == 'symmetric_share') & (table['of'] == 'A')]
    assert list(heads['head']) == [0, 1] and heads['value'].between(0, 1).all()
    drift = table[table['quantity'] == 'drift']
    assert list(drift['of']) == ['A', 'A', 'B', 'B'] and (drift['value'] == 0).all()
    assert written['reference'] == {
        name: written[name] for name in ('source', 'trial', 'step', 'model')
    }
    gradients = table[table['quantity'] == 'gradient_norm']
    assert 'score/w_q_DNH' in set(gradients['of']) and (gradients['value'] > 0).all()
    assert np.shape(written['spectra'][0]['singular_values']) == (2, 32)
    names = {path.name for path in (tmp_path / 'out').glob('*.png')}
    assert names == {
        *('singular_values_A.png', 'singular_values_B.png', 'matrices.png', 'ov_matrices.png'),
        *('patterns.png', 'maps.png'),
    }
    maps = pd.read_csv(tmp_path / 'out/maps.csv')
    assert list(maps.columns) == [
        *('site', 'layer', 'head', 'query', 'key', 'query_token', 'key_token', 'probability')
    ]
    assert len(maps) == 2 * 9 * 10 // 2 and (maps['key'] <= maps['query']).all()
    assert ''.join(maps[(maps['head'] == 1) & (maps['query'] == 8)]['key_token']) == 'def f(x):'
    sums = maps.groupby(['head', 'query_token', 'query'])['probability'].sum()
    assert len(sums) == 2 * 9 and sums.between(0.9999, 1.0001).all()
    again = script_here('analyze', '--source=run', '--out=out')
    assert again.returncode == 2 and 'already holds an analysis' in again.stderr

    save(tmp_path / 'wide', num_layers=1, d_model=64, num_heads=1)
    for flags, message in (
        (['--trial=2'], 'trial=2 must be in [0, 2)'),
        (['--text=a', '--tokens=1 2'], 'exclude each other'),
        (['--text=a'], '--text has 1 tokens, and the model reads 2 to 24'),
        (['--text=a\udc80'], '--text cannot be encoded'),
        (['--tokens=1 b'], "--tokens='1 b' must be whole numbers"),
        (['--tokens=1 900'], '--tokens must hold ids in [0, 256)'),
        (['--text=abc', '--target=abc'], 'no other model reads --target'),
        (['--num_rows=0'], '--num_rows=0 must be at least 1'),
        (['--reference=absent'], 'absent does not exist'),
        (['--reference=wide'], 'attention 0: A[n] is [1, 64, 64] in the reference'),
    ):
        done = script_here('analyze', '--source=run', *flags)
        assert done.returncode == 2 and message in done.stderr, (flags, done.stderr)
        assert 'Traceback' not in done.stderr


def test_rows_that_a_split_does_not_have_are_not_measured(script_here, trained_run, monkeypatch):
    monkeypatch.setattr(LanguageRows, 'count', lambda rows, split: 3)
    flags = '--num_rows=3', '--num_rows=8'
    few, more = (succeed(script_here('analyze', str(trained_run[1]), flag)) for flag in flags)
    assert few == more
    # A layer of its two heads and 24 positions then has too many probabilities to be held.
    monkeypatch.setattr(LanguageRows, 'count', lambda rows, split: 10**9)
    done = script_here('analyze', str(trained_run[1]), '--num_rows=2147483647')
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert '--num_rows=2147483647 must be at most 58,254 for this model' in done.stderr


@pytest.mark.slow
def test_kinds_of_models_and_files(script_here, tmp_path):
    save(tmp_path / 'nonlinear', score='nonlinear_query')
    printed = succeed(script_here('analyze', '--source=nonlinear', '--tokens=1 2 3'))
    assert 'attention 0, attention 1: not bilinear, so there is no matrix A[n]' in printed
    save(tmp_path / 'pair', kind='encoder_decoder')
    flags = ('--source=pair', '--text=a dog', '--target=ein Hund', '--out=pair_out')
    printed = succeed(script_here('analyze', *flags))
    assert 'cross_attention 1' in printed and 'encoder/attention 0' in printed
    assert {p.name for p in (tmp_path / 'pair_out').glob('maps*')} == {
        *('maps.png', 'maps_cross.png', 'maps_encoder.png', 'maps.csv'),
    }
    done = script_here('analyze', '--source=pair', '--text=a dog')
    assert done.returncode == 2 and 'reads --text (or --file) and --target' in done.stderr
    write(tmp_path / 'gpt2', make_tensors())
    printed = succeed(script_here('analyze', 'gpt2'))
    assert 'induction' in printed and 'entropy' not in printed  # nothing was read
    done = script_here('analyze', '--source=absent')
    assert done.returncode == 2 and 'does not exist' in done.stderr
