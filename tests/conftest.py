"""Eight fake CPU devices for the whole test run; a test uses as many as its mesh asks for."""

import os

os.environ['XLA_FLAGS'] = (
    os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=8'
)
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
