"""Every command as a user runs it: its help, what it prints, and what it writes."""

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import typing
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import requests
from jax.stages import Lowered

from experiments.explorer.bench import Bench
from experiments.explorer.symbolic import sympy
from experiments.explorer.worked import worked
from qkattn import __version__
from qkattn.attention import NORMALIZERS, SCORES, VALUES
from qkattn.attention.kernels.choice import KERNELS
from qkattn.config import Config, ModelConfig, Study
from qkattn.config.setting import settings
from qkattn.convert.conversions import CONVERSIONS, Conversion
from qkattn.data.corpora.corpus_registry import CORPORA
from qkattn.data.tasks.probe_tasks import PROBES
from qkattn.data.tasks.task_registry import TASKS
from qkattn.data.tokenizers.tokenizer import CharacterTokenizer as Tokenizer
from qkattn.data.tokenizers.vocabulary import KINDS as TOKENIZERS
from qkattn.jobs import signals
from qkattn.jobs.cli import shipped
from qkattn.jobs.output import EXIT_UNREAD
from qkattn.model import cost
from qkattn.model.blocks import ACTIVATIONS
from qkattn.model.stack import REMAT_POLICIES
from qkattn.model.transformer import KINDS as MODEL_KINDS
from qkattn.storage import ledger, run_directory
from qkattn.storage.records import read_json
from qkattn.storage.sinks import SINKS
from qkattn.train.loop import train
from qkattn.train.optimizer import OPTIMIZERS, SCHEDULES
from tests import studies
from tests.convert.test_published import make_tensors, write_gpt2
from tests.data.datasets import contents, write_texts
from tests.experiments.conftest import save_model
from tests.lanes import slow_except
from tests.processes import ROOT, other_modes, start_python, umask, wait_for_results
from tests.test_readme import README, between

SCRIPTS = [name for name in shipped('experiments') if not name.startswith('_')]
CONFIGS = {'train': Config, 'ablate': Study}


@pytest.fixture
def run(small_run, tmp_path):
    """`small_run`, also as run/ in the working directory."""
    (tmp_path / 'run').symlink_to(small_run.path)
    return small_run


# Help, and what nobody reads


def test_help_lists_all_that_can_be_run(printed):
    text = printed('--help')
    assert text == printed()
    assert printed('--version') == f'{__version__}\n'
    assert all(len(line) <= 80 for line in text.splitlines())
    listed = ' '.join(text.split())
    for path in (*ROOT.glob('experiments/[a-z]*.py'), *ROOT.glob('configs/**/[a-z]*.py')):
        name = path.relative_to(ROOT).with_suffix('').as_posix().partition('/')[2]
        assert f' {name} {path.read_text().splitlines()[0].strip(chr(34))}' in listed


def flag_entries(text):
    """The text of each flag in a help text, on one line: {'out': 'where to write; default ...'}."""
    texts = {}
    for part in f'\n{text}'.split('\n  --')[1:]:
        name, _, description = part.partition(':')
        texts[name] = ' '.join(description.split('\n\n')[0].split())
    return texts


@pytest.mark.parametrize('name', SCRIPTS)
def test_every_setting_is_explained(printed, name):
    text = printed(name, '-h')
    assert all(len(x) <= 80 for x in text.splitlines())
    # The explanation of each flag, by its name.
    flags = flag_entries(text)
    assert flags
    assert all('; default ' in about for about in flags.values())
    assert ('config' in flags) == (name in ('train', 'ablate', 'prepare_data'))
    if name not in CONFIGS:
        return

    # Fields of a config have the explanation of their definition.
    for field, setting in settings(CONFIGS[name]).items():
        head, _, rest = flags[f'config.{field}'].partition('; default ')
        description = rest.partition(' Names: ')[0]
        assert head
        assert description == f'{setting.default!r} {" ".join(setting.doc.split())}'


REGISTRIES = {
    'model.score': [SCORES],
    'model.value': [VALUES],
    'model.normalizer': [NORMALIZERS],
    'data.name': [CORPORA, PROBES],
    'data.tokenizer': [TOKENIZERS],
    'data.task': [TASKS],
    'optimizer.name': [OPTIMIZERS],
    'optimizer.schedule': [SCHEDULES],
    'train.sinks': [SINKS],
}


@pytest.mark.parametrize(('name', 'prefix'), [('train', ''), ('ablate', 'base.')])
def test_help_lists_the_names_of_every_registry(printed, name, prefix):
    listed = {
        field: about.partition(' Names: ')[2]
        for field, about in flag_entries(printed(name, '-h')).items()
        if ' Names: ' in about
    }
    expected = {
        f'config.{prefix}{field}': ', '.join(itertools.chain(*registries)) + '.'
        for field, registries in REGISTRIES.items()
    }
    assert listed == expected


def test_settings_with_fixed_values_have_those_of_the_code_behind_them():
    fields = settings(Config)
    for field, known in (
        ('model.kind', MODEL_KINDS),
        ('model.activation', ACTIVATIONS),
        ('model.kernel', KERNELS),
        ('model.remat', ['none', *REMAT_POLICIES]),
    ):
        assert typing.get_args(fields[field].kind) == tuple(known), field


@pytest.mark.parametrize('command', [('variants', '--markdown'), ('train', '--help')])
def test_a_script_whose_output_nobody_reads_ends_without_a_message(
    script_here, unread, monkeypatch, command
):
    monkeypatch.setattr(sys, 'stdout', unread)
    done = script_here(*command)
    assert (done.returncode, done.stderr) == (EXIT_UNREAD, '')


def test_a_character_that_the_encoding_lacks_is_escaped():
    source = 'from qkattn.jobs import output; output.escape_unencodable(); print("±")'
    assert wait_for_results([start_python(source, PYTHONIOENCODING='ascii')]) == [
        (0, '\\xb1\n', '')
    ]


# Signals before the main function of a script runs

# What the sentence on an interrupt adds where the same command goes on.
RESUMES = '; the same command resumes from what is saved'

# Put before jax on the path: importing jax takes a minute and swallows what interrupts it.
SLOW_IMPORT = """
import sys, time
class Waiting:
    def find_spec(self, name, *_):
        if name == 'jax':
            print('importing', file=sys.stderr, flush=True)
            try:
                time.sleep(60)
            except BaseException:
                pass  # as extension modules do
sys.meta_path.insert(0, Waiting())
"""


@pytest.mark.parametrize(
    ('command', 'number', 'code', 'sentence'),
    [
        ('ablate', signal.SIGTERM, 75, 'stopped with nothing to save; the same command resumes'),
        ('ablate --dry_run', signal.SIGINT, 130, 'interrupted'),
    ],
)
def test_a_signal_ends_the_imports_of_a_resumable_script_in_one_line(
    command, number, code, sentence, tmp_path
):
    """The signal comes while `SLOW_IMPORT`, which swallows interrupts, is importing jax."""
    (tmp_path / 'sitecustomize.py').write_text(SLOW_IMPORT)
    process = subprocess.Popen(
        [sys.executable, '-m', 'qkattn', *command.split()],
        cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': f'{tmp_path}{os.pathsep}{ROOT}'},
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        while not (line := process.stderr.readline()).startswith('importing'):
            assert line
        process.send_signal(number)
        errors = process.communicate(timeout=60)[1]
    assert (process.returncode, errors) == (code, f'{sentence}\n')


@pytest.mark.parametrize(
    ('command', 'interrupted_call', 'advice'),
    [
        ('variants', 'study.variant_tables.text', ''),
        ('train', 'train.program_cache.keep_programs', RESUMES),
        ('train --config=run.py --dry_run', 'train.program_cache.keep_programs', ''),
        ('claims', 'train.program_cache.keep_programs', RESUMES),
        ('claims --dry_run', 'train.program_cache.keep_programs', ''),
    ],
)
def test_an_interrupt_has_no_traceback(script_here, monkeypatch, command, interrupted_call, advice):
    monkeypatch.setattr(f'qkattn.{interrupted_call}', Mock(side_effect=KeyboardInterrupt))
    done = script_here(*command.split())
    assert (done.returncode, done.stderr) == (130, f'interrupted{advice}\n')


def test_resumable_scripts_are_those_that_exit_on_a_signal():
    sources = {name: path.read_text() for name, path in shipped('experiments').items()}
    leaving = {name for name, text in sources.items() if '\n@signals.exit_on_signal' in text}
    assert leaving == {*signals.RESUMABLE}


# Runs and their models

RECALL = """
--config.data.name=recall(pairs=2) --config.data.eval_sequences=8 --config.model.context=7
--config.model.num_layers=1 --config.model.num_heads=2 --config.model.d_model=16
--config.optimizer.warmup_steps=2 --config.train.num_steps=20 --config.train.batch_size=4
--config.train.steps_per_dispatch=5 --config.train.log_every=5 --config.train.eval_every=10
--config.train.checkpoint_every=20 --config.train.lifting=map --config.trials.seeds=(0,1)
--config.train.metrics=('confidence:top(k=3)',)
"""


def test_training_prints_where_its_results_are(script_here, printed, tmp_path, outside):
    done = script_here('train', '--config=run.py', '--workdir=out', *RECALL.split())
    assert done.returncode == 0, done.stderr
    loss = r'\d\.\d{4} to \d\.\d{4} nats/token'
    for logged in (
        *(f'step {step}/20: validation loss {loss}\n' for step in (10, 20)),
        f'train: step 20/20, validation loss {loss}, .* 100%, loss {loss}',
    ):
        assert re.search(f'^{logged}', done.stderr, re.MULTILINE)
    values = r'^  validation loss \d\.\d{4} nats/token, .* top 3 \d+\.\d\d %'
    assert re.search(values, done.stdout, re.MULTILINE)
    assert max(map(len, done.stdout.splitlines())) <= 100
    *_, results, metrics, checkpoints, export = map(str.split, done.stdout.splitlines())
    places = (results, metrics, checkpoints)
    assert all((tmp_path / place).exists() for _, place in places)
    (outside / 'confidence.py').unlink()  # which models do not need
    del sys.modules['confidence']
    assert export[:4] == ['to', 'export', 'qkattn', 'convert']
    assert export[-1] == '--out=DIRECTORY'
    printed('convert', *export[4:-1], '--out=exported')
    assert (tmp_path / 'exported/model.safetensors').exists()


def test_a_run_is_counted_without_compiling(printed, tmp_path, monkeypatch):
    monkeypatch.setattr(Lowered, 'compile', lambda *_, **__: pytest.fail('it compiles'))
    lines = [
        ' '.join(line.split())
        for line in printed('train', '--config=small', '--dry_run').splitlines()
    ]
    assert lines[4:] == [
        'parameters 434,816 of each trial',
        'trials 3',
        'tokens per step 3,072 of all trials',
        'steps 600',
        'tokens 1,843,200 of all trials and steps',
        'FLOPs 5,073,430,118,400 of all trials and steps: 5.07e+12',
    ]

    # No run directory is made; run.py and study.py are configs of the fixture.
    assert {path.name for path in tmp_path.iterdir()} == {'run.py', 'study.py'}


@pytest.mark.slow
def test_the_arms_of_a_study_are_described_on_a_pod(printed):
    text = printed('ablate', '--config=study.py', '--dry_run=h100-1x2', '--config.base.mesh.data=2')
    rows = text.split('\n\n')[1].splitlines()
    assert [row.split()[:3] for row in rows[3:5]] == [
        ['qk/vo', '3', '192'],
        ['shared_qk/vo', '3', '192'],
    ]
    assert 'compiled by XLA for CPU, partitioned over 2 fake devices' in rows


@pytest.mark.slow
def test_a_config_is_described_on_a_pod_that_is_not_there(printed, tmp_path):
    smaller = ('--config.model.num_layers=1', '--config.train.lifting=map')
    pod = ('--dry_run=v5e-2x4', '--config.mesh.data=8')
    text = printed('train', '--config=small', *pod, *smaller)
    lines = [' '.join(line.split()) for line in text.splitlines()]
    assert lines[0] == 'v5e-2x4: 8 TPU chips'
    assert 'parameters 237,952 of 3 trials each' in lines
    assert f'parameters {3 * 4 * 237_952:,} 2.72 MiB' in lines
    assert any(line.startswith(f'HBM per device {2**34:,} 16.00 GiB,') for line in lines)
    assert {path.name for path in tmp_path.iterdir()} == {'run.py', 'study.py'}


def test_a_run_continues_a_prompt(script_here, printed, run):
    def generate(*flags, num_tokens=12):
        return printed('generate', '--source=run', f'--num_tokens={num_tokens}', *flags)

    done = script_here('generate', 'run')
    assert done.stderr.splitlines()[-1] == (
        'run: qk/vo, step 12, trial 0 of 2 (seed=0 learning_rate=0.01 weight_decay=0.0005)'
    )
    # By default, a document of 16 tokens: the context holds the separator and all but the last.
    assert done.stdout == generate('--temperature=0.8', num_tokens=16)
    assert done.stdout.strip()

    text = generate('--prompt=def f', '--seed=5')
    assert text.startswith('def f')
    assert len(text.encode()) > len('def f') + 1
    assert generate('--prompt=def f', '--seed=5', '--trial=1') != text
    assert generate('--prompt=def f') != text  # seed 0

    ids = generate('--prompt_tokens=100 101 102 32 102').split()
    assert len(ids) == 12


def test_a_converted_run_generates_the_same_text(refusal, printed, run):
    flags = ('convert', '--source=run', '--trial=1', '--apply=merge', '--out=merged')
    # It is written beside the change of the logits.
    text = printed(*flags)
    assert 'merge: merged/vo, largest relative logit change' in text
    assert float(text.split('logit change ')[1].split()[0]) < 1e-4
    assert 'without optimizer state' in text
    greedy = (
        '--prompt=def f(',
        '--num_tokens=10',
        '--temperature=0',
        f'--data={run.config.data.name}',
    )
    text = printed('generate', '--source=run', '--trial=1', *greedy)
    assert printed('generate', '--source=merged', *greedy) == text
    assert '--out=merged is not empty' in refusal(*flags)
    # The reference is the trial that was converted, not the one of the same index.
    text = printed('analyze', '--source=merged', '--reference=run')
    assert 'drift from run, trial 1: qk/vo\n' in text

    # Without --out, a conversion is described; one that does not fit is refused.
    text = printed('convert', '--source=run', '--apply=truncate(rank=2)')
    assert 'layer 0: truncate(rank=2) leaves out' in text
    assert 'wrote' not in text
    sentence = refusal('convert', '--source=run', '--apply=merge', '--apply=unmerge(rank=1)')
    assert 'unmerge(rank=1) cannot be applied: layer 0' in sentence


def test_a_run_written_for_transformers_generates_the_same_text(printed, run, tmp_path):
    text = printed('convert', 'run', '--layout=transformers', '--out=gpt2')
    assert text.splitlines()[-1] == 'wrote gpt2, a GPT-2 in the layout of transformers'
    names = {'model.safetensors', 'config.json', 'tokenizer.json', 'tokenizer_config.json'}
    assert {path.name for path in (tmp_path / 'gpt2').iterdir()} == names
    greedy = ('--prompt=def f(', '--num_tokens=10', '--temperature=0')
    written = printed('generate', 'gpt2', *greedy, f'--data={run.config.data.name}')
    assert written == printed('generate', 'run', *greedy)
    text = printed('convert', 'gpt2', '--layout=transformers', '--out=again')
    assert text.splitlines()[-1].startswith('without tokenizer.json: the source is not a run')


def test_nothing_is_written_where_an_exact_conversion_moves_the_logits(
    refusal, tmp_path, monkeypatch
):
    def double_w_o(layer):
        layer.value.w_o_NHD[...] *= 2
        return layer

    sizes = {'d_model': 16, 'num_layers': 1, 'context': 8, 'vocab_size': 20}
    save_model(tmp_path / 'source', ModelConfig(norm_position='post', **sizes))

    # merge_vo is replaced with a mistake; fold_gains refuses post-norm models by itself.
    monkeypatch.setitem(CONVERSIONS, 'merge_vo', Conversion(double_w_o, 'OV'))
    for conversion, message in (
        ('merge_vo', 'merge_vo cannot be applied: it changes logits by '),
        ('fold_gains', 'fold_gains cannot be applied: in a post-norm model'),
    ):
        flags = ('--apply=merge', f'--apply={conversion}', '--out=no')
        assert message in refusal('convert', '--source=source', *flags)
        assert not (tmp_path / 'no').exists()


def test_a_run_is_measured_on_its_own_data_or_on_a_text(refusal, printed, run, tmp_path):
    text = printed('analyze', 'run')
    assert text.startswith('run, trial 0: qk/vo, 1 layer\n')
    assert 'attention 0' in text
    assert 'drift' not in text

    # A text, and the run as its own reference, from which its matrices do not drift.
    flags = ('--text=def f(x):', '--trial=1', '--reference=run', '--out=out')
    text = printed('analyze', '--source=run', *flags)
    out = tmp_path / 'out'
    table = pd.read_csv(out / 'analysis.csv')
    written = read_json(out / 'analysis.json', {})
    assert len(table) == len(written['rows'])
    assert (written['step'], written['trial']) == (12, 1)
    values = {key: rows['value'] for key, rows in table.groupby(['quantity', 'subject'])}
    assert (values['drift', 'A'] == 0).all()
    assert (values['drift', 'B'] == 0).all()

    # The printed table has means over heads, but of the induction score the best head.
    means = [values[key].mean() for key in (('effective_rank', 'A'), ('entropy', 'pattern'))]
    best = values['induction_score', 'pattern'].max()
    line = text.splitlines()[-2].split()
    assert {f'{value:.3g}' for value in (*means, best)} <= {*line}
    names = 'singular_values_A singular_values_B heads_A heads_B heads_pattern maps'
    assert {path.stem for path in out.glob('*.png')} == {*names.split()}
    assert 'already holds an analysis' in refusal('analyze', '--source=run', '--out=out')


@pytest.mark.slow
def test_models_without_matrices_or_training_data_are_analyzed(printed, tmp_path):
    sizes = {'d_model': 16, 'num_layers': 2, 'num_heads': 2, 'context': 12, 'vocab_size': 257}
    # A score that is no bilinear form.
    save_model(tmp_path / 'nonlinear', ModelConfig(score='nonlinear_query', **sizes))
    text = printed('analyze', '--source=nonlinear', '--tokens=1 2 3')
    assert 'attention 0, attention 1: not bilinear, so there is no matrix A[n]' in text
    # An encoder-decoder, with cross-attention.
    save_model(tmp_path / 'pair', ModelConfig(kind='encoder_decoder', **sizes))
    text = printed('analyze', 'pair', '--out=pair_out')
    assert 'cross_attention 1' in text
    assert 'encoder/attention 0' in text
    assert (tmp_path / 'pair_out/singular_values_A_cross.png').exists()
    # A published GPT-2, without data: its patterns on text, such as their entropy, are unknown.
    write_gpt2(tmp_path / 'gpt2', make_tensors())
    text = printed('analyze', 'gpt2')
    assert 'induction' in text
    assert 'entropy' not in text


@pytest.mark.slow
def test_prepared_tokens_are_trained_on(printed, tiny, tmp_path):
    write_texts(tmp_path / 'files')
    data = ('--config.data.name=text', '--config.data.path=files')
    flags = ('prepare_data', '--config=run.py', '--out=made', *data)
    made = printed(*flags, '--config.data.tokenizer=characters')
    tokens = '--config.data.name=tokens --config.data.path=made'
    train_on_them = f'qkattn train --config=run.py {tokens} --workdir=DIRECTORY'
    assert made.splitlines()[-1] == f'to train: {train_on_them}'

    # Training on the files needs no other data (/absent does not exist) and changes no file.
    before = contents(tmp_path / 'made')
    data = {'name': 'tokens', 'path': 'made', 'data_dir': '/absent'}
    (result, _) = train(tiny(data=data, model={'num_layers': 1}), tmp_path / 'w')
    index = json.loads(before['tokens.json'])
    expected = {split: info['fingerprint'] for split, info in index['splits'].items()}
    assert result['data']['fingerprints'] == expected
    assert result['data']['tokenizer'] == index['tokenizer_name']
    assert result['val_bits_per_byte'] > 0
    assert result['data']['unigram_loss'] > 1
    assert printed('generate', 'w', '--prompt=train ', '--num_tokens=8').startswith('train ')
    assert contents(tmp_path / 'made') == before


SMALL = (
    'model.num_layers=1 model.num_heads=2 model.d_model=16 model.context=16 '
    'optimizer.warmup_steps=2 train.num_steps=5 train.batch_size=4 train.steps_per_dispatch=5 '
    'train.log_every=5 train.eval_every=5 train.checkpoint_every=5 train.lifting=map '
    'data.eval_sequences=4'
)
SETTINGS_OF_TOKENS = [
    'data.tokenizer=characters',
    'data.tokenizer=bpe data.tokenizer_size=300 data.lowercase=True',
    'data.tokenizer=nibbles:Nibbles(high_first=False)',
    'model.kind=encoder',
    'model.vocab_size=512',
]


@pytest.mark.parametrize(
    'settings',
    slow_except(
        ['data.tokenizer=bpe data.tokenizer_size=300 data.lowercase=True'], SETTINGS_OF_TOKENS
    ),
)
def test_the_command_that_prepare_data_prints_trains(printed, outside, tmp_path, settings):
    """It repeats what each config needs beyond the tokens' name and path, such as the vocabulary.

    The config of these `settings` is written to own.py, its texts are tokenized, and the command
    that is printed last is run as it stands.
    """
    write_texts(tmp_path / 'my files')
    fields = [*SMALL.split(), 'data.name=text', *settings.split()]
    lines = ''.join(
        f'    config.{name} = {value}\n' for name, value in map(name_and_literal, fields)
    )
    (tmp_path / 'own.py').write_text(OWN_CONFIG.format(lines=lines))
    flags = ('--config=own.py', '--config.data.path=my files', '--out=my tokens')
    last = printed('prepare_data', *flags).splitlines()[-1]
    assert last.startswith('to train: ')
    command, name, *arguments = shlex.split(last.removeprefix('to train: '))
    assert (command, name) == ('qkattn', 'train')
    assert arguments[-1] == '--workdir=DIRECTORY'
    assert 'validation loss' in printed('train', *arguments)


OWN_CONFIG = """
from qkattn.config import Config, to_config_dict

def get_config():
    config = to_config_dict(Config())
{lines}    return config
"""


def name_and_literal(setting):
    """'a.b=1' as its name and its value, as Python writes it."""
    name, _, value = setting.partition('=')
    is_number = value.isdecimal() or value == 'True'
    return name, value if is_number else repr(value)


def test_explore_prints_the_worked_equations_of_a_variant(printed):
    pytest.importorskip('sympy', reason="pip install -e '.[explore]'")
    expected = worked(Bench('shared_qk/no_vo'))
    assert printed('explore', '--variant=shared_qk/no_vo') == expected


def test_the_package_that_a_bench_needs_is_named(refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, 'sympy', None)
    sympy.cache_clear()
    sentence = refusal('explore', '--variant=qk/vo')
    sympy.cache_clear()
    assert sentence == "explore needs the package sympy: pip install -e '.[explore]'"


NOT_PREPARED = [
    'name=tiny_shakespeare',
    'name=tfds:lm1b',
    'name=hf:owner/set',
    'name=tokens path=absent',
]


@pytest.mark.parametrize('data', slow_except(NOT_PREPARED[:1], NOT_PREPARED))
def test_a_dry_run_says_that_data_are_not_prepared_here(printed, tmp_path, monkeypatch, data):
    """It neither downloads nor prepares them, and makes all other checks."""
    monkeypatch.setattr(requests, 'get', lambda *_, **__: pytest.fail('it downloads'))
    monkeypatch.setenv('QKATTN_DATA', str(tmp_path / 'data'))
    flags = [f'--config.base.data.{setting}' for setting in data.split()]
    warning = 'WARNING data are not checked, as they are not prepared on this machine: '
    assert warning in printed('ablate', '--config=study.py', '--dry_run', *flags)
    assert not (tmp_path / 'data').exists()


def test_a_dry_run_says_that_a_further_corpus_is_not_prepared_here(printed, data_dir, monkeypatch):
    """The data that the study trains on are prepared."""
    monkeypatch.setattr(requests, 'get', lambda *_, **__: pytest.fail('it downloads'))
    monkeypatch.setenv('QKATTN_DATA', data_dir)
    flags = ['--config.base.data.evaluate=("tiny_shakespeare",)', '--config.base.data.name=stdlib']
    warning = "not prepared on this machine: data.evaluate='tiny_shakespeare': "
    assert warning in printed('ablate', '--config=study.py', '--dry_run', *flags)


# Studies


@pytest.fixture
def study(tmp_path):
    """A written study of one arm, whose parameter and FLOP counts are those of its config."""
    config = studies.run_config(studies.trial_record('qk/vo'))
    parameters = cost.count(config.model)
    counts = {'parameters': parameters, 'target_parameters': parameters['total'], 'residual': 0.0}
    for count in (cost.flops_per_token, cost.cache_floats_per_token):
        counts[count.__name__] = count(config.model)
    records = [studies.trial_record('qk/vo', seed=seed, **counts) for seed in (0, 1)]
    return studies.write_study(tmp_path / 'study', studies.named_by_hash(records))


def test_a_wrong_acceptance_is_refused(study, refusal):
    for flags, message in (
        (['--accept=commits'], "accept=commits needs a reason, why=''"),
        (['--accept=commits,dirty', '--why=x'], "accept='dirty' must be uncommitted or commits"),
        (['--why=x'], "--why='x' is a reason without --accept"),
        (['--accept=commits', '--why=x', '--export=.'], 'holds something other than an export of'),
    ):
        assert message in refusal('report', '--study=study', *flags)
    assert not ledger.read(study / 'ledger.jsonl').accepted


def test_a_study_is_kept_with_what_was_accepted(study, printed):
    accept = ('--accept=uncommitted,commits', '--why=docs alone differ')
    printed('report', '--study=study', *accept, '--export=kept/study')
    kept = ledger.read(study.parent / 'kept/study/ledger.jsonl')
    assert kept.accepted == dict.fromkeys(('uncommitted', 'commits'), 'docs alone differ')
    text = printed('verify', '--results=kept', '--pages=')
    assert 'numbers agree with the logs, the costs of 1 run with the configs' in text


def test_counts_that_the_config_does_not_give_are_refused(study, refusal):
    results = studies.read_lines(study / 'results.jsonl')
    for name in ('flops_per_token', 'cache_floats_per_token'):
        lines = [result | {name: result[name] + 1} for result in results]
        studies.write_lines(study / 'results.jsonl', lines)
        sentence = refusal('verify', '--results=.', '--pages=')
        assert f'has {name} ' in sentence
        assert 'but its config gives' in sentence


def test_an_ablation_trains_what_is_missing(script_here, tmp_path, monkeypatch):
    """First the baseline, then a variant from outside; each is trained once."""
    flags = ('--config=study.py', '--workdir=out', '--workers=1')
    with umask(0o002):
        first = script_here('ablate', *flags, '--config.variants=("qk/vo",)')
    assert first.returncode == 0, first.stderr
    out = tmp_path / 'out'
    assert not other_modes(out, 0o002)
    assert 'orbax' not in first.stderr
    assert 'Traceback' not in first.stderr
    assert variants_and_seeds(out) == [('qk/vo', seed) for seed in (0, 1, 2)]
    (finished,) = out.glob('runs/*/result.json')
    written = finished.stat().st_mtime_ns

    variant = outside_variant(tmp_path, monkeypatch)
    second = script_here('ablate', *flags, f'--config.variants=("qk/vo", "{variant}")')
    assert second.returncode == 0, second.stderr
    assert finished.stat().st_mtime_ns == written
    # The finished run is not even opened.
    assert len(read_json(finished.with_name('provenance.json'), {})['starts']) == 1
    assert variants_and_seeds(out) == [(v, seed) for v in ('qk/vo', variant) for seed in (0, 1, 2)]
    results = studies.read_lines(out / 'results.jsonl')
    assert all(r['status'] == 'finished' and r['data']['fingerprints'] for r in results)
    assert 'hostname' not in results[0]['provenance']
    assert_reported(out, second.stdout, variant)


@pytest.mark.slow
def test_two_workers_share_an_ablation(script_here, tmp_path):
    done = script_here('ablate', '--config=study.py', '--workdir=out', '--workers=2')
    assert done.returncode == 0, done.stderr
    assert 'small: workers on this machine: 2' in done.stderr
    out = tmp_path / 'out'
    expected = [(v, seed) for v in ('qk/vo', 'shared_qk/vo') for seed in (0, 1, 2)]
    assert variants_and_seeds(out) == expected
    for path in out.glob('runs/*/provenance.json'):
        assert len(read_json(path, {})['starts']) == 1
    assert_reported(out, done.stdout, 'shared_qk/vo')


def variants_and_seeds(study):
    results = studies.read_lines(study / 'results.jsonl')
    return [(result['variant'], result['trial']['seed']) for result in results]


def outside_variant(directory, monkeypatch):
    """The import path of the example of the README."""
    code = between(README, '<!-- example: signed_diagonal.py -->\n```python', '```')
    (directory / 'signed_diagonal.py').write_text(code)
    monkeypatch.syspath_prepend(directory)
    return 'signed_diagonal:SignedDiagonal/vo'


def assert_reported(study, printed, variant):
    """The report is written, and printed in lines that a terminal shows whole."""
    assert (study / 'report.html').stat().st_size > 10_000
    assert variant in printed
    assert 'report:' in printed
    report = printed.split('study small')[1].split('all columns')[0]
    assert max(map(len, report.splitlines())) <= 100


@pytest.mark.parametrize('measure', slow_except([False], [False, True]))
def test_a_dry_run_writes_nothing(printed, tmp_path, monkeypatch, measure):
    """It compiles nothing unless it is to measure the time."""
    if not measure:
        monkeypatch.setattr(Lowered, 'compile', lambda *_, **__: pytest.fail('it compiles'))
    text = printed('ablate', '--config=study.py', '--dry_run', *['--measure'] * measure)
    assert 'small: 2 arms' in text
    assert 'residual' in text
    # 3 trials of 40 steps of 4 rows of 16 tokens, for each of two runs.
    time = r' +0:00:\d\d' if measure else ''
    assert re.search(rf'\ntotal +2 +6 +1.54e\+04 +\S+{time}\n', text)
    assert {p.name for p in tmp_path.iterdir() if p.suffix != '.py'} <= {'__pycache__'}


TUNED = (
    '--config.tuning.seeds=(100,)',
    '--config.base.trials.learning_rates=(0.001, 0.002, 0.004)',
    '--config.base.data.eval_sequences=2048',  # of 100 documents or more, as verdicts need
)
# Whether code is uncommitted, the flags of a study, whether there is a warning.
UNCOMMITTED = [(True, TUNED, True), (False, TUNED, False), (True, (), False)]


@pytest.mark.parametrize(('dirty', 'flags', 'warned'), slow_except(UNCOMMITTED[:1], UNCOMMITTED))
def test_a_tuned_study_of_uncommitted_code_is_warned_of(
    script_here, monkeypatch, dirty, flags, warned
):
    monkeypatch.setattr(run_directory, 'git_state', lambda: {'dirty': dirty})
    done = script_here('ablate', '--config=study.py', '--dry_run', *flags)
    assert done.returncode == 0, done.stderr
    warning = 'files are changed or untracked, which withholds verdicts'
    assert (warning in done.stderr) == warned


# Translation


class Translator(NamedTuple):
    path: Path
    results: list[dict]


@pytest.fixture(scope='session')
def translator(tiny, tmp_path_factory):
    """A run that translates words to their reversal; its second trial, at 1e-6, learns nothing."""
    path = tmp_path_factory.mktemp('translate')
    rng = np.random.default_rng(0)
    words = sorted({''.join(rng.choice(list('abcdefgh'), rng.integers(2, 6))) for _ in range(4000)})
    rng.shuffle(words)
    for split, lines in (('validation', words[:100]), ('train', words[100:])):
        (path / f'{split}.en').write_text('\n'.join(lines).upper())
        (path / f'{split}.xx').write_text('\n'.join(line[::-1] for line in lines))
    data = {'name': 'parallel', 'path': str(path), 'languages': 'en-xx', 'eval_sequences': 64}
    data |= {'data_dir': str(path / 'cache'), 'tokenizer': 'characters', 'lowercase': True}
    steps = {'num_steps': 100, 'steps_per_dispatch': 50, 'log_every': 50, 'eval_every': 100}
    steps |= {'checkpoint_every': 100, 'batch_size': 32, 'accumulation': 1, 'lifting': 'vmap'}
    config = tiny(
        model={'kind': 'encoder_decoder', 'num_layers': 1, 'vocab_size': 16, 'scan_unroll': 1},
        data=data,
        optimizer={'warmup_steps': 2},
        train=steps,
        trials={'seeds': (0,), 'learning_rates': (1e-2, 1e-6), 'weight_decays': (0.0,)},
        decode={'beam': 2},
    )
    return Translator(path / 'run', train(config, path / 'run'))


def test_reversal_is_learned_from_files(translator):
    result, untrained = translator.results
    assert result['val_exact_match'] >= 0.85
    assert result['val_chrf'] > 85
    assert result['val_accuracy'] > 0.85
    assert result['val_loss'] < 0.3
    assert untrained['val_exact_match'] == 0
    # There are no files of a test split.
    assert result['test_loss'] is None
    assert result['test_accuracy'] is None
    assert 'test_bleu' not in result


def test_text_is_translated_line_by_line(printed, translator, tmp_path):
    translate_run = ('translate', f'--source={translator.path}')
    assert printed(*translate_run, '--text=bad\ncafe') == 'dab\nefac\n'
    # The run lower-cases its text. Lines without words stay empty, and the last needs no line end.
    (tmp_path / 'in.en').write_text('\ufeffBAD\n\n   \ncafe')
    assert printed(*translate_run, '--file=in.en') == 'dab\n\n\nefac\n'
    assert 'efac' not in printed(*translate_run, '--text=bad\ncafe', '--trial=1', '--beam=1')


def test_a_line_ends_at_a_line_feed_alone(printed, translator, tmp_path, monkeypatch):
    """Line i of the output belongs to line i of the input, whatever either holds."""
    monkeypatch.setattr(Tokenizer, 'encode', lambda self, text: texts.append(text) or [0])
    monkeypatch.setattr(Tokenizer, 'decode', lambda self, ids: 'x\ny')
    for content, expected in (
        (b'bad\rcafe\nfed\n', ['bad\rcafe', 'fed']),
        (b'bad\r\n\r\ncafe\r\n', ['bad', 'cafe']),
        ('a\x0bb\x0cc\x1cd\x85e\u2028f'.encode(), ['a\x0bb\x0cc\x1cd\x85e\u2028f']),
    ):
        (tmp_path / 'in.en').write_bytes(content)
        texts = []
        output = printed('translate', f'--source={translator.path}', '--file=in.en')
        assert texts == expected
        assert output.count('\n') == content.rstrip(b'\n').count(b'\n') + 1


def test_translate_scores_a_split_as_the_run_did(printed, translator):
    path, results = translator
    scores = json.loads(printed('translate', f'--source={path}', '--score=validation', '--trial=1'))
    assert scores['split'] == 'validation'
    assert scores['beam'] == 2
    for name in ('bleu', 'chrf', 'exact_match', 'num_sentences'):
        assert scores[name] == pytest.approx(results[1][f'val_{name}'])


def test_a_wrong_translation_is_one_sentence(refusal, translator):
    for flags, message in (
        ([], 'must hold at least one sentence'),
        (['--text=a', '--file=in.en'], '--text and --file exclude each other'),
        (['--text=abcdefghabcdefgha'], 'source 1 has 17 tokens, but model.source_context=16'),
        (['--score=test'], '--score=test must be one of train, validation'),
        (['--score=validation', '--text=a'], '--score and --text exclude each other'),
    ):
        assert message in refusal('translate', f'--source={translator.path}', *flags)


@pytest.fixture
def run_whose_texts_have_changed(translator):
    """The path of the run; its training files have one more word, of letters it never saw."""
    files = [translator.path.parent / f'train.{language}' for language in ('en', 'xx')]
    texts = [file.read_text() for file in files]
    for file, text in zip(files, texts, strict=True):
        file.write_text(f'{text}\nzebu')
    yield translator.path
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)


def test_a_vocabulary_that_the_run_did_not_have_is_refused(
    script_here, run_whose_texts_have_changed
):
    done = script_here('translate', f'--source={run_whose_texts_have_changed}', '--text=a')
    assert done.returncode == 2
    assert 'was trained with the tokenizer characters-' in done.stderr
