"""Kubernetes: manifests against the published schemas, what restarts, arguments, wrong flags."""

import functools
import json
import math
import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.launch.launchers import (
    AWKWARD,
    LAUNCH,
    TRAIN,
    dry_run,
    environment_with,
    launch,
    write_program,
)

PYTHON = os.environ.get('QKATTN_TEST_KUBERNETES_PYTHON')
NAME_AND_IMAGE = ('--name=qk', '--image=r/qkattn:1')
CASES = {
    'tpu': ('--accelerator=v6e-16', '--spot', '--service_account=trainer', '--queue=q'),
    'v5p': ('--accelerator=v5p-64',),
    'gpu': ('--accelerator=a3-2x8', '--volume=claim', "--env=NAME=a 'b' $(c)"),
    'any gpu': ('--accelerator=gpu-3x4', '--retries=0', '--grace=40', '--env=JAX_PROCESS_ID=7'),
    'study': ('--accelerator=v6e-8', '--workers=5', '--spot'),
    'gpu study': ('--accelerator=gpu-1x2', '--workers=2', '--volume=claim'),
}
# Pods, and chips of each.
SIZES = dict(zip(CASES, [(4, 4), (8, 4), (2, 8), (3, 4), (5, 8), (2, 2)], strict=True))


def rendered_manifest(*flags: str, arguments=AWKWARD) -> str:
    command = 'ablate' if any('--workers' in flag for flag in flags) else 'train'
    return dry_run('kubernetes', *NAME_AND_IMAGE, *flags, command=(command, *arguments))


@functools.cache
def manifest_of(case: str) -> dict:
    """The manifest of a case, whose command has arguments on which a shell could act."""
    return yaml.safe_load(rendered_manifest(*CASES[case]))


def job_of(manifest: dict) -> dict:
    """The specification of the job, also of that in a set of one job."""
    if manifest['kind'] == 'Job':
        return manifest['spec']
    (one,) = manifest['spec']['replicatedJobs']
    return one['template']['spec']


def pod_of(manifest: dict) -> dict:
    return job_of(manifest)['template']['spec']


def as_the_kubelet_expands(text: str, env: dict[str, str]) -> str:
    """An argument as the kubelet passes it on: $(NAME) replaced, $$ a dollar sign."""
    pattern = r'\$\$|\$\(([^)]*)\)'
    return re.sub(pattern, lambda m: '$' if m[1] is None else env.get(m[1], m[0]), text)


@pytest.mark.skipif(not PYTHON, reason='QKATTN_TEST_KUBERNETES_PYTHON: see validate_manifest.py')
def test_manifests_have_only_fields_of_the_published_schemas():
    texts = {case: rendered_manifest(*flags) for case, flags in CASES.items()}
    # Two misspelled fields show that the validation notices such.
    broken = texts['tpu'].replace('maxRestarts', 'maxRestart')
    texts['broken'] = broken.replace('parallelism', 'paralelism')
    script = Path(__file__).with_name('validate_manifest.py')
    given = json.dumps(list(texts.values()))
    output = subprocess.check_output([PYTHON, str(script)], input=given, text=True)
    validated = dict(zip(texts, json.loads(output), strict=True))
    problems = validated.pop('broken')[1]
    assert '.spec.failurePolicy.maxRestart is unknown' in problems
    assert '.spec.replicatedJobs[0].template.spec.paralelism is unknown' in problems
    assert any("'paralelism' was unexpected" in problem for problem in problems)
    assert {case: problems for case, (_, problems) in validated.items()} == dict.fromkeys(CASES, [])


@pytest.mark.parametrize('case', CASES)
def test_pods_have_chips_arguments_and_modes_of_a_run(case):
    job = job_of(manifest_of(case))
    pod = pod_of(manifest_of(case))
    (container,) = pod['containers']
    ((chip, count),) = container['resources']['limits'].items()
    num_pods, chips_of_a_pod = SIZES[case]
    assert job['parallelism'] == job['completions'] == num_pods
    assert count == chips_of_a_pod
    gpus = 'gpu' in case
    assert chip == ('nvidia.com/gpu' if gpus else 'google.com/tpu')
    env = {'HOME': '/root', 'NAME': 'replaced', 'id': 'replaced'}
    assert [as_the_kubelet_expands(one, env) for one in container['args']][1:] == list(AWKWARD)
    assert container['command'] == ['python', '-m', 'qkattn']
    assert pod['restartPolicy'] == 'Never'
    programs = {one['name']: one.get('value') for one in container['env']}
    assert programs['JAX_COMPILATION_CACHE_DIR'] == f'/runs/.jax-cache-{"gpu" if gpus else "tpu"}'
    text = json.dumps(pod)
    assert gpus == ('runAsUser' not in text)
    # A mount changes the modes below a volume to those of its fsGroup, unless told otherwise.
    assert ('"fsGroup"' in text) == ('OnRootMismatch' in text)
    assert pod['terminationGracePeriodSeconds'] == (40 if case == 'any gpu' else 300)


def test_nodes_are_selected_by_their_accelerator():
    for case, selected in (
        ('tpu', {'tpu-accelerator': 'tpu-v6e-slice', 'tpu-topology': '4x4', 'spot': 'true'}),
        ('gpu', {'accelerator': 'nvidia-h100-80gb'}),
        ('any gpu', {}),
    ):
        expected = {f'cloud.google.com/gke-{name}': value for name, value in selected.items()}
        assert pod_of(manifest_of(case))['nodeSelector'] == expected


def test_variables_let_the_processes_of_a_job_find_each_other():
    manifest = manifest_of('gpu')
    env = {one['name']: one for one in pod_of(manifest)['containers'][0]['env']}
    # Hostnames of a JobSet: NAME-REPLICATEDJOB-JOB-POD, in the subdomain NAME.
    assert env['JAX_COORDINATOR_ADDRESS']['value'] == 'qk-train-0-0.qk:8476'
    assert env['JAX_NUM_PROCESSES']['value'] == '2'
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert env['JAX_PROCESS_ID']['valueFrom'] == {'fieldRef': {'fieldPath': index}}
    assert as_the_kubelet_expands(env['NAME']['value'], {'c': 'replaced'}) == "a 'b' $(c)"
    assert job_of(manifest)['completionMode'] == 'Indexed'
    # One of the user's replaces ours; workers of a study are jobs of one process.
    given = pod_of(manifest_of('any gpu'))['containers'][0]['env']
    assert [one.get('value') for one in given if one['name'] == 'JAX_PROCESS_ID'] == ['7']
    for case in ('study', 'gpu study', 'tpu'):
        names = {one['name'] for one in pod_of(manifest_of(case))['containers'][0]['env']}
        given = {'JAX_COMPILATION_CACHE_DIR'} | ({'JAX_PLATFORMS'} if 'gpu' in case else set())
        assert names - {'QKATTN_CONNECT_SECONDS'} == given
        assert ('QKATTN_CONNECT_SECONDS' in names) == (case == 'tpu')


@pytest.mark.parametrize('case', CASES)
def test_exit_codes_decide_whether_a_job_restarts_or_fails(case):
    manifest = manifest_of(case)
    job = job_of(manifest_of(case))
    rules = [
        (rule['action'], rule['onExitCodes']['values'] if 'onExitCodes' in rule else 'disrupted')
        for rule in job['podFailurePolicy']['rules']
    ]
    if manifest['kind'] == 'Job':
        assert rules == [('FailJob', [2]), ('Ignore', [75]), ('Ignore', 'disrupted')]
        assert job['backoffLimitPerIndex'] == 3
        return
    # A pod that fails ends the job, which restarts; restarts that `rules` cause are not counted.
    assert rules == [('FailJob', [2, 75]), ('FailJob', 'disrupted')]
    assert job['backoffLimit'] == 0
    policy = manifest['spec']['failurePolicy']
    wrong, stopped = policy['rules']
    actions = wrong['action'], stopped['action'], policy['maxRestarts']
    again = 'RestartJobSetAndIgnoreMaxRestarts'
    retries = 0 if case == 'any gpu' else 3
    assert actions == ('FailJobSet', again, retries)
    assert {*wrong['onJobFailureReasons'], *stopped['onJobFailureReasons']} == {'PodFailurePolicy'}
    # The sentences of the controller.
    for code in (2, 75):
        message = f'failed with exit code {code} matching FailJob rule at index 0'
        assert (wrong['onJobFailureMessagePatterns'][0] in message) == (code == 2)


def test_slices_have_the_shapes_of_their_sizes(monkeypatch):
    monkeypatch.syspath_prepend(str(LAUNCH))
    namespace = runpy.run_path(str(LAUNCH / 'kubernetes.py'))
    for kind, (_, cores, topologies, _) in namespace['TPUS'].items():
        for chips, topology in topologies.items():
            machine = namespace['hardware'](f'{kind}-{cores * chips}')
            # A topology such as 4x4 has the chips of its slice.
            assert math.prod(map(int, topology.split('x'))) == chips
            assert machine.hosts * machine.chips == chips


def test_a_manifest_is_handed_to_kubectl_once(tmp_path):
    script = f'#!/bin/sh\necho "$@" >{tmp_path}/words; cat >{tmp_path}/yaml; exit 3\n'
    write_program(tmp_path / 'kubectl', script)
    flags = ('--accelerator=a3-2x8', '--namespace=lab')
    done = launch(
        'kubernetes', *NAME_AND_IMAGE, *flags, '--', *TRAIN, env=environment_with(tmp_path)
    )
    assert done.returncode == 3
    assert (tmp_path / 'words').read_text() == 'create --namespace=lab -f -\n'
    assert (tmp_path / 'yaml').read_text() == rendered_manifest(*flags, arguments=TRAIN[1:])
