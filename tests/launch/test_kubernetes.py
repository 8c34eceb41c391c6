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
# The number of pods of each case, and the number of chips of a pod.
SIZES = {
    'tpu': (4, 4),
    'v5p': (8, 4),
    'gpu': (2, 8),
    'any gpu': (3, 4),
    'study': (5, 8),
    'gpu study': (2, 2),
}


def is_gpu(case: str) -> bool:
    return 'gpu' in case


def rendered_manifest(*flags: str, arguments=AWKWARD) -> str:
    """The YAML of a job: a study if a flag sets --workers, otherwise training."""
    is_study = any(flag.startswith('--workers') for flag in flags)
    command = 'ablate' if is_study else 'train'
    return dry_run('kubernetes', *NAME_AND_IMAGE, *flags, command=(command, *arguments))


@functools.cache
def manifest_of(case: str) -> dict:
    """The manifest of a case. Its command has the arguments AWKWARD."""
    return yaml.safe_load(rendered_manifest(*CASES[case]))


def job_of(manifest: dict) -> dict:
    """The job specification in a Job, or in a JobSet of one job."""
    if manifest['kind'] == 'Job':
        return manifest['spec']
    replicated_jobs = manifest['spec']['replicatedJobs']
    assert len(replicated_jobs) == 1
    return replicated_jobs[0]['template']['spec']


def pod_of(manifest: dict) -> dict:
    return job_of(manifest)['template']['spec']


def container_of(manifest: dict) -> dict:
    containers = pod_of(manifest)['containers']
    assert len(containers) == 1
    return containers[0]


def variables_of(manifest: dict) -> dict[str, dict]:
    """The environment variables of the container by name, such as {'A': {..., 'value': '1'}}."""
    variables = container_of(manifest)['env']
    by_name = {variable['name']: variable for variable in variables}
    assert len(by_name) == len(variables)
    return by_name


def expand_as_kubelet(text: str, env: dict[str, str]) -> str:
    """Expands an argument as the kubelet does: $(NAME) is a variable, and $$ is a dollar sign."""

    def expand(match: re.Match) -> str:
        if match[0] == '$$':
            return '$'
        return env.get(match['name'], match[0])

    return re.sub(r'\$\$|\$\((?P<name>[^)]*)\)', expand, text)


def validation_problems(manifests: list[str]) -> list[list[str]]:
    """The problems that validate_manifest.py finds in each manifest, as lists of messages."""
    script = Path(__file__).with_name('validate_manifest.py')
    output = subprocess.check_output([PYTHON, str(script)], input=json.dumps(manifests), text=True)
    return [problems for _, problems in json.loads(output)]


needs_validation = pytest.mark.skipif(
    not PYTHON, reason='QKATTN_TEST_KUBERNETES_PYTHON: see validate_manifest.py'
)


@needs_validation
def test_manifests_have_only_fields_of_the_published_schemas():
    manifests = [rendered_manifest(*flags) for flags in CASES.values()]

    problems = validation_problems(manifests)

    assert problems == [[] for _ in CASES]


@needs_validation
def test_the_validation_finds_misspelled_fields():
    manifest = rendered_manifest(*CASES['tpu'])
    manifest = manifest.replace('maxRestarts', 'maxRestart')
    manifest = manifest.replace('parallelism', 'paralelism')

    [problems] = validation_problems([manifest])

    assert '.spec.failurePolicy.maxRestart is unknown' in problems
    assert '.spec.replicatedJobs[0].template.spec.paralelism is unknown' in problems
    assert any("'paralelism' was unexpected" in problem for problem in problems)


@pytest.mark.parametrize('case', CASES)
def test_a_job_has_the_pods_and_chips_of_its_accelerator(case):
    job = job_of(manifest_of(case))
    container = container_of(manifest_of(case))

    num_pods, chips_per_pod = SIZES[case]
    resource = 'nvidia.com/gpu' if is_gpu(case) else 'google.com/tpu'
    assert job['parallelism'] == num_pods
    assert job['completions'] == num_pods
    assert container['resources']['limits'] == {resource: chips_per_pod}


@pytest.mark.parametrize('case', CASES)
def test_a_container_gets_the_arguments_unchanged(case):
    container = container_of(manifest_of(case))

    assert container['command'] == ['python', '-m', 'qkattn']
    env = {'HOME': '/root', 'NAME': 'replaced', 'id': 'replaced'}
    expanded = [expand_as_kubelet(argument, env) for argument in container['args']]
    assert expanded[1:] == list(AWKWARD)


@pytest.mark.parametrize('case', CASES)
def test_a_pod_has_the_settings_of_its_accelerator(case):
    manifest = manifest_of(case)
    pod = pod_of(manifest)
    text = json.dumps(pod)

    # Pods with TPUs run as root, and pods with GPUs do not, so the caches have different owners.
    kind = 'gpu' if is_gpu(case) else 'tpu'
    cache = variables_of(manifest)['JAX_COMPILATION_CACHE_DIR']
    assert cache['value'] == f'/runs/.jax-cache-{kind}'
    assert ('runAsUser' in text) == (not is_gpu(case))

    # A pod that fails is replaced by the Job or JobSet, and does not restart itself.
    assert pod['restartPolicy'] == 'Never'
    # The case 'any gpu' sets --grace=40, and the default is 300 seconds.
    grace = 40 if case == 'any gpu' else 300
    assert pod['terminationGracePeriodSeconds'] == grace
    # With fsGroup, a mount changes the modes of all files, unless OnRootMismatch is set.
    assert ('"fsGroup"' in text) == ('OnRootMismatch' in text)


@pytest.mark.parametrize(
    ('case', 'selector'),
    [
        (
            'tpu',
            {
                'cloud.google.com/gke-tpu-accelerator': 'tpu-v6e-slice',
                'cloud.google.com/gke-tpu-topology': '4x4',
                'cloud.google.com/gke-spot': 'true',
            },
        ),
        ('gpu', {'cloud.google.com/gke-accelerator': 'nvidia-h100-80gb'}),
        ('any gpu', {}),
    ],
)
def test_nodes_are_selected_by_their_accelerator(case, selector):
    assert pod_of(manifest_of(case))['nodeSelector'] == selector


def test_variables_let_the_processes_of_a_job_find_each_other():
    manifest = manifest_of('gpu')
    variables = variables_of(manifest)

    # Hostnames of a JobSet: NAME-REPLICATEDJOB-JOB-POD, in the subdomain NAME.
    assert variables['JAX_COORDINATOR_ADDRESS']['value'] == 'qk-train-0-0.qk:8476'
    assert variables['JAX_NUM_PROCESSES']['value'] == '2'
    pod_index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert variables['JAX_PROCESS_ID']['valueFrom'] == {'fieldRef': {'fieldPath': pod_index}}
    assert job_of(manifest)['completionMode'] == 'Indexed'


def test_a_variable_of_the_user_arrives_unchanged():
    variables = variables_of(manifest_of('gpu'))

    value = variables['NAME']['value']
    assert expand_as_kubelet(value, {'c': 'replaced'}) == "a 'b' $(c)"


def test_a_variable_of_the_user_replaces_ours():
    variables = variables_of(manifest_of('any gpu'))

    assert variables['JAX_PROCESS_ID'].get('value') == '7'


@pytest.mark.parametrize(
    ('case', 'names'),
    [
        ('study', {'JAX_COMPILATION_CACHE_DIR'}),
        ('gpu study', {'JAX_COMPILATION_CACHE_DIR', 'JAX_PLATFORMS'}),
        ('tpu', {'JAX_COMPILATION_CACHE_DIR', 'QKATTN_CONNECT_SECONDS'}),
    ],
)
def test_workers_and_tpu_hosts_need_no_addresses(case, names):
    assert variables_of(manifest_of(case)).keys() == names


def pod_failure_rules(job: dict) -> list[tuple[str, list[int] | str]]:
    """(action, exit codes) of each rule, or (action, 'disrupted') if it has no exit codes."""
    rules = []
    for rule in job['podFailurePolicy']['rules']:
        codes = rule['onExitCodes']['values'] if 'onExitCodes' in rule else 'disrupted'
        rules.append((rule['action'], codes))
    return rules


@pytest.mark.parametrize('case', ['study', 'gpu study'])
def test_exit_codes_decide_whether_a_worker_restarts(case):
    manifest = manifest_of(case)
    job = job_of(manifest)

    assert manifest['kind'] == 'Job'
    assert pod_failure_rules(job) == [('FailJob', [2]), ('Ignore', [75]), ('Ignore', 'disrupted')]
    assert job['backoffLimitPerIndex'] == 3


@pytest.mark.parametrize('case', ['tpu', 'v5p', 'gpu', 'any gpu'])
def test_exit_codes_decide_whether_a_run_restarts(case):
    """A run is a JobSet of one job. Its failure policy restarts it, except after exit code 2.

    Exit code 2 means a wrong setting, and 75 means that the run was stopped with a checkpoint.
    """
    manifest = manifest_of(case)
    job = job_of(manifest)
    policy = manifest['spec']['failurePolicy']

    # A pod that fails ends the job, and the failure policy of the JobSet restarts it.
    assert manifest['kind'] == 'JobSet'
    assert pod_failure_rules(job) == [('FailJob', [2, 75]), ('FailJob', 'disrupted')]
    assert job['backoffLimit'] == 0
    # The case 'any gpu' sets --retries=0, and the default is 3.
    assert policy['maxRestarts'] == (0 if case == 'any gpu' else 3)

    # The first rule is for exit code 2. The second is for 75 and for preempted pods.
    wrong_setting, stopped = policy['rules']
    assert wrong_setting['action'] == 'FailJobSet'
    assert stopped['action'] == 'RestartJobSetAndIgnoreMaxRestarts'
    assert set(wrong_setting['onJobFailureReasons']) == {'PodFailurePolicy'}
    assert set(stopped['onJobFailureReasons']) == {'PodFailurePolicy'}

    # The pattern of the first rule matches only the controller's message for exit code 2.
    pattern = wrong_setting['onJobFailureMessagePatterns'][0]
    assert pattern in 'failed with exit code 2 matching FailJob rule at index 0'
    assert pattern not in 'failed with exit code 75 matching FailJob rule at index 0'


def test_slices_have_the_shapes_of_their_sizes(monkeypatch):
    """A slice of 16 chips, for example, has the topology 4x4, and 4 hosts with 4 chips each."""
    monkeypatch.syspath_prepend(str(LAUNCH))
    launcher = runpy.run_path(str(LAUNCH / 'kubernetes.py'))
    hardware = launcher['hardware']

    for kind, tpu in launcher['TPUS'].items():
        for num_chips, topology in tpu.topologies.items():
            lengths = [int(length) for length in topology.split('x')]  # '4x4' -> [4, 4]
            assert math.prod(lengths) == num_chips

            # 'v6e-16' names 16 chips, with 1 unit per chip. 'v5p-16' names 16 cores, which are 8
            # chips, with 2 units (cores) per chip.
            chips_or_cores = num_chips * tpu.units_per_chip
            machine = hardware(f'{kind}-{chips_or_cores}')
            chips_per_host = machine.chips
            assert machine.hosts * chips_per_host == num_chips


@pytest.mark.parametrize(('extras', 'requirement'), [('', '.'), ('tpu,gcs', '.[tpu,gcs]')])
def test_the_image_is_built_with_and_without_extras(extras, requirement):
    """The Dockerfile names what pip installs by an expression of the shell, with EXTRAS in it."""
    dockerfile = (LAUNCH / 'kubernetes/Dockerfile').read_text()
    expression = re.search(r' -e (".*?")', dockerfile)[1]

    printed = subprocess.check_output(
        ['sh', '-c', f'printf %s {expression}'], env={**os.environ, 'EXTRAS': extras}, text=True
    )

    # pip takes '.[]' for the name of a directory, so no extras have no brackets.
    assert printed == requirement


def test_a_manifest_is_handed_to_kubectl_once(tmp_path):
    """The launcher calls `kubectl create`, and ends with its exit code."""
    # The stand-in for kubectl writes its arguments and its input to files, and ends with 3.
    script = f'#!/bin/sh\necho "$@" >>{tmp_path}/arguments; cat >{tmp_path}/yaml; exit 3\n'
    write_program(tmp_path / 'kubectl', script)
    flags = ('--accelerator=a3-2x8', '--namespace=lab')

    finished = launch(
        'kubernetes', *NAME_AND_IMAGE, *flags, '--', *TRAIN, env=environment_with(tmp_path)
    )

    assert finished.returncode == 3
    # kubectl is called once, so there is one line. `-f -` reads the manifest from the input.
    assert (tmp_path / 'arguments').read_text() == 'create --namespace=lab -f -\n'
    assert (tmp_path / 'yaml').read_text() == rendered_manifest(*flags, arguments=TRAIN[1:])
