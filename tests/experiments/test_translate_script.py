"""Translation from the command line: text, files, scores; refusals."""

import json

import pytest

from qkattn.config import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    TrialsConfig,
)
from qkattn.train import train

WORDS = ['ox', 'cat', 'hen', 'dog', 'rat', 'bee']


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """A run of two trials, hardly trained, on lower-cased text."""
    path = tmp_path_factory.mktemp('translate')
    lines = [f'{a} {b}' for a in WORDS for b in WORDS]
    for split, chosen in (('train', lines), ('validation', lines[:5])):
        (path / f'{split}.en').write_text('\n'.join(line.upper() for line in chosen))
        (path / f'{split}.xx').write_text('\n'.join(line[::-1] for line in chosen))
    config = Config(
        model=ModelConfig(
            kind='encoder_decoder',
            d_model=16,
            num_layers=1,
            num_heads=2,
            context=16,
            vocab_size=32,
            scan_unroll=1,
        ),
        data=DataConfig(
            name='parallel',
            path=str(path),
            languages='en-xx',
            data_dir=str(path / 'cache'),
            tokenizer='characters',
            lowercase=True,
        ),
        optimizer=OptimizerConfig(warmup_steps=2),
        train=TrainConfig(
            num_steps=60,
            batch_size=8,
            steps_per_dispatch=10,
            eval_every=60,
            checkpoint_every=60,
            lifting='map',
        ),
        trials=TrialsConfig(seeds=(0, 1), learning_rates=(1e-2,)),
        decode=DecodeConfig(beam=2),
    )
    results = train(config, path / 'run')
    return path / 'run', results


def test_text_and_files_are_translated_line_by_line(script, script_here, run, tmp_path):
    source = f'--source={run[0]}'

    def out(*flags, start=script_here):
        done = start('translate', source, *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout

    both = out('--text=cat dog\nhen ox', start=script)
    assert both.count('\n') == 2 and both.endswith('\n') and len(both) > 4
    # The run is of lower-cased text. The last line needs no end.
    (tmp_path / 'in.en').write_text('CAT Dog\n\n   \nhen ox')
    assert out('--file=in.en', '--out=out.xx') == ''
    first, second = both.splitlines()
    assert (tmp_path / 'out.xx').read_text() == f'{first}\n\n\n{second}\n'
    assert out('--text=cat dog\nhen ox', '--trial=1', '--beam=1') != both

    done = script_here('translate', source, '--text=cat', '--out=out.xx')
    assert done.returncode == 2 and '--out=out.xx exists' in done.stderr
    assert (tmp_path / 'out.xx').read_text().startswith(first)


def test_scores_are_those_of_the_run(script_here, run):
    path, results = run
    done = script_here('translate', f'--source={path}', '--score=validation', '--trial=1')
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout)
    assert scores['split'] == 'validation' and scores['beam'] == 2 and scores['max_sources'] is None
    for name in ('bleu', 'chrf', 'exact_match', 'num_sentences'):
        assert scores[name] == pytest.approx(results[1][f'val_{name}'])
    flags = ('--score=train', '--max_sources=7', '--beam=1', '--length_penalty=0.5')
    scores = json.loads(script_here('translate', f'--source={path}', *flags).stdout)
    assert (scores['num_sentences'], scores['beam'], scores['length_penalty']) == (7, 1, 0.5)


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--source=absent', '--text=a'], '--source=absent is not the directory of a training run'),
        (['--text=a'], '--source=DIRECTORY is required'),
        ([], 'must hold at least one sentence'),
        (['--file=absent.txt'], '--file=absent.txt cannot be read'),
        (['--text=a', '--file=in.en'], '--text and --file exclude each other'),
        (['--text=cat', '--trial=2'], 'trial=2 must be in [0, 2)'),
        (['--text=catcatcatcatcatca'], 'source 1 has 17 tokens, but model.source_context=16'),
        (['--text=cat', '--beam=0'], 'decode.beam=0 must be at least 1'),
        (['--score=test'], '--score=test must be one of train, validation'),
        (['--score=validation', '--max_sources=-1'], 'decode.max_sources=-1 must be at least 1'),
        (['--score=validation', '--text=cat'], '--score and --text exclude each other'),
        (['--score=validation', '--out=x'], '--score and --out exclude each other'),
        (['--text=cat', '--max_sources=1'], '--max_sources applies to --score only'),
    ],
    ids=str,
)
def test_bad_input_is_one_sentence(script_here, run, tmp_path, flags, message):
    if not any(flag.startswith('--source') for flag in flags) and message[:8] != '--source':
        flags = [f'--source={run[0]}', *flags]
    done = script_here('translate', *flags)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and 'Traceback' not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / 'x').exists()


def test_a_vocabulary_that_the_run_did_not_have_is_refused(script_here, run):
    path, _ = run
    files = [path.parent / f'train.{language}' for language in ('en', 'xx')]
    before = [file.read_text() for file in files]
    try:
        for file, text in zip(files, before, strict=True):
            file.write_text(f'{text}\nzebu')
        done = script_here('translate', f'--source={path}', '--text=cat')
    finally:
        for file, text in zip(files, before, strict=True):
            file.write_text(text)
    assert done.returncode == 2
    (message,) = [line for line in done.stderr.splitlines() if 'was trained with' in line]
    assert 'tokenizer characters-' in message and 'restore the data' in message
    assert done.stdout == ''
