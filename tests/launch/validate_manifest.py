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


def unknown_fields(written, parsed, path='') -> list[str]:
    """'.spec.x is unknown' for each field of a manifest that its parsed model has dropped."""
    errors = []
    if isinstance(written, dict):
        parsed = parsed or {}
        for name in written:
            if name in parsed:
                errors += unknown_fields(written[name], parsed[name], f'{path}.{name}')
            else:
                errors.append(f'{path}.{name} is unknown')
    elif isinstance(written, list):
        parsed = parsed or [None] * len(written)
        for index, (entry, parsed_entry) in enumerate(zip(written, parsed, strict=True)):
            errors += unknown_fields(entry, parsed_entry, f'{path}[{index}]')
    return errors


def problems(manifest: dict) -> list[str]:
    """What is wrong with a manifest: unknown fields, or values that the schemas do not allow."""
    jobs = [manifest]
    errors = []
    if manifest['kind'] == 'JobSet':
        try:
            parsed = JobsetV1alpha2JobSet.from_dict(copy.deepcopy(manifest)).to_dict()
            errors = unknown_fields(manifest, parsed)
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
