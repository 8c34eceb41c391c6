"""Where the test suite keeps compiled programs; imported before JAX."""

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path

FLAGS = ' --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0'
FLAGS += ' --xla_cpu_parallel_codegen_split_count=1'  # each part costs; the workers are parallel
if version('jaxlib').startswith('0.10.'):
    # Compiles a training step in a quarter of the time; later versions do not have the choice.
    FLAGS += ' --xla_cpu_use_fusion_emitters=false'


def programs_directory() -> Path:
    """Returns the directory of compiled programs: in the user's cache, by the CPU's features."""
    features = platform.machine() + platform.processor()
    cpuinfo = Path('/proc/cpuinfo')
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        features += next((x for x in lines if x.startswith(('flags', 'Features'))), '')
    cache = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    return Path(cache, 'qkattn-tests', hashlib.sha256(features.encode()).hexdigest()[:16])
