"""Transformer-Tiny on Multi30k, English to German: a published translation baseline.

Source: Wu et al., "Good for Misconceived Reasons: An Empirical Revisiting on the Need for Visual
Context in Multimodal Machine Translation" (ACL 2021), section 5: 4 + 4 layers of width 128, 4
heads, FFN 256, dropout 0.3, shared embeddings, post-norm, inverse square root schedule with peak
0.005 after 2,000 steps, label smoothing 0.1, about 4,096 tokens per batch, up to 8,000 updates,
beam 5, joint BPE of 10,000 merges, average of the last 10 checkpoints
(experiments.translate --average=10; the score below is of one).

    python -m experiments.train --config=configs/multi30k_tiny.py --workdir=runs/multi30k_tiny

Expected: BLEU 38.66 at step 4,000 on test2016 (sacrebleu, 13a, lower case; published: about 41 with
multi-bleu on lower-cased text tokenized by Moses); see experiments/results/multi30k_tiny.
Time: 85 minutes of training for 4,000 steps on two busy CPU cores; the second half was not run.
"""

from qkattn.config import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    TrialsConfig,
)


def get_config():
    return Config(
        model=ModelConfig(
            kind='encoder_decoder',
            d_model=128,
            num_layers=4,
            num_heads=4,
            d_ff=256,
            context=64,
            vocab_size=10000,
            norm_position='post',
            activation='relu',
            positions='sinusoidal',
            biases=True,
            scale_embeddings=True,
            dropout=0.3,
            attention_dropout=0.0,
        ),
        data=DataConfig(
            name='multi30k',
            languages='en-de',
            lowercase=True,
            tokenizer='bpe',
            tokenizer_size=10000,
        ),
        optimizer=OptimizerConfig(
            schedule='inverse_sqrt',
            warmup_steps=2000,
            beta2=0.98,
            clip_norm=None,
        ),
        train=TrainConfig(
            num_steps=8000,
            batch_size=64,
            label_smoothing=0.1,
            steps_per_dispatch=10,
            log_every=10,
            eval_every=100,
            checkpoint_every=100,
            keep=10,
        ),
        trials=TrialsConfig(learning_rates=(5e-3,), weight_decays=(0.0,)),
        decode=DecodeConfig(beam=5, length_penalty=1.0),
    )
