"""The directory where tests keep compiled programs. JAX must be imported after this module."""

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path

FLAGS = ' --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0'
# Compiling in several parts takes longer in all, and the workers of pytest are already parallel.
FLAGS += ' --xla_cpu_parallel_codegen_split_count=1'
if version('jaxlib').startswith('0.10.'):
    # With this flag, a training step compiles in a quarter of the time. Later versions lack it.
    FLAGS += ' --xla_cpu_use_fusion_emitters=false'


def programs_directory() -> Path:
    """Returns a directory in the user's cache. CPUs with other features get another directory."""
    features = platform.machine() + platform.processor() + _features_in_cpuinfo()
    digest = hashlib.sha256(features.encode()).hexdigest()
    cache = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    return Path(cache, 'qkattn-tests', digest[:16])


def _features_in_cpuinfo() -> str:
    """Returns the line with the features of the first CPU, or '' if there is none."""
    cpuinfo = Path('/proc/cpuinfo')
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith(('flags', 'Features')):
                return line
    return ''
