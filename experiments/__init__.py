"""Command line scripts, one per job; their logic is in qkattn."""
