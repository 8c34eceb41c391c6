"""Versions of what a yardstick is, task by task; yardsticks.json has that of each of its groups."""

from collections.abc import Mapping
from typing import Any

# Masked text: 1 counted the two neighbours of a token, 2 counts its nearest visible ones.
# Translation: 1 asked for a BLEU of 15, 2 compares with IBM model 1.
DEFINITIONS = {'language': 1, 'masked': 2, 'translation': 2, 'probe': 1}


def definition_of(task: str) -> int:
    """The version of the yardsticks of a task; 1 of a task from outside."""
    return DEFINITIONS.get(task, 1)


def is_current(group: Mapping[str, Any]) -> bool:
    """Whether a group of yardsticks.json is of the current definition; without one, it is of 1."""
    return group.get('definition', 1) == definition_of(group.get('task', ''))
