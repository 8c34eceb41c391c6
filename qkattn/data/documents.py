"""The documents of an evaluation: the clusters of rows that are not independent of each other."""

import numpy as np

from qkattn.config import DataConfig
from qkattn.data.pipeline import eval_rows
from qkattn.data.tasks.rows import Rows
from qkattn.errors import ConfigError
from qkattn.stats.inference import MIN_DOCUMENTS

# Rows of tasks without documents are independent; more groups would say little more.
MAX_GROUPS = 128


def clusters(rows: Rows, split: str, max_rows: int | None = None) -> tuple[list[str], np.ndarray]:
    """Names of clusters, and the cluster of each row that an evaluation of the split reads.

    A cluster is a document. Rows of a task without documents are dealt out in turn to at most
    MAX_GROUPS clusters, '0', '1' and so on.

    Args:
      max_rows: as of `pipeline.eval_batches`.
    """
    chosen_R = eval_rows(rows, split, max_rows)
    documents = rows.documents(split)
    if documents is not None:
        names, document_R = documents
        return names, document_R[chosen_R]
    count = min(MAX_GROUPS, len(chosen_R))
    return [str(number) for number in range(count)], np.arange(len(chosen_R)) % count


def check_documents(rows: Rows, data: DataConfig, minimum: int = MIN_DOCUMENTS) -> None:
    """Refuses a corpus that gives no verdict: too few documents for a standard error, or no test.

    Raises:
      ConfigError: an evaluation split of which fewer than `minimum` documents are evaluated; no
        test split.
    """
    for split in rows.splits[1:]:
        documents = rows.documents(split)
        if documents is None:
            continue
        present = len(np.unique(documents[1]))
        evaluated = len(np.unique(clusters(rows, split, data.eval_sequences)[1]))
        if evaluated >= minimum:
            continue
        path = '' if data.path is None else f', data.path={data.path!r},'
        if present >= minimum:
            raise ConfigError(
                f'data.eval_sequences={data.eval_sequences} evaluates {evaluated} of {present} '
                f'documents in split {split!r} of data.name={data.name!r}{path} but a study that '
                f'decides between variants needs at least {minimum}; raise it, or set None for all.'
            )
        raise ConfigError(
            f'split {split!r} of data.name={data.name!r}{path} has {present} '
            f'document{"s" * (present != 1)}, but a study that decides between variants needs '
            f'at least {minimum}; choose a corpus of more documents, such as data.name='
            "'stdlib' or 'packages', or data.name='text' with a folder of files per split."
        )
    if 'test' not in rows.splits:
        raise ConfigError(
            f'data.name={data.name!r} has no test split, by which a study decides between '
            'variants; set data.carve_test=True to carve a tenth of its train split.'
        )
