"""The packages of a wheel: qkattn, with the scripts and the configs of the top level inside it."""

from setuptools import find_packages, setup

INSIDE = {'qkattn.configs': 'configs', 'qkattn.configs.claims': 'configs/claims'}
INSIDE |= {
    f'qkattn.{package}': package.replace('.', '/')
    for package in find_packages(include=['experiments*'])
}

setup(packages=[*find_packages(include=['qkattn*']), *INSIDE], package_dir=INSIDE)
