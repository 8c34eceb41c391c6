"""Checks of JAX's environment variables and of the working directory."""

import os
import re
import traceback

from qkattn.errors import ConfigError
from qkattn.jobs import machine

PLATFORMS = 'JAX_PLATFORMS'
# A flag in XLA_FLAGS, such as '--xla_force_host_platform_device_count=8'; the group is '8'.
_DEVICE_COUNT = re.compile(r'--xla_force_host_platform_device_count(?:=(\S*))?')
# An error of JAX, such as "Backend 'cdua' is not in the list of known backends: ['cpu', 'tpu']".
_UNKNOWN_PLATFORM = re.compile(r"Backend '(.*?)' is not in the list of known backends: \[(.*?)\]")


def check() -> None:
    """Checks the environment before JAX opens its devices.

    Raises:
        ConfigError: The working directory was removed, or XLA_FLAGS has an invalid device count.
    """
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError(
            'the working directory was removed; change to one that exists, as in `cd ~`'
        ) from error
    for match in _DEVICE_COUNT.finditer(os.environ.get('XLA_FLAGS', '')):
        flag = match[0]  # '--xla_force_host_platform_device_count=8'
        count = match[1] or ''  # '8'
        if not count.isdecimal() or int(count) < 1:
            raise ConfigError(
                f'XLA_FLAGS has {flag}, whose value must be a whole number of at least 1'
            )


def platform_problem(error: BaseException) -> str | None:
    """Describes an error that an invalid JAX_PLATFORMS has caused; None for other errors."""
    value = os.environ.get(PLATFORMS)
    if not value or not _could_not_open_devices(error):
        return None
    unknown_platform = _UNKNOWN_PLATFORM.search(str(error))
    if unknown_platform is not None:
        platform, quoted_platforms = unknown_platform.groups()  # such as cdua and 'cpu', 'tpu'
        known_platforms = quoted_platforms.replace("'", '')
        reason = f'JAX here has no platform {platform!r}, only {known_platforms}'
    elif machine.accelerators(None) == []:  # the machine has no accelerator
        reason = 'JAX finds no device of this platform'
    else:  # JAX_PLATFORMS may be valid, and the accelerators busy
        return None
    return (
        f'{PLATFORMS}={value}: {reason}, and this machine has {machine.describe_accelerators()}; '
        f'set {PLATFORMS}=cpu, or unset it'
    )


def _could_not_open_devices(error: BaseException) -> bool:
    """Whether JAX has raised the error because it could not open its devices."""
    if isinstance(error, AssertionError):  # JAX found no device
        frames = traceback.extract_tb(error.__traceback__)
        return bool(frames) and os.path.basename(frames[-1].filename) == 'xla_bridge.py'
    return isinstance(error, RuntimeError) and 'Unable to initialize backend' in str(error)
