"""Reading training batches at random from shards of tokens, as llm.c writes them."""

import contextlib
import os
import time
from pathlib import Path

import numpy as np

from experiments.benchmark.race import Work
from qkattn.data.pipeline import train_batches
from qkattn.data.tasks.language import LanguageRows
from qkattn.data.token_formats.llm_c import HEADER_BYTES, LlmC
from qkattn.data.token_formats.shards import Shards
from qkattn.data.tokenizers.tokenizer import IdTokenizer
from qkattn.data.tokens import SplitInfo, TokenDataset

VOCABULARY = 50257
# Tokens of a batch, whatever the length of its rows.
BATCH_TOKENS = 1 << 14
STEPS_PER_READ = 10


def batches(
    directory: str, shards: int, ids: int, context: int, sparse: bool = False, cold: bool = False
) -> Work:
    """Builds the reading of training batches, in rows that are drawn from all shards.

    A batch has BATCH_TOKENS tokens, and counts as a step.

    Args:
        directory: Where the shards are; they are written if it does not exist.
        shards: The number of files.
        ids: The number of ids in each file, of two bytes each.
        context: The tokens of a row.
        sparse: Whether the files hold zeros without blocks on the disk. Otherwise the ids are
            random.
        cold: Whether the pages of the files are removed from memory first. Then times are elapsed
            seconds; otherwise they are CPU seconds of the process, which other programs on the
            machine hardly change.
    """
    paths = _write_shards(Path(directory), shards, ids, sparse)
    if cold:
        for path in paths:
            _remove_from_memory(path)
    rows = LanguageRows(_dataset(paths), context)
    batch_size = BATCH_TOKENS // context
    next_step = 0

    def run(calls: int) -> None:
        nonlocal next_step
        num_steps = calls * STEPS_PER_READ
        read = train_batches(
            rows,
            seeds=[0],
            batch_size=batch_size,
            start_step=next_step,
            num_steps=num_steps,
            steps_per_read=STEPS_PER_READ,
        )
        # Closing ends the thread that reads ahead, so that it does not work while others are timed.
        with contextlib.closing(read):
            for _ in read:
                pass
        next_step += num_steps

    clock = time.perf_counter if cold else time.process_time
    return Work(run, steps=STEPS_PER_READ, extra={'tokens': BATCH_TOKENS}, clock=clock)


def _write_shards(directory: Path, shards: int, ids: int, sparse: bool) -> list[Path]:
    """Writes shards into a directory, unless it exists; returns their paths."""
    paths = [directory / f'shard_train_{number:06}.bin' for number in range(shards)]
    if directory.exists():
        return paths
    directory.mkdir(parents=True)
    header = np.zeros(HEADER_BYTES // 4, '<i4')
    header[0] = 20240520  # the magic number of llm.c
    header[1] = 1  # its version
    header[2] = ids
    random = np.random.default_rng(0)
    for path in paths:
        with path.open('wb') as file:
            file.write(header.tobytes())
            if sparse:
                file.truncate(HEADER_BYTES + 2 * ids)  # zeros up to this length
            else:
                file.write(random.integers(VOCABULARY, size=ids, dtype='<u2').tobytes())
            # Only pages that are on the disk can be removed from memory.
            file.flush()
            os.fsync(file.fileno())
    return paths


def _remove_from_memory(path: Path) -> None:
    """Removes the pages of a file from memory, on Linux; no process may have them mapped."""
    whole_file = (0, 0)  # offset 0, and length 0 for all that follows
    with path.open('rb') as file:
        os.posix_fadvise(file.fileno(), *whole_file, os.POSIX_FADV_DONTNEED)


def _dataset(paths: list[Path]) -> TokenDataset:
    """Returns the shards as a train split. Counts that would need to read all ids are made up."""
    ids = Shards([LlmC.open(path, dtype=None) for path in paths])
    info = SplitInfo(
        num_documents=1,
        num_tokens=len(ids),
        num_bytes=None,
        unigram_nats_per_token=0.0,
        fingerprint='',
    )
    return TokenDataset(
        name='shards',
        version='1',
        tokenizer=IdTokenizer(VOCABULARY, separator=None),
        infos={'train': info},
        tokens={'train': ids},
    )
