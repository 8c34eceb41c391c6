"""Shards are made, checked, trained on and decoded."""

import json

from qkattn.train.loop import train
from tests.data.datasets import contents, write_texts

FLAGS = ['--config=run.py', '--config.data.name=text', '--config.data.path=files', '--out=shards']


def test_shards_are_made_checked_trained_on_and_decoded(script_here, tiny, tmp_path):
    write_texts(tmp_path / 'files')
    flags = [*FLAGS, '--shard_tokens=2000', '--config.data.tokenizer=characters']
    made = script_here('prepare_data', *flags)
    assert made.returncode == 0 and 'characters-' in made.stdout, made.stderr
    assert 'to train: --config.data.name=shards --config.data.path=shards\n' in made.stdout
    before = contents(tmp_path / 'shards')
    again = script_here('prepare_data', *flags)
    assert again.stdout == made.stdout and again.stderr == 'shards is complete\n'
    assert script_here('prepare_data', '--out=shards', '--verify').returncode == 0
    data = {'name': 'shards', 'path': 'shards', 'data_dir': '/absent'}
    (result, _) = train(tiny(data=data, model={'num_layers': 1}), tmp_path / 'w')
    index = json.loads(before['index.json'])
    expected = {split: info['fingerprint'] for split, info in index['splits'].items()}
    assert result['data']['fingerprints'] == expected
    assert result['data']['tokenizer'] == index['tokenizer_name']
    assert result['val_bits_per_byte'] > 0 and result['data']['unigram_loss'] > 1
    text = script_here('generate', 'w', '--prompt=train ', '--num_tokens=8')
    assert text.returncode == 0 and text.stdout.startswith('train '), text.stderr
    assert contents(tmp_path / 'shards') == before
    (tmp_path / 'shards/train_000000.bin').unlink()
    assert script_here('prepare_data', '--out=shards', '--verify').returncode == 2
