"""Text from a trained run: the same for the same seed, another for another trial; refusals."""

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

    for flags, said in (
        (['--source=w', '--trial=2'], 'trial=2 must be in [0, 2)'),
        (['--source=absent'], 'absent does not exist'),
        (['--source=w', '--prompt_tokens=a b'], 'must be whole numbers'),
        (['--source=w', '--prompt=a', '--prompt_file=prompt.txt'], 'exclude each other'),
    ):
        done = script('generate', *flags)
        assert done.returncode == 2 and said in done.stderr and 'Traceback' not in done.stderr
