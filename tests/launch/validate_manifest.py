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
    """Compares a manifest with its parsed model, which has dropped unknown fields.

    Args:
        written: A part of the manifest: a dictionary, a list or a plain value.
        parsed: The same part of the model.
        path: Where the part lies in the manifest, such as '.spec.replicatedJobs[0]'.

    Returns:
        A message such as '.spec.x is unknown' for each dropped field.
    """
    errors = []
    if isinstance(written, dict):
        parsed = parsed or {}
        for name in written:
            if name in parsed:
                errors += unknown_fields(written[name], parsed[name], f'{path}.{name}')
            else:
                errors.append(f'{path}.{name} is unknown')
    elif isinstance(written, list):
        # The model may have dropped the whole list.
        parsed = parsed or [None] * len(written)
        for index, (entry, parsed_entry) in enumerate(zip(written, parsed, strict=True)):
            errors += unknown_fields(entry, parsed_entry, f'{path}[{index}]')
    return errors


def problems_of_job_set(manifest: dict) -> list[str]:
    """Messages about fields of a JobSet that are unknown, or have wrong values."""
    try:
        job_set = JobsetV1alpha2JobSet.from_dict(copy.deepcopy(manifest))
        return unknown_fields(manifest, job_set.to_dict())
    except ValueError as error:
        return [str(error)]


def jobs_of_job_set(manifest: dict) -> list[dict]:
    """The jobs of a JobSet, as manifests of their own."""
    header = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': 'x'}}
    replicated_jobs = manifest['spec']['replicatedJobs']
    return [header | replicated_job['template'] for replicated_job in replicated_jobs]


def problems_of_job(job: dict) -> list[str]:
    """A message about the first field of a Job that its schema does not allow."""
    try:
        kubernetes_validate.validate(job, '1.34', strict=True)
    except kubernetes_validate.ValidationError as error:
        path = '.'.join(str(part) for part in error.path)
        return [f'{path}: {error.message}']
    return []


def problems(manifest: dict) -> list[str]:
    """Messages about what is wrong with a Job or a JobSet."""
    if manifest['kind'] != 'JobSet':
        return problems_of_job(manifest)
    errors = problems_of_job_set(manifest)
    for job in jobs_of_job_set(manifest):
        errors += problems_of_job(job)
    return errors


documents = [yaml.safe_load(text) for text in json.load(sys.stdin)]
print(json.dumps([[document, problems(document)] for document in documents]))
