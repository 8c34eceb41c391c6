"""Values, the ways to write B[n]: each module holds one family."""
