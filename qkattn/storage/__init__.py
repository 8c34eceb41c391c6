"""Files of runs and studies, on disks and in buckets: atomic writes, checksums, leases, ledgers."""
