"""Command line scripts, one per job; their logic is in qkattn."""

import sys

from qkattn.run import starting
from qkattn.run.memory import keep_freed_memory

if sys.argv[0] == '-m':  # while Python looks for the script of `python -m experiments.NAME`
    keep_freed_memory()  # before there are other threads, that of the display too
    starting.begin()
