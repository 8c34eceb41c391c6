"""Eight fake CPU devices for the whole test run; a test uses as many as its mesh asks for.

Programs are compiled without LLVM's optimizations: the tests compile far more than they compute.
"""

import os

os.environ['XLA_FLAGS'] = (
    os.environ.get('XLA_FLAGS', '')
    + ' --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0'
)
os.environ.setdefault('JAX_PLATFORMS', 'cpu')


def pytest_addoption(parser):
    parser.addoption(
        '--cell', action='append', help='run the contract suite on score/value only; repeatable'
    )
