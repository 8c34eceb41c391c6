"""Prints, as JSON, what is wrong with the manifests on standard input, and their content.

Run by an interpreter that has kubeflow-trainer-api and kubernetes-validate: every field has to be
known to the models of JobSet and to the schemas of Kubernetes.
"""

import copy
import json
import sys

import kubernetes_validate
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet


def unknown(given, seen, at='') -> list[str]:
    """Fields that the models dropped: they do not know them."""
    if isinstance(given, dict):
        missing = [f'{at}.{name} is unknown' for name in given if name not in (seen or {})]
        kept = [name for name in given if name in (seen or {})]
        return missing + [x for n in kept for x in unknown(given[n], seen[n], f'{at}.{n}')]
    if isinstance(given, list):
        pairs = enumerate(zip(given, seen or [None] * len(given), strict=True))
        return [x for k, (a, b) in pairs for x in unknown(a, b, f'{at}[{k}]')]
    return []


def problems(manifest: dict) -> list[str]:
    jobs = [manifest]
    errors = []
    if manifest['kind'] == 'JobSet':
        try:
            seen = JobsetV1alpha2JobSet.from_dict(copy.deepcopy(manifest)).to_dict()
            errors = unknown(manifest, seen)
        except ValueError as error:
            errors = [str(error)]
        job = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': 'x'}}
        jobs = [job | one['template'] for one in manifest['spec']['replicatedJobs']]
    for job in jobs:
        try:
            kubernetes_validate.validate(job, '1.34', strict=True)
        except kubernetes_validate.ValidationError as error:
            errors.append(f'{".".join(map(str, error.path))}: {error.message}')
    return errors


documents = [yaml.safe_load(text) for text in json.load(sys.stdin)]
print(json.dumps([[document, problems(document)] for document in documents]))
