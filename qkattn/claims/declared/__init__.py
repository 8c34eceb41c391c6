"""One file a claim, each with a `CLAIM`; a file that is added is a claim that is listed."""
