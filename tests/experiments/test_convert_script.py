"""Runs and GPT-2 files converted from the command line; the generated text stays the same."""

import dataclasses

import jax
import numpy as np
import pytest

from qkattn.config import ModelConfig
from qkattn.convert.conversions import CONVERSIONS, Conversion
from qkattn.errors import ConfigError
from qkattn.model.cost import abstract_params
from qkattn.train import exported
from qkattn.train.loop import train
from tests.convert.test_published import make_tensors, write


def succeed(done):
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_is_converted_and_generates_the_same_text(script_here, trained_run, tmp_path):
    config, run = trained_run
    (tmp_path / 'run').symlink_to(run)
    flags = ('--source=run', '--trial=1', '--apply=merge', '--out=merged')
    printed = succeed(script_here('convert', *flags))
    assert 'merge: merged/vo, largest relative logit change' in printed
    assert float(printed.split('logit change ')[1].split()[0]) < 1e-4
    assert 'without optimizer state' in printed
    greedy = ('--prompt=def f(', '--num_tokens=12', '--temperature=0', f'--data={config.data.name}')
    text = succeed(script_here('generate', '--source=run', '--trial=1', *greedy))
    assert succeed(script_here('generate', '--source=merged', *greedy)) == text

    again = script_here('convert', *flags)
    assert again.returncode == 2 and again.stdout == '' and 'already holds' in again.stderr
    init_from = dataclasses.replace(config.train, init_from=str(tmp_path / 'merged'))
    other = dataclasses.replace(config, train=init_from)
    with pytest.raises(ConfigError, match='parameter blocks.attention.score'):
        train(other, tmp_path / 'other')


@pytest.mark.slow
def test_a_converted_run_trains_on(script_here, trained_run, tmp_path):
    config, run = trained_run
    (tmp_path / 'run').symlink_to(run)
    succeed(script_here('convert', '--source=run', '--apply=merge', '--out=merged'))
    init_from = dataclasses.replace(config.train, init_from=str(tmp_path / 'merged'))
    merged = dataclasses.replace(config.model, score='merged')
    results = train(dataclasses.replace(config, model=merged, train=init_from), tmp_path / 'on')
    assert all(result['status'] == 'finished' for result in results)


def test_a_gpt2_model_is_merged_and_generates_the_same_text(script_here, tmp_path):
    write(tmp_path / 'gpt2', make_tensors())
    printed = succeed(script_here('convert', '--source=gpt2', '--apply=merge', '--out=merged'))
    assert 'wrote merged' in printed and 'optimizer' not in printed
    assert exported.load(tmp_path / 'merged')[0].score == 'merged'
    greedy = ('--prompt_tokens=5 17 20', '--num_tokens=7', '--temperature=0')
    text = succeed(script_here('generate', '--source=gpt2', *greedy))
    assert len(text.split()) == 7
    assert succeed(script_here('generate', '--source=merged', *greedy)) == text

    printed = succeed(script_here('convert', '--source=gpt2', '--apply=truncate(rank=2)'))
    assert 'layer 1: truncate(rank=2) leaves out' in printed and 'wrote' not in printed
    done = script_here('convert', '--source=gpt2', '--apply=unmerge(rank=1)')
    assert done.returncode == 2 and 'unmerge(rank=1) is refused: layer 0' in done.stderr


def test_nothing_is_written_where_an_exact_conversion_moves_the_logits(
    script_here, tmp_path, monkeypatch
):
    def doubled(layer):
        layer.value.w_o_NHD[...] *= 2
        return layer

    config = ModelConfig(d_model=16, num_layers=1, context=8, vocab_size=20, norm_position='post')
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda a: rng.standard_normal(a.shape).astype(np.float32), abstract_params(config)
    )
    exported.save(tmp_path / 'source', config, params, origin={})
    monkeypatch.setitem(CONVERSIONS, 'merge_vo', Conversion(doubled, 'OV'))
    for text, message in (
        ('merge_vo', 'merge_vo is refused: it moves logits by '),
        ('fold_gains', 'fold_gains is refused: in a post-norm model'),
    ):
        flags = ('--apply=merge', f'--apply={text}', '--out=no')
        done = script_here('convert', '--source=source', *flags)
        assert done.returncode == 2 and message in done.stderr and 'Traceback' not in done.stderr
        assert not (tmp_path / 'no').exists()
