"""Which of W_Q, W_K, W_V, W_O does GPT-2 need at 124 million parameters?

The recipe of gpt2_124m.py, on a quarter of its steps: 2.56 billion tokens, 21 for each parameter.
Decoders without W_Q, W_V or W_O, with one W_QK, with Q = K and with K = V, each at the parameter
count of the unchanged model; every arm tunes its learning rate and is compared on five fresh seeds.
A test split is carved from the end of the training tokens.

    python -m experiments.ablate --config=configs/ablation_124m.py \\
        --config.base.data.path=llm.c/dev/data/fineweb10B --workdir=runs/ablation_124m

--dry_run prints arms, runs and FLOPs, and --dry_run=h100-1x8 the memory of each model. `:smoke`
behind the name of the file trains ten steps of tiny models on the same tokens, and decides nothing.

Expected: Q = K worse, the positive control. Not run, because it needs accelerators.
Time: not measured. A trial takes a quarter of the steps of gpt2_124m.py, and --dry_run counts the
trials. On GPUs, arms whose heads are no multiple of 8 wide take blockwise attention, which is
slower than cuDNN's.
"""

import dataclasses
import pathlib
import runpy

from qkattn.config import ControlsConfig, Study, TuningConfig


def get_config(scale='gpu'):
    """Returns the study at the scale 'smoke' or 'gpu'."""
    is_smoke = scale == 'smoke'
    tuning = TuningConfig()  # none
    if not is_smoke:
        tuning = TuningConfig(seeds=(100,), max_seeds=3, choice='minimax')
    return Study(
        name='ablation_124m',
        question='Which of W_Q, W_K, W_V, W_O does GPT-2 need at 124 million parameters?',
        base=recipe(scale),
        variants=(
            'qk/vo',  # the baseline
            'query_free/vo',  # no W_Q
            'merged/vo',  # W_Q and W_K merged
            'qk/no_v',  # no W_V
            'qk/no_o',  # no W_O
            'shared_qk/vo',  # W_Q = W_K
            'qk/k_is_v',  # W_V = W_K
        ),
        sizes=('d_model=32',) if is_smoke else ('d_model=768',),
        # A row of the embedding of a tiny model has more parameters than one of its matrices.
        match='non_embedding' if is_smoke else 'total',
        tolerance=5e-3 if is_smoke else 1e-3,
        tuning=tuning,
        controls=ControlsConfig(equal_shape=False, longer=None),
        margin=0.01,
        expected=() if is_smoke else ('shared_qk/vo is worse',),  # the positive control
    )


def recipe(scale):
    """Returns the settings of gpt2_124m.py with a test split, and seeds and rates to tune."""
    # The file beside this one, which no package holds.
    gpt2_file = pathlib.Path(__file__).with_name('gpt2_124m.py')
    get_gpt2_config = runpy.run_path(str(gpt2_file))['get_config']
    config = get_gpt2_config(scale)
    data = dataclasses.replace(config.data, carve_test=True)
    # The trials of a run take turns, so that the memory holds the activations of only one.
    train = dataclasses.replace(config.train, lifting='map')
    trials = dataclasses.replace(config.trials, seeds=(0, 1, 2, 3, 4))
    optimizer = config.optimizer
    if scale == 'smoke':
        trials = dataclasses.replace(trials, seeds=(0, 1))
    else:
        train = dataclasses.replace(train, num_steps=4890)
        optimizer = dataclasses.replace(optimizer, warmup_steps=175)
        trials = dataclasses.replace(trials, learning_rates=(3e-4, 6e-4, 1.2e-3))
    return dataclasses.replace(config, data=data, train=train, trials=trials, optimizer=optimizer)
