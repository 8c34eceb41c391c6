"""Translation: a task learned from files end to end, and the command line's text, files, scores."""

import json

import numpy as np
import pytest

from qkattn.train.loop import train


@pytest.fixture(scope='module')
def run(tiny, tmp_path_factory):
    """A run on words and their reversal, lower-cased; the second trial learns nothing."""
    path, rng = tmp_path_factory.mktemp('translate'), np.random.default_rng(0)
    words = sorted({''.join(rng.choice(list('abcdefgh'), rng.integers(2, 6))) for _ in range(4000)})
    rng.shuffle(words)
    for split, lines in (('validation', words[:100]), ('train', words[100:])):
        (path / f'{split}.en').write_text('\n'.join(lines).upper())
        (path / f'{split}.xx').write_text('\n'.join(line[::-1] for line in lines))
    data = {'name': 'parallel', 'path': str(path), 'languages': 'en-xx', 'eval_sequences': 64}
    data |= {'data_dir': str(path / 'cache'), 'tokenizer': 'characters', 'lowercase': True}
    steps = {'num_steps': 300, 'steps_per_dispatch': 50, 'log_every': 50, 'eval_every': 150}
    steps |= {'checkpoint_every': 300, 'batch_size': 32, 'accumulation': 1, 'lifting': 'vmap'}
    config = tiny(
        model={'kind': 'encoder_decoder', 'num_layers': 1, 'vocab_size': 16, 'scan_unroll': 1},
        data=data,
        optimizer={'warmup_steps': 20},
        train=steps,
        trials={'seeds': (0,), 'learning_rates': (1e-2, 1e-6), 'weight_decays': (0.0,)},
        decode={'beam': 2},
    )
    return path / 'run', train(config, path / 'run')


def test_reversal_is_learned_from_files(run):
    result, untrained = run[1]
    assert result['val_exact_match'] >= 0.95 and untrained['val_exact_match'] == 0
    assert result['val_num_sentences'] == 100
    assert result['val_chrf'] > 95 and result['val_accuracy'] > 0.95 and result['val_loss'] < 0.2
    assert result['test_loss'] is result['test_accuracy'] is None and 'test_bleu' not in result
    assert 0 <= result['val_bleu'] <= 100 and result['val_bleu_signature']
    assert result['val_bits_per_byte'] > 0 and result['data']['unigram_bits_per_byte'] > 0


def test_text_and_files_are_translated_line_by_line(printed, run, tmp_path):
    translate_run = ('translate', f'--source={run[0]}')
    assert printed(*translate_run, '--text=bad\ncafe') == 'dab\nefac\n'
    # The run is of lower-cased text. The last line needs no end.
    (tmp_path / 'in.en').write_text('BAD\n\n   \ncafe')
    assert printed(*translate_run, '--file=in.en') == 'dab\n\n\nefac\n'
    assert 'efac' not in printed(*translate_run, '--text=bad\ncafe', '--trial=1', '--beam=1')


def test_scores_are_those_of_the_run(printed, run):
    path, results = run
    scores = json.loads(printed('translate', f'--source={path}', '--score=validation', '--trial=1'))
    assert scores['split'] == 'validation' and scores['beam'] == 2
    for name in ('bleu', 'chrf', 'exact_match', 'num_sentences'):
        assert scores[name] == pytest.approx(results[1][f'val_{name}'])


def test_bad_input_is_one_sentence(refusal, run):
    for flags, message in (
        ([], 'must hold at least one sentence'),
        (['--text=a', '--file=in.en'], '--text and --file exclude each other'),
        (['--text=abcdefghabcdefgha'], 'source 1 has 17 tokens, but model.source_context=16'),
        (['--score=test'], '--score=test must be one of train, validation'),
        (['--score=validation', '--text=a'], '--score and --text exclude each other'),
    ):
        assert message in refusal('translate', f'--source={run[0]}', *flags)


def test_a_vocabulary_that_the_run_did_not_have_is_refused(script_here, run):
    """The last test of the run, whose files it changes."""
    for language in ('en', 'xx'):
        with (run[0].parent / f'train.{language}').open('a') as file:
            file.write('\nzebu')
    done = script_here('translate', f'--source={run[0]}', '--text=a')
    assert done.returncode == 2 and 'was trained with the tokenizer characters-' in done.stderr
