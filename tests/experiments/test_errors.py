"""Bad input ends in one sentence and exit code 2, before anything compiles."""

import pytest

from qkattn.jobs.display import Progress

LONG = 'x' * 300  # a file name has at most 255 bytes
CASES = [
    ('train', ['--config=run.py', f'--workdir={LONG}'], 'cannot be used (File name too long)'),
    ('ablate', ['--config=study.py', f'--workdir={LONG}/w'], 'cannot be used (File name too long)'),
    ('train', ['--config=run.py', '--workdir=w', '--config.train.init_from=' + LONG], 'init_from'),
    ('train', [f'--config={LONG}.py', '--workdir=w'], 'cannot be loaded'),
    ('train', ['--config=smal', '--workdir=w'], 'did you mean --config=small?'),
    ('ablate', ['--config=claims/maskd:cpu', '--workdir=w'], '--config=claims/masked?'),
    ('train', ['--config=run.py', '--workdir=w', '--config.train.num_steps=1.5'], "'1.5'"),
    ('report', [f'--study={LONG}'], LONG),
    ('verify', [f'--results={LONG}'], LONG),
    ('translate', [f'--source={LONG}', '--text=a'], LONG),
    ('generate', [f'--source={LONG}'], LONG),
    ('convert', [f'--source={LONG}', '--apply=merge'], LONG),
    ('train', ['--config=run.py', '--workdir=w', '--config.model.vocab_size=2147483647'], 'GiB'),
    (
        'train',
        ['--config=run.py', '--workdir=w', '--config.model.window=2147483648'],
        'below 2**31',
    ),
    ('train', ['--config=run.py', '--workdir=w', '--config.model.score=..:x'], "'..:x' must be wr"),
    ('ablate', ['--config=study.py', '--dry_run', '--config.variants=("..:x/vo",)'], 'must be wr'),
    ('ablate', ['--config=study.py', '--dry_run', '--config.looks=' + '-' * 20000 + '1'], 'Memory'),
    ('ablate', [], '--config=FILE.py is required'),
    ('ablate', ['--config=missing.py'], 'missing.py'),
    ('ablate', ['--config=run.py', '--workdir=w'], 'not a Study; run it with qkattn train'),
    ('train', ['--config=study.py', '--workdir=w'], 'not a Config; run it with qkattn ablate'),
    ('ablate', ['--config=study.py'], '--workdir=DIRECTORY is required'),
    ('ablate', ['--config=study.py', '--config.variant=x'], 'variant'),
    ('ablate', ['--config=study.py', '--config.fill=heads', '--dry_run'], "fill='heads'"),
    ('ablate', ['--config=study.py', '--workdir=s3://bucket/x'], 's3://bucket/x is a URL'),
    ('ablate', ['--config=study.py', '--workdir=/proc/x'], '/proc/x cannot be used'),
    ('ablate', ['--config=study.py', '--workdir=/proc'], 'workdir=/proc cannot be used'),
    ('ablate', ['--config=study.py', '--lease_expiry=0', '--dry_run'], '--lease_expiry=0.0 must'),
    ('ablate', ['--config=study.py', '--config.tuning.seeds=(7,)', '--dry_run'], 'must be a grid'),
    ('ablate', ['--config=study.py', '--workdir=w', '--config.base.data.name=books'], 'books'),
    ('report', ['--study=absent'], "'absent' does not exist"),
    ('report', ['--study=study.py'], "'study.py' does not exist"),
    ('verify', ['--results=absent'], '--results=absent contains no study directory'),
    ('train', ['--config=run.py', '--workdir=s3://bucket/x'], 's3://bucket/x is a URL'),
    ('prepare_data', ['--config=run.py'], '--out=DIRECTORY is required'),
    ('prepare_data', ['--config=run.py', '--out=w', '--config.data.name=books'], 'books'),
    ('prepare_data', ['--out=w'], '--config=FILE.py is required'),
    ('prepare_data', ['--config=run.py', '--out=gs://b/x'], '--out=gs://b/x is a URL'),
    ('prepare_data', ['--config=run.py', '--out=/proc/x'], '/proc/x cannot be written'),
    ('prepare_data', ['--out=absent', '--verify'], 'absent/index.json cannot be read'),
    ('train', ['--config=run.py', '--config.model.width=3'], 'width'),
    ('train', ['--config=run.py', '--config.modle.d_model=3'], 'mean --config.model.d_model?'),
    ('train', ['--config=run.py', '--noconfig.model.biasses'], 'mean --config.model.biases?'),
    ('train', ['--config=run.py', '--config.num_steps', '9'], 'mean --config.train.num_steps?'),
    ('ablate', ['--config=study.py', '--config.model.d_model=3'], '--config.base.model.d_model?'),
    ('ablate', ['--config=study.py', '--config.xyzzy=3'], 'unknown field --config.xyzzy (--help'),
    ('train', ['--config=run.py', '--config.model.d_model=wide'], 'd_model'),
    ('train', ['--config=run.py', '--workdir=w', '--config.model.score=qq'], "score 'qq'"),
    ('train', ['--config=run.py', '--workdir=w', '--config.data.name=books'], 'books'),
    ('train', ['--config=run.py', '--workdir=w', '--config.mesh.data=16'], 'needs 16 devices'),
    ('train', ['--config=run.py', '--workdir=w', 'extra'], "unknown argument 'extra'"),
    ('train', ['--config=run.py', '--workdri=w'], 'workdri'),
    ('translate', ['--text=a'], '--source=DIRECTORY is required'),
    ('translate', ['--source=absent', '--text=a'], 'absent does not exist'),
    ('generate', [], '--source=DIRECTORY is required'),
    ('generate', ['--source=absent'], 'absent does not exist'),
    ('convert', [], '--source is required; conversions are to_standard, merge'),
    ('convert', ['--source=absent', '--apply=merg'], "unknown conversion 'merg'"),
]


@pytest.mark.parametrize(('name', 'flags', 'message'), CASES, ids=lambda c: str(c)[-40:])
def test_bad_input_is_one_sentence(script_here, tmp_path, monkeypatch, name, flags, message):
    monkeypatch.setattr(Progress, 'tick', lambda display: None)  # shows waits
    done = script_here(name, *flags)
    said = done.stderr.strip()
    assert done.returncode == 2, said
    assert message in said and 'Traceback' not in said
    assert len([line for line in said.splitlines() if line]) == 1, said
    # Importing the config may cache its bytecode; nothing else is left behind.
    left = {p.name for p in tmp_path.iterdir() if p.suffix != '.py'}
    assert left <= {'__pycache__'}, left


def test_a_process_exits_with_that_code(script, tmp_path):
    done = script('report', '--study=absent')
    said = [line for line in done.stderr.splitlines() if not line.startswith('qkattn: starting')]
    assert done.returncode == 2 and len(said) == 1, done.stderr
    assert "'absent' does not exist" in said[0] and not (tmp_path / 'absent').exists()
