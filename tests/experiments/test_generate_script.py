"""Text from a trained run: the same for the same seed, another for another trial; refusals."""

import jax
import numpy as np
from flax import nnx

from qkattn.config import ModelConfig
from qkattn.model import build
from qkattn.train import exported

TINY = """
from qkattn.config import *

def get_config():
    return to_config_dict(
        Config(
            model=ModelConfig(num_layers=1, num_heads=2, context=24, d_model=32),
            data=DataConfig(eval_sequences=8),
            optimizer=OptimizerConfig(warmup_steps=2),
            train=TrainConfig(num_steps=20, batch_size=4, steps_per_dispatch=10, log_every=10,
                              eval_every=20, checkpoint_every=20, lifting='map'),
            trials=TrialsConfig(seeds=(0, 1)),
        )
    )
"""


def test_a_run_continues_a_prompt(script, tmp_path):
    (tmp_path / 'tiny.py').write_text(TINY)
    assert script('train', '--config=tiny.py', '--workdir=w').returncode == 0
    (tmp_path / 'prompt.txt').write_text('def f')

    def text(*flags):
        done = script('generate', '--source=w', '--num_tokens=16', *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout

    by_flag = text('--prompt=def f', '--seed=5')
    assert by_flag.startswith('def f') and len(by_flag.encode()) > len('def f') + 1
    assert text('--prompt_file=prompt.txt', '--seed=5') == by_flag
    assert text('--prompt=def f', '--seed=5', '--trial=1') != by_flag

    ids = script('generate', '--source=w', '--num_tokens=8', '--prompt_tokens=100 101')
    assert len(ids.stdout.split()) == 8

    # A beam of 1 is greedy decoding, up to the separator; the text has none.
    searched = text('--prompt=def f', '--beam=1')
    assert searched == text('--prompt=def f', '--temperature=0')
    # Without a prompt a document begins, and the separator that it begins with is not shown.
    assert '\0' not in text('--beam=2')

    for flags, said in (
        (['--source=w', '--prompt_tokens=1', '--beam=2'], '--beam needs a tokenizer'),
        (['--source=w', '--prompt=a', '--beam=0', '--num_tokens=4'], 'beam=0 must be at least 1'),
        (['--source=w', '--prompt=a\udc80'], 'cannot be encoded'),
        (['--source=w', '--trial=2'], 'trial=2 must be in [0, 2)'),
        (['--source=absent'], 'absent does not exist'),
        (['--source=w', '--prompt_tokens=a b'], 'must be whole numbers'),
        (['--source=w', '--prompt=a', '--prompt_file=prompt.txt'], 'exclude each other'),
    ):
        done = script('generate', *flags)
        assert done.returncode == 2 and said in done.stderr and 'Traceback' not in done.stderr


def test_other_kinds_of_models_do_not_continue_text(script, tmp_path):
    for kind, said in (
        ('encoder', "is a model of kind 'encoder'; only a decoder continues text"),
        ('encoder_decoder', "is a model of kind 'encoder_decoder'; only a decoder continues text"),
    ):
        config = ModelConfig(kind=kind, num_layers=1, num_heads=2, context=8, d_model=16)
        model = build(config, key=jax.random.key(0))
        params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
        exported.save(tmp_path / kind, config, params, origin={})
        done = script('generate', f'--source={kind}', '--prompt_tokens=1 2')
        assert done.returncode == 2 and said in done.stderr and 'Traceback' not in done.stderr
