"""Seconds of the scores with one matrix over those with two, beside the counted multiply-adds."""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import jax

from qkattn.attention import Attention, AttentionSpec
from qkattn.claims.checks.multiply_adds import factored, merged, scores
from qkattn.claims.decided import Kind, Row, Speaks
from qkattn.claims.protocol import pick
from qkattn.stats import inference
from qkattn.storage.records import read_json, write_json

FILE = 'measures/crossover.json'
_MEASURED = {'D': int, 'H': int, 'T': int, 'ratios': tuple[float, ...]}
_SCHEMA = {'device': str, 'measured': [_MEASURED]}


def record(directory: Path, scale: str) -> None:
    """Times both forms at several T for D = 4 H, H < D < 2 H and D = H, pair after pair."""
    D = pick(scale, smoke=64, cpu=128, gpu=1024)
    lengths = pick(
        scale, smoke=(32, 512), cpu=(16, 64, 256, 512, 1024, 2048), gpu=(256, 1024, 4096, 16384)
    )
    pairs = pick(scale, smoke=5, cpu=15, gpu=15)
    measured = [
        {'D': D, 'H': H, 'T': T, 'ratios': ratios(T, D, H, pairs)}
        for H in (D // 4, 3 * D // 4, D)
        for T in lengths
    ]
    device = jax.devices()[0].device_kind
    write_json(directory / FILE, {'device': device, 'measured': measured})


def ratios(T: int, D: int, H: int, pairs: int) -> list[float]:
    """Seconds with one matrix over seconds with two, float32, N = 1, compiled."""
    x_BTD = jax.random.normal(jax.random.key(0), (1, T, D))
    runs = []
    for name in ('merged', 'qk'):
        spec = AttentionSpec(score=name, d_model=D, num_heads=1, head_size=H)
        layer = Attention(spec, key=jax.random.key(1))
        program = jax.jit(scores).lower(layer, x_BTD).compile()
        runs.append(lambda layer=layer, program=program: program(layer, x_BTD))
    repeats = 1 + int(0.01 / max(seconds(runs[1], 3), 1e-6))
    return [seconds(runs[0], repeats) / seconds(runs[1], repeats) for _ in range(pairs)]


def seconds(run: Any, repeats: int) -> float:
    """Of one call, the mean of several in a row."""
    started = time.perf_counter()
    for _ in range(repeats):
        out = run()
    jax.block_until_ready(out)
    return (time.perf_counter() - started) / repeats


def read(directory: Path) -> list[Row]:
    """The ratio at each T with its counted one, and how often their order differs; none decides.

    RunDirectoryError if the file is damaged.
    """
    path = directory / FILE
    if not path.exists():
        return []
    found = read_json(path, _SCHEMA)
    rows, against, clear = [], 0, 0
    for measured in found['measured']:
        T, D, H = measured['T'], measured['D'], measured['H']
        ratio = inference.estimate([math.log(ratio) for ratio in measured['ratios']])
        mean, low, high = (math.exp(log) for log in (ratio.mean, ratio.low, ratio.high))
        counted = merged(T, D) / factored(T, D, H)
        rows.append(
            Row(
                what=f'seconds with one matrix over those with two, D = {D}, H = {H}',
                kind=Kind.MEASURED,
                context={'device': found['device']},
                value=mean,
                low=low,
                high=high,
                expected=counted,
                speaks=Speaks.BESIDE,
                x=T,
                x_label='tokens',
            )
        )
        if not low < 1 < high and counted != 1:
            clear += 1
            against += (mean > 1) != (counted > 1)
    rows.append(
        dataclasses.replace(
            rows[-1],
            what=f'lengths of {clear} with a clear order in seconds that differs from the counts',
            value=against,
            low=None,
            high=None,
            expected=0,
            x=None,
            x_label=None,
        )
    )
    return rows
