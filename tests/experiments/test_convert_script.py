"""Checkpoints and GPT-2 files converted from the command line; the text stays the same."""

import jax
import numpy as np

from qkattn.config import ModelConfig
from qkattn.model.cost import abstract_params
from qkattn.pretrained import load_gpt2, save_gpt2
from qkattn.train import exported

RUN = """
from qkattn.config import *

def get_config():
    return to_config_dict(
        Config(
            model=ModelConfig(num_layers=2, num_heads=2, context=24, d_model=32),
            data=DataConfig(eval_sequences=8),
            optimizer=OptimizerConfig(warmup_steps=2),
            train=TrainConfig(num_steps=20, batch_size=4, steps_per_dispatch=10, log_every=10,
                              eval_every=20, checkpoint_every=20, lifting='map'),
            trials=TrialsConfig(seeds=(0, 1)),
        )
    )
"""


def succeed(done):
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_is_converted_writes_the_same_text_and_trains_on(script, tmp_path):
    (tmp_path / 'small.py').write_text(RUN)
    succeed(script('train', '--config=small.py', '--workdir=run'))
    flags = ('--source=run', '--trial=1', '--apply=merge', '--out=merged')
    said = succeed(script('convert', *flags))
    assert 'merge: merged/vo, largest relative logit change' in said
    assert float(said.split('logit change ')[1].split()[0]) < 1e-4
    assert 'without optimizer state' in said
    greedy = ('--prompt=def f(', '--num_tokens=12', '--temperature=0')
    want = succeed(script('generate', '--source=run', '--trial=1', *greedy))
    assert succeed(script('generate', '--source=merged', *greedy)) == want

    again = script('convert', *flags)
    assert again.returncode == 2 and 'already holds weights' in again.stderr
    on = ('--config.model.score=merged', '--config.train.init_from=merged', '--workdir=on')
    succeed(script('train', '--config=small.py', *on))
    other = script('train', '--config=small.py', '--workdir=w', '--config.train.init_from=merged')
    assert other.returncode == 2 and 'parameter blocks.attention.score' in other.stderr


def test_a_gpt2_model_is_merged_and_writes_the_same_text(script, tmp_path):
    config = ModelConfig(
        d_model=32, num_layers=2, num_heads=4, context=24, vocab_size=90, biases=True
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda a: (0.3 * rng.standard_normal(a.shape)).astype(np.float32), abstract_params(config)
    )
    save_gpt2(config, params, tmp_path / 'gpt2')
    succeed(script('convert', '--source=gpt2', '--apply=merge', '--out=merged'))
    assert exported.load(tmp_path / 'merged')[0].score == 'merged'
    greedy = ('--prompt_tokens=5 17 80', '--num_tokens=16', '--temperature=0')
    want = succeed(script('generate', '--source=gpt2', *greedy))
    assert len(want.split()) == 16
    assert succeed(script('generate', '--source=merged', *greedy)) == want

    succeed(script('convert', '--source=gpt2', '--layout=gpt2', '--out=copy'))
    _, copied = load_gpt2(tmp_path / 'copy')
    jax.tree.map(np.testing.assert_array_equal, copied, params)
    flags = ('--source=merged', '--layout=gpt2', '--out=no')
    refused = script('convert', *flags)
    assert refused.returncode == 2 and "score='merged' has no place" in refused.stderr
    refused = script('convert', '--source=gpt2', '--apply=to_shared')
    assert refused.returncode == 2 and 'to_shared is refused: layer 0' in refused.stderr
