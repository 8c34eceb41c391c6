"""Shards are made, killed and made on, checked, trained on and decoded."""

import json
import os
import shutil
import signal
import time

import numpy as np
import pytest

from qkattn.config import DataConfig
from qkattn.data.load import prepare
from qkattn.train.loop import train
from tests.data.datasets import contents, write_bin, write_texts

FLAGS = ['--config=run.py', '--config.data.name=text', '--config.data.path=files', '--out=shards']


def test_shards_are_made_checked_trained_on_and_decoded(script_here, tiny, tmp_path):
    write_texts(tmp_path / 'files')
    flags = [*FLAGS, '--shard_tokens=2000', '--config.data.tokenizer=characters']
    made = script_here('prepare_data', *flags, '--workers=1')
    assert made.returncode == 0 and 'characters-' in made.stdout, made.stderr
    assert 'to train: --config.data.name=shards --config.data.path=shards\n' in made.stdout
    before = contents(tmp_path / 'shards')
    again = script_here('prepare_data', *flags)
    assert again.stdout == made.stdout and again.stderr == 'shards is complete\n'
    assert script_here('prepare_data', '--out=shards', '--verify').returncode == 0
    data = {'name': 'shards', 'path': 'shards', 'data_dir': '/absent'}
    (result, _) = train(tiny(data=data, model={'num_layers': 1}), tmp_path / 'w')
    found = json.loads(before['index.json'])
    expected = {split: x['fingerprint'] for split, x in found['splits'].items()}
    assert result['data']['fingerprints'] == expected
    assert result['data']['tokenizer'] == found['tokenizer_name']
    assert result['val_bits_per_byte'] > 0 and result['data']['unigram_loss'] > 1
    text = script_here('generate', 'w', '--prompt=train ', '--num_tokens=8')
    assert text.returncode == 0 and text.stdout.startswith('train '), text.stderr
    assert contents(tmp_path / 'shards') == before
    (tmp_path / 'shards/train_000000.bin').unlink()
    done = script_here('prepare_data', '--out=shards', '--verify')
    assert (done.returncode, done.stderr) == (2, 'shards/train_000000.bin is missing\n')


@pytest.mark.slow
def test_a_run_on_shards_without_text_has_no_bits_per_byte(script_here, tiny, tmp_path):
    ids = np.random.default_rng(0).integers(0, 50, 4000)
    write_bin(tmp_path / 'fw/x_train_000001.bin', ids)
    write_bin(tmp_path / 'fw/x_val_000000.bin', ids[:999])
    data = {'name': 'shards', 'path': 'fw', 'tokenizer': 'ids(vocab_size=50, separator=49)'}
    (result, _) = train(tiny(data=data, model={'num_layers': 1}), tmp_path / 'w')
    assert result['val_loss'] < 5 and result['val_bits_per_byte'] is None
    assert (
        len(script_here('generate', 'w', '--prompt_tokens=4', '--num_tokens=6').stdout.split()) == 6
    )
    assert script_here('report', '--run=w').returncode == 0
    done = script_here('generate', 'w', '--prompt=a')
    assert done.returncode == 2 and 'has no text, only ids; give --prompt_tokens' in done.stderr


@pytest.mark.slow
def test_killed_with_its_workers_at_any_moment_it_goes_on_to_the_same(start, script, tmp_path):
    write_texts(tmp_path / 'files', count=1500)
    data = DataConfig(name='text', path='files')
    prepare(data, 'whole', workers=1, shard_tokens=20_000)
    expected, rng, kills = contents(tmp_path / 'whole'), np.random.default_rng(0), 0
    while kills < 20:
        process = start('prepare_data', *FLAGS, '--workers=2', '--shard_tokens=20000')
        deadline = time.monotonic() + rng.uniform(4, 10)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if process.poll() is not None:
            assert process.returncode == 0, process.communicate()
            assert contents(tmp_path / 'shards') == expected
            shutil.rmtree(tmp_path / 'shards')
            continue
        children = os.popen(f'ps -o pid= --ppid {process.pid}').read().split()
        # A signal that comes while Python imports ends the process by itself.
        number = rng.choice([signal.SIGKILL, signal.SIGTERM])
        process.send_signal(number)
        assert process.wait() in (-signal.SIGKILL, -signal.SIGTERM, 75, 0)
        kills += 1
        limit = time.monotonic() + 30
        while any(os.path.exists(f'/proc/{child}') for child in children):
            assert time.monotonic() < limit, 'workers live on'
            time.sleep(0.05)
    done = script('prepare_data', *FLAGS, '--workers=2', '--shard_tokens=20000')
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / 'shards') == expected
    print(f'{kills} kills')
