"""Joins the processes of a job; a process without a job stays alone and pays nothing."""

import functools
import os

import jax
from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster

from qkattn.distributed.detection import PORT, Job, detect
from qkattn.errors import ConfigError

HEARTBEAT = 30
"""Seconds without a sign of life after which jax ends the others of a job."""

CONNECT = 'QKATTN_CONNECT_SECONDS'
"""The variable for the seconds within which all processes of a job must have started."""
_CONNECT_SECONDS = 300


@functools.cache
def start() -> Job:
    """Joins the job that the environment describes, before anything else of jax; idempotent.

    Raises:
      ConfigError: variables that contradict, or processes that did not come in time.
    """
    job = detect(os.environ)
    if job.engine == 'single':
        job = _cloud_tpu()
    if job.engine == 'single':
        return job
    # Stop requests are agreed on in Python (qkattn.distributed.stop), which jax's service prevents.
    jax.config.update('jax_enable_preemption_service', False)
    jax.distributed.initialize(
        job.coordinator,
        job.num_processes,
        job.process_id,
        local_device_ids=job.local_device_ids,
        cluster_detection_method='deactivate',
        initialization_timeout=_connect_seconds(),
        heartbeat_timeout_seconds=HEARTBEAT,
        shutdown_timeout_seconds=HEARTBEAT,
    )
    return job


def _connect_seconds() -> int:
    text = os.environ.get(CONNECT, str(_CONNECT_SECONDS))
    if not text.isdecimal() or not 1 <= int(text) <= 86_400:
        raise ConfigError(f'{CONNECT}={text!r} is not a number of seconds in 1 .. 86400')
    return int(text)


def _cloud_tpu() -> Job:
    """A host of a TPU slice without Kubernetes, which asks Google's metadata server who it is."""
    platforms = os.environ.get('JAX_PLATFORMS', 'tpu')
    if 'tpu' not in platforms or not GceTpuCluster.is_env_present():
        return Job()
    count = GceTpuCluster.get_process_count()
    if count == 1:
        return Job()
    address = GceTpuCluster.get_coordinator_address(_connect_seconds(), os.environ.get(PORT))
    return Job(count, GceTpuCluster.get_process_id(), 'tpu', address)
