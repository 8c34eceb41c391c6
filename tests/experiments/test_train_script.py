"""A run from the command line: what it prints, and the report on it."""

import re
import sys

RUN = """
from qkattn.config import *

def get_config():
    return to_config_dict(Config(
        model=ModelConfig(num_layers=1, num_heads=2, d_model=16, context=7),
        data=DataConfig(name='recall(pairs=2)', eval_sequences=8),
        optimizer=OptimizerConfig(warmup_steps=2),
        train=TrainConfig(num_steps=20, batch_size=4, steps_per_dispatch=5, log_every=5,
                          eval_every=10, checkpoint_every=20, lifting='map',
                          metrics=('confidence:top(k=3)',)),
        trials=TrialsConfig(seeds=(0, 1)),
    ))
"""


def test_training_says_its_losses_and_where_everything_lies(script_here, tmp_path, outside):
    (tmp_path / 'run.py').write_text(RUN)
    done = script_here('train', '--config=run.py', '--workdir=out')
    assert done.returncode == 0, done.stderr
    loss = r'\d\.\d{4} to \d\.\d{4} nats/token'
    for step in (10, 20):
        assert re.search(rf'^step {step}/20: validation loss {loss}$', done.stderr, re.MULTILINE)
    assert re.search(rf'^train: step 20/20, training loss {loss}, ', done.stderr, re.MULTILINE)
    values = r'^  validation loss \d\.\d{4} nats/token, .* top 3 \d+\.\d\d %'
    assert re.search(values, done.stdout, re.MULTILINE)
    (outside / 'confidence.py').unlink()  # which reports do not need
    del sys.modules['confidence']
    assert max(map(len, done.stdout.splitlines())) <= 100
    places = dict(re.findall(r'^(results|metrics|checkpoints) +(\S+)$', done.stdout, re.MULTILINE))
    assert places == {
        'results': 'out/result.json',
        'metrics': 'out/metrics.jsonl',
        'checkpoints': 'out/checkpoints',
    }
    assert all((tmp_path / place).exists() for place in places.values())
    (export,) = re.findall(r'^to export +qkattn convert (.*) --out=DIRECTORY$', done.stdout, re.M)
    exported = script_here('convert', *export.split(), '--out=exported')
    assert (tmp_path / 'exported/model.safetensors').exists(), exported.stderr
    (report,) = re.findall(r'^to report +qkattn report (.*)$', done.stdout, re.MULTILINE)
    reported = script_here('report', *report.split())
    assert reported.returncode == 0 and 'seed 1' in reported.stdout, reported.stderr
    assert 'validation top 3' in (tmp_path / 'out/report.html').read_text()
    assert (tmp_path / 'out/report.html').exists()
    for flags in ((), ('--run=out', '--study=out')):
        refused = script_here('report', *flags)
        assert refused.returncode == 2 and 'one of --study=DIRECTORY and --run' in refused.stderr
