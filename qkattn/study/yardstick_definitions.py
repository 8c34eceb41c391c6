"""Versions of the definition of yardsticks, for each task."""

from collections.abc import Mapping
from typing import Any

# Masked text: version 1 counted the two neighbours of a token, 2 counts its nearest visible tokens.
# Translation: version 1 asked for a BLEU of 15, 2 compares with IBM model 1.
DEFINITIONS = {'language': 1, 'masked': 2, 'translation': 2, 'probe': 1}


def definition_of(task: str) -> int:
    """Returns the version for a task; 1 for a task from outside the package."""
    return DEFINITIONS.get(task, 1)


def is_current(group: Mapping[str, Any]) -> bool:
    """Returns whether a group of yardsticks.json has the current version."""
    version = group.get('definition', 1)  # groups of version 1 lack the field
    task = group.get('task', '')
    return version == definition_of(task)
