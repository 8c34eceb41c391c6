"""Bad input ends in one sentence and exit code 2, before anything compiles or is written."""

import pytest

from qkattn.config import ModelConfig
from tests.experiments.conftest import save_model

TRAIN = ('train', '--config=run.py')
ABLATE = ('ablate', '--config=study.py')
POD = (*TRAIN, '--dry_run=v5e-1x1')
TUNED = ('--config.tuning.seeds=(10,)', '--config.base.trials.learning_rates=(1e-3,2e-3,4e-3)')
PLAN = (*ABLATE, '--dry_run', *TUNED)
# The words of a command, and a part of the sentence that refuses the command.
CASES = [
    # Commands, files, directories and configs.
    (('trian',), "unknown command 'trian'; known: ablate, analyze, "),
    (('train', '--config=small'), '--workdir=DIRECTORY is required'),
    (('train', '--config=small', '--workdir='), '--workdir=DIRECTORY is required'),
    (('train', '--config=smal', '--workdir=w'), 'come with qkattn are ablation_124m, '),
    (('train', '--config=study.py', '--workdir=w'), 'not a Config; run it with qkattn ablate'),
    (('train', '--config=study.py', '--config.data.name=x'), "no field 'data' to override"),
    (('ablate', '--config=claims/maskd_lm:cpu', '--workdir=w'), '--config=claims/masked_lm?'),
    (
        ('ablate', '--config=claims/lm_rank:tpu', '--dry_run'),
        "scale='tpu' must be one of smoke, cpu",
    ),
    (('ablate',), '--config=FILE.py is required'),
    (('report', '--study=absent'), "'absent' does not exist"),
    (('report', 'study.py'), "'study.py' is a file"),
    (('report',), '--study=DIRECTORY is required'),
    (('verify', '--results=absent'), '--results=absent contains no study directory'),
    (('verify', '--results=absent', '--pages=/dev/zero'), "--pages: '/dev/zero' is not a file"),
    (('prepare_data', '--config=run.py', '--out=/proc/x'), '/proc/x cannot be written'),
    (('prepare_data', '--config=run.py', '--out=w', '--config.data.name=None'), 'data.name=None'),
    (('prepare_data', '--config=run.py', '--out=run'), '--out=run holds files that are no tokens'),
    (('analyze', 'run', '--out=/proc/x'), '--out=/proc/x cannot be used'),
    (('claims', '--export=/proc/x', '--list'), '--export=/proc/x cannot be used'),
    ((*TRAIN, '--workdir=w', '--dry_run_log=x.csv'), '--dry_run_log=x.csv needs --dry_run'),
    ((*TRAIN, '--dry_run', '--dry_run_log=x.csv'), '--dry_run_log=x.csv needs --dry_run=POD'),
    ((*ABLATE, '--workdir=w', '--measure'), '--measure needs --dry_run'),
    ((*ABLATE, '--dry_run=h100-1x1', '--measure'), '--measure needs --dry_run without a pod'),
    ((*ABLATE, '--dry_run=v5'), '--dry_run=v5 must be a chip and a shape'),
    ((*TRAIN, '--workdir=w', '--config.optimizer.beta2=1'), 'beta2=1'),
    # Settings.
    (
        (*TRAIN, '--config.train.num_steps=1.5'),
        '--config.train.num_steps=1.5 must be int, at least 1',
    ),
    ((*TRAIN, '--config.model.biases=yes'), '--config.model.biases=yes must be bool'),
    ((*TRAIN, '--config.trials.seeds=(0,1'), 'seeds=(0,1 must be tuple of int, at least 0 and'),
    ((*TRAIN, '--noconfig.model.biasses'), 'mean --config.model.biases?'),
    ((*TRAIN, '--config.num_steps', '9'), 'mean --config.train.num_steps?'),
    ((*TRAIN, '--workdir=w', '--config.train.init_from='), "init_from='' must be Unicode text"),
    ((*TRAIN, '--workdir=w', 'extra'), "unknown argument 'extra'; settings are"),
    ((*TRAIN, '--workdri=w'), 'workdri'),
    ((*ABLATE, '--config.model.d_model=3'), '--config.base.model.d_model?'),
    ((*ABLATE, '--config.xyzzy=3'), 'unknown field --config.xyzzy (--help'),
    # Dry runs of pods. Reading /dev/full never ends.
    ((*TRAIN, '--dry_run=v5e-1x1', '--dry_run_log=/dev/full'), '=/dev/full must be a CSV file'),
    ((*TRAIN, '--dry_run=v5e-1x1', '--dry_run_log=run.py'), '=run.py must have the columns run,'),
    ((*TRAIN, '--dry_run=v5e-1x1', "--config.train.metrics=('top_5',)"), 'must be an import path'),
    # Dry runs with settings that the start of training also refuses.
    ((*POD, '--config.data.name=hf:json'), 'names a loader'),
    ((*POD, '--config.train.init_from=absent'), 'absent holds neither exported parameters'),
    ((*PLAN, '--workdir=/proc/x'), '/proc/x cannot be used'),
    ((*PLAN, '--workdir=run'), 'holds a run, not a study'),
    # Claims.
    (('claims', 'E33'), "unknown claim 'E33', did you mean 'E3'?"),
    (('claims', 'E3', '--workers=two'), '--workers=two must be auto or a number'),
    (('claims', '--claims='), '--claims is empty; give names as in B2,C1'),
    (('claims', 'A2', '--export=kept'), '--export=kept exports all claims; leave out their names'),
    (('claims', 'A2', '--workdir=gs://a/b'), 'workdir=gs://a/b is in a bucket; claims need one'),
    (('claims', 'A2', '--workdir=nowhere', '--notrain'), 'workdir=nowhere is not a directory'),
    # Models.
    (('translate', '--source=run', '--text=a'), 'only an encoder_decoder translates'),
    (('translate', '--source=pair', '--text=a'), 'is not the directory of a training run'),
    (('generate', 'pair'), "model of kind 'encoder_decoder'; only a decoder continues text"),
    (('generate', 'run', '--prompt=a\udc80'), 'cannot be encoded'),
    (('generate', 'run', '--prompt_tokens=a b'), 'must be whole numbers from 0 to 255'),
    (
        ('generate', 'run', '--prompt_tokens=1', '--prompt=a'),
        '--prompt and --prompt_tokens exclude',
    ),
    (('generate', 'decoder', '--data=tokens'), '--data=tokens names no tokenizer; give a dataset'),
    (('generate', 'decoder', '--data=text'), '--data=text names no tokenizer; give a dataset'),
    (('generate', 'decoder', '--data=cldr'), '--data=cldr names no tokenizer; give a dataset'),
    (
        ('generate', 'decoder', '--data=parallel'),
        '--data=parallel names no tokenizer; give a dataset',
    ),
    (
        ('generate', 'decoder', '--data=stdlibs'),
        '--data=stdlibs names no tokenizer; give a dataset',
    ),
    (('generate', 'decoder', '--data='), '--data= names no tokenizer; give a dataset'),
    (('generate', 'decoder', '--data=absent.json'), '--data=absent.json does not exist; give'),
    (('generate', 'decoder', '--data=run.py'), '--data=run.py names no tokenizer; give a dataset'),
    (('analyze', 'decoder', '--text=a dog', '--data=tokens'), '--data=tokens names no tokenizer'),
    (('convert', 'run', '--out='), '--out=DIRECTORY is required'),
    (('convert', 'run', '--out=run'), '--out=run is not empty; give another directory'),
    (('convert', 'run', '--out=/proc/x'), '--out=/proc/x cannot be used'),
    (('convert', 'run', '--layout=transformers'), '--layout=transformers needs --out=DIRECTORY'),
    (('convert', 'run', '--layout=gguf'), 'should be one of <qkattn|transformers>'),
    (
        ('convert', 'pair', '--layout=transformers', '--out=w'),
        "model.kind='encoder_decoder' has no place in the layout of transformers",
    ),
    (('evaluate', 'run'), '--tasks=NAME,... is required'),
    (('evaluate', 'pair', '--tasks=x'), "model of kind 'encoder_decoder'; only a decoder scores"),
    (('evaluate', 'run', '--tasks=x', '--out=run.py'), '--out=run.py exists; give another file'),
    (
        ('evaluate', 'run', '--tasks=x', '--out=/proc/x/y.json'),
        'the directory of --out=/proc/x cannot be used',
    ),
    (('generate', 'run', '--seed=99999999999999999999'), '--seed=99999999999999999999'),
    (('convert', 'absent', '--apply=merg'), "unknown conversion 'merg'"),
    (('analyze', 'run', '--text=a', '--tokens=1 2'), 'exclude each other'),
    (('analyze', 'run', '--text=a'), '--text has 1 token; the model reads 2 to 16'),
    (('analyze', 'run', '--text=a\udc80'), '--text cannot be encoded'),
    (('analyze', 'pair', '--text=a dog'), 'an encoder_decoder reads rows of its run'),
    (('explore',), 'give either --variant=SCORE/VALUE or --html=FILE'),
    (('explore', '--html=/proc/x.html'), 'the directory of --html=/proc cannot be used'),
    (('explore', '--html=.'), '--html=. is a directory; give a file, e.g. ./explorer.html'),
    (('explore', '--html=run.py'), '--html=run.py exists; give another file'),
    (('benchmark',), '--suite=NAME is required, e.g. --suite=steps'),
    (
        ('benchmark', '--suite=stepz'),
        'unknown --suite=stepz; known: steps, stacks, decoding, study',
    ),
    (
        ('benchmark', '--suite=steps', '--variants=qk/voo'),
        '--variants=qk/voo: model: unknown value ',
    ),
]


@pytest.fixture(scope='session')
def sources(small_run, tmp_path_factory):
    """Paths of models by name: a run of a decoder, and exported parameters of two models."""
    sizes = {'d_model': 16, 'num_layers': 1, 'num_heads': 2, 'context': 8}
    pair = tmp_path_factory.mktemp('sources') / 'pair'
    save_model(pair, ModelConfig(kind='encoder_decoder', **sizes))
    decoder = tmp_path_factory.mktemp('sources') / 'decoder'
    save_model(decoder, ModelConfig(**sizes))
    return {'run': small_run.path, 'pair': pair, 'decoder': decoder}


def names_a_model(command):
    """Whether a command reads one of `sources`, as in 'run' or '--source=run'."""
    values = {word.rpartition('=')[2] for word in command}
    return not values.isdisjoint({'run', 'pair', 'decoder'})


@pytest.mark.parametrize(
    ('command', 'message'), CASES, ids=[' '.join(command)[-60:] for command, _ in CASES]
)
def test_bad_input_is_one_sentence(command, message, refusal, request, tmp_path, capsys):
    """A command with wrong input prints one line that says what is wrong, and writes no file.

    `command` has the words of a command, such as ('train', '--config=small').
    """
    # Some commands read a model: run/, pair/ or decoder/ in the working directory.
    # The fixture `sources` trains a model, so only these commands request it.
    if names_a_model(command):
        sources = request.getfixturevalue('sources')
        for name, path in sources.items():
            (tmp_path / name).symlink_to(path)
        capsys.readouterr()  # discards the output of the training
    names_before = {path.name for path in tmp_path.iterdir()}

    # `refusal` also checks the exit code and the number of lines.
    assert message in refusal(*command)

    # Importing a config may write its bytecode to __pycache__.
    names_after = {path.name for path in tmp_path.iterdir()}
    assert names_after - names_before <= {'__pycache__'}


def last_line_of_failure(script_here, command):
    """The last line that a command prints on standard error. The command must fail with code 2."""
    done = script_here(*command)
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ('dry_run', 'settings', 'message'),
    [
        (POD, ('config.model.vocab_size=100',), 'model.vocab_size=100 must be at least 256 for'),
        (POD, ('config.data.mask_rate=0.3',), 'data.mask_rate=0.3 has no effect on a decoder'),
        (POD, ('config.data.name=text', 'config.data.path=x.txt'), "x.txt' does not exist"),
        (POD, ("config.train.sinks=('x',)",), "unknown train.sinks 'x'"),
        (POD, ("config.data.evaluate=('text:x.txt',)",), "data.evaluate='text:x.txt': data.path: "),
        (PLAN, ("config.base.data.evaluate=('stdlibs',)",), "unknown data.name 'stdlibs'"),
        (
            PLAN,
            ('config.base.data.eval_sequences=2048', "config.base.data.evaluate=('text:x.txt',)"),
            "data.evaluate='text:x.txt': data.path: ",
        ),
        (PLAN, ('config.base.data.eval_sequences=8',), 'eval_sequences=8 evaluates 8 of '),
        (PLAN, ('config.base.data.name=text', 'config.base.data.path=run.py'), 'has too few lines'),
        (PLAN, ("config.base.train.sinks=('x',)",), "unknown train.sinks 'x'"),
    ],
)
def test_a_dry_run_refuses_what_a_start_refuses(script_here, tmp_path, dry_run, settings, message):
    """A dry run refuses wrong settings with the same sentence as the command that trains.

    `POD` is the dry run of a training run on a TPU, and `PLAN` is the dry run of a study.
    """
    flags = [f'--{setting}' for setting in settings]
    # The command that trains has --workdir instead of --dry_run.
    words_without_dry_run = [word for word in dry_run if not word.startswith('--dry_run')]
    start = [*words_without_dry_run, '--workdir=w']

    sentence_of_dry_run = last_line_of_failure(script_here, [*dry_run, *flags])
    sentence_of_start = last_line_of_failure(script_here, [*start, *flags])

    assert message in sentence_of_dry_run
    assert sentence_of_start == sentence_of_dry_run
    # Training has not started, so its directory was not made.
    assert not (tmp_path / 'w').exists()


def test_an_error_in_a_config_is_named_with_its_line(refusal, tmp_path):
    (tmp_path / 'own.py').write_text('def get_config():\n    return {}["seeds"]\n')
    sentence = refusal('train', '--config=own.py')
    assert "--config=own.py: line 2: KeyError: 'seeds'" in sentence


def test_a_config_that_is_not_python_is_refused(refusal, tmp_path):
    (tmp_path / 'book.txt').write_text('Once upon a time')
    sentence = refusal('train', '--config=book.txt')
    assert '--config=book.txt: invalid syntax' in sentence


def test_a_class_that_an_own_module_lacks_is_named(refusal, tmp_path):
    (tmp_path / 'own.py').write_text('def get_config():\n    return {}["seeds"]\n')
    sentence = refusal(*TRAIN, '--workdir=w', '--config.model.score=own:Miss')
    assert "own has no 'Miss'" in sentence


@pytest.mark.parametrize(
    'overrides', [[], ['--config.train.num_steps=3']], ids=['no override', 'override']
)
@pytest.mark.parametrize(
    ('returned', 'kind'),
    [
        pytest.param("{'train': {'num_steps': 3}}", 'a value of type dict', id='dict'),
        pytest.param('None', 'nothing', id='None'),
        pytest.param("'small'", 'a value of type str', id='name of a config'),
        pytest.param('Config', 'a value of type type', id='class in place of an object'),
    ],
)
def test_a_config_file_that_returns_something_else_is_refused(
    refusal, tmp_path, returned, kind, overrides
):
    """A config file is refused if its get_config() does not return a Config or a Study.

    `returned` is the expression that get_config() returns instead. The message is the same if a
    flag overrides a setting.
    """
    source = f'from qkattn.config import Config\n\ndef get_config():\n    return {returned}\n'
    (tmp_path / 'own.py').write_text(source)

    sentence = refusal('train', '--config=own.py', '--workdir=w', *overrides)

    assert sentence == (
        f'flag --config=own.py: get_config() returns {kind}; it must return a Config or a Study'
    )


@pytest.mark.parametrize(
    ('script', 'kind', 'field'),
    [
        ('train', 'Config', 'train.batch_size'),
        ('ablate', 'Study', 'base.train.batch_size'),
    ],
)
def test_a_config_file_may_return_the_dataclass(refusal, tmp_path, script, kind, field):
    """get_config() may return a Config or Study itself, instead of a ConfigDict.

    The refused value 0 shows that a flag can override a field of the dataclass.
    """
    source = f'from qkattn.config import {kind}\n\ndef get_config():\n    return {kind}()\n'
    (tmp_path / 'own.py').write_text(source)

    sentence = refusal(script, '--config=own.py', '--workdir=w', f'--config.{field}=0')

    assert 'train.batch_size=0 must be at least 1' in sentence
