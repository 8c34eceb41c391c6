"""Text from a trained run: the same for the same seed, another for another trial; refusals."""

import jax
import numpy as np
import pytest
from flax import nnx

from qkattn.config import ModelConfig
from qkattn.model import build
from qkattn.train import exported


def test_a_run_continues_a_prompt(script_here, trained_run, tmp_path):
    (tmp_path / 'w').symlink_to(trained_run[1])
    (tmp_path / 'prompt.txt').write_text('def f')

    def text(*flags):
        done = script_here('generate', '--source=w', '--num_tokens=16', *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout

    done = script_here('generate', 'w')
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == (
        'w: qk/vo, step 12, trial 0 of 2 (seed=0 learning_rate=0.01 weight_decay=0.0005)'
    )
    # A new document that fills the context of 24, beside the separator; its last token is not fed.
    assert done.stdout == text('--num_tokens=24', '--temperature=0.8') and done.stdout.strip()
    by_flag = text('--prompt=def f', '--seed=5')
    assert by_flag.startswith('def f') and len(by_flag.encode()) > len('def f') + 1
    assert text('--prompt_file=prompt.txt', '--seed=5') == by_flag
    assert text('--prompt=def f', '--seed=5', '--trial=1') != by_flag
    assert len(text('--prompt_tokens=100 101').split()) == 16
    # A beam of 1 is greedy decoding up to the separator, which this text does not reach.
    assert text('--prompt=def f', '--beam=1') == text('--prompt=def f', '--temperature=0')
    # Without a prompt a document begins with the separator, which is not printed.
    assert '\0' not in text('--beam=2')

    for flags, message in (
        (['--prompt_tokens=1', '--beam=2'], '--beam requires a tokenizer'),
        (['--prompt=a', '--beam=0'], 'beam=0 must be at least 1'),
        (['--prompt=a\udc80'], 'cannot be encoded'),
        (['--trial=2'], 'trial=2 must be in [0, 2)'),
        (['--prompt_tokens=a b'], 'must be whole numbers'),
        (['--prompt=a', '--prompt_file=prompt.txt'], 'exclude each other'),
    ):
        done = script_here('generate', '--source=w', '--num_tokens=4', *flags)
        assert done.returncode == 2 and message in done.stderr and 'Traceback' not in done.stderr


@pytest.mark.parametrize('kind', ['encoder', 'encoder_decoder'])
def test_other_kinds_of_models_do_not_continue_text(script_here, tmp_path, kind):
    config = ModelConfig(kind=kind, num_layers=1, num_heads=2, context=8, d_model=16)
    model = build(config, key=jax.random.key(0))
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    exported.save(tmp_path / kind, config, params, origin={})
    done = script_here('generate', f'--source={kind}', '--prompt_tokens=1 2')
    message = f"is a model of kind '{kind}'; only a decoder continues text"
    assert done.returncode == 2 and message in done.stderr and 'Traceback' not in done.stderr
