"""Command line scripts, one per job; their logic is in qkattn."""

import sys

from qkattn.run import starting

if sys.argv[0] == '-m':  # while Python looks for the script of `python -m experiments.NAME`
    starting.begin()
