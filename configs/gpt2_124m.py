"""GPT-2 of 124 million parameters on 10 billion tokens of FineWeb: the recipe of llm.c.

Source: https://github.com/karpathy/llm.c, scripts/run_gpt2_124M.sh and train_gpt2.cu at commit
f1e2ace: 12 layers, 12 heads, width 768, context 1,024, biases, tied embeddings; AdamW with beta2
0.95, weight decay 0.1 times the learning rate, clipping at 1, a peak of 6e-4 after 700 steps and a
cosine to 0; 524,288 tokens per step, one epoch. Tokens are the shards of dev/data/fineweb.py, with
`<|endoftext|>` (50256) before each document; the vocabulary of 50,257 is padded to 50,304.

    python -m experiments.train --config=configs/gpt2_124m.py \\
        --config.data.path=llm.c/dev/data/fineweb10B --workdir=runs/gpt2_124m

The mesh has 8 GPUs; --config.mesh.data=1 takes one. `:smoke` behind the name of the file trains ten
steps of a tiny model on the same tokens.

Expected: near the published validation loss of 3.29 nats/token after 10 billion tokens (3.2722 with
llm.c of October 2024), on 10,240 rows. Not run, because it needs accelerators.
Time: not measured; llm.c's script says 94 minutes on eight A100, about $20.
"""

from qkattn.config import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    TrialsConfig,
)
from qkattn.errors import ConfigError


def get_config(scale='gpu'):
    """Returns the training of GPT-2 at scale 'gpu', and of a tiny model at scale 'smoke'."""
    if scale not in ('smoke', 'gpu'):
        raise ConfigError(f'scale={scale!r} must be smoke or gpu')
    is_smoke = scale == 'smoke'
    return Config(
        model=ModelConfig(
            d_model=32 if is_smoke else 768,
            num_layers=1 if is_smoke else 12,
            num_heads=2 if is_smoke else 12,
            context=16 if is_smoke else 1024,
            vocab_size=50304,
            biases=True,
            init='nanogpt',
            compute_dtype='float32' if is_smoke else 'bfloat16',
        ),
        data=DataConfig(
            name='tokens',
            path='llm.c/dev/data/fineweb10B',
            documents='id=50256',
            eval_sequences=64 if is_smoke else 10240,
        ),
        optimizer=OptimizerConfig(
            warmup_steps=2 if is_smoke else 700,
            schedule='cosine',
            beta2=0.95,
            decay='coupled',
        ),
        train=TrainConfig(
            num_steps=10 if is_smoke else 19560,
            batch_size=8 if is_smoke else 512,
            accumulation=1 if is_smoke else 4,
            steps_per_dispatch=5 if is_smoke else 10,
            log_every=5 if is_smoke else 10,
            eval_every=5 if is_smoke else 250,
            checkpoint_every=5 if is_smoke else 1000,
        ),
        trials=TrialsConfig(learning_rates=(6e-4,), weight_decays=(0.1,)),
        mesh=MeshConfig(data=1 if is_smoke else 8),
    )
