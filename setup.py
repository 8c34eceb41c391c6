"""Builds a wheel of qkattn, with the top-level packages experiments and configs inside it."""

from setuptools import find_packages, setup

INSIDE = {'qkattn.configs': 'configs', 'qkattn.configs.claims': 'configs/claims'}
INSIDE |= {
    f'qkattn.{package}': package.replace('.', '/')
    for package in find_packages(include=['experiments*'])
}

setup(packages=[*find_packages(include=['qkattn*']), *INSIDE], package_dir=INSIDE)
