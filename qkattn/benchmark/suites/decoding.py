"""Greedy decoding: tokens per second, and the bytes that the cache of each variant really holds."""

from typing import Any

from qkattn.benchmark.race import Contestant
from qkattn.benchmark.session import Session
from qkattn.benchmark.shape import GPT2, TINY, Shape
from qkattn.run.cores import usable

WORK = 'qkattn.benchmark.peers.own_parts:greedy'
BASELINE = 'qk/vo'
# Settings of ModelConfig by the name of a row.
VARIANTS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    'qk/vo, 1 key head': {'num_kv_heads': 1},
    'merged/vo': {'score': 'merged'},
    'shared_qk/vo': {'score': 'shared_qk'},
    'query_free/vo': {'score': 'query_free'},
    'key_free/vo': {'score': 'key_free'},
    'qk/no_v': {'value': 'no_v'},
    'qk/no_o': {'value': 'no_o'},
    'qk/merged_vo': {'value': 'merged_vo'},
    'qk/k_is_v': {'value': 'k_is_v'},
    'latent/latent': {'score': 'latent', 'value': 'latent'},
}
# Shape (batch: rows), prompt, new tokens.
SCALES: dict[str, tuple[Shape, int, int]] = {
    'cpu': (Shape(layers=4, width=128, heads=4, context=256, vocabulary=256, batch=8), 16, 128),
    'gpu': (GPT2, 128, 512),
    'smoke': (TINY, 2, 4),
}


def run(session: Session) -> None:
    """Seconds per new token of all rows."""
    shape, prompt, tokens = SCALES[session.scale.name]
    variants = dict([*VARIANTS.items()][:2]) if session.scale.name == 'smoke' else VARIANTS
    cores = len(usable())
    contestants = [
        Contestant(
            name=name,
            work=WORK,
            settings={
                'model': shape.config(**settings)['model'],
                **{'rows': shape.batch, 'prompt': prompt, 'tokens': tokens},
            },
            cores=cores,
            process='decoding',
        )
        for name, settings in variants.items()
    ]
    session.race(f'{shape}, {prompt} + {tokens} tokens', contestants, reference=BASELINE)
