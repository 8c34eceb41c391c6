"""A Cloud TPU API on loopback, as much of it as gcloud uses, and stand-ins for ssh and scp."""

import contextlib
import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

PROJECT, ZONE = 'p', 'us-central2-b'
PLACE = f'projects/{PROJECT}/locations/{ZONE}'
DONE = {'name': f'{PLACE}/operations/done', 'done': True}


class CloudApi(http.server.ThreadingHTTPServer):
    """Queued resources and their nodes; `calls` has (method, path, body) of every change.

    A request is ACTIVE at once, with `hosts` hosts.
    """

    daemon_threads = True

    def __init__(self, hosts: int) -> None:
        super().__init__(('127.0.0.1', 0), Handler)
        self.hosts = hosts
        self.calls: list[tuple[str, str, Any]] = []
        self.queued: dict[str, dict[str, Any]] = {}
        self.metadata: dict[str, str] = {}
        self.patched = ''

    def node(self, name: str) -> dict[str, Any]:
        ends = [f'127.0.0.{k + 1}' for k in range(self.hosts)]
        return {
            'name': f'{PLACE}/nodes/{name}',
            'state': 'READY',
            'health': 'HEALTHY',
            'metadata': self.metadata,
            'networkEndpoints': [
                {'ipAddress': ip, 'port': 8470, 'accessConfig': {'externalIp': ip}} for ip in ends
            ],
        }

    def answer(self, method: str, url: str, body: Any) -> tuple[int, Any]:
        path, query = urlsplit(url).path, parse_qs(urlsplit(url).query)
        if method != 'GET':
            self.calls.append((method, path, body))
        last = path.rsplit('/', 1)[-1]
        if path.endswith('/queuedResources'):
            if method == 'GET':
                return 200, {'queuedResources': list(self.queued.values())}
            name = query['queuedResourceId'][0]
            if name in self.queued:
                return 409, {'error': {'code': 409, 'message': f'{name} exists'}}
            self.queued[name] = {
                'name': f'{PLACE}/queuedResources/{name}',
                'state': {'state': 'ACTIVE'},
                **body,
            }
            return 200, DONE | {'response': self.queued[name]}
        if '/queuedResources/' in path:
            if last not in self.queued:
                return 404, {'error': {'code': 404, 'message': f'{last} not found'}}
            if method == 'DELETE':
                return 200, DONE | {'response': self.queued.pop(last)}
            return 200, self.queued[last]
        if method == 'PATCH':  # the public key for ssh
            self.metadata, self.patched = body['metadata'], last
        if method == 'PATCH' or '/operations/' in path:
            return 200, DONE | {'response': self.node(self.patched)}
        if 'uestAttributes' in path:
            return 200, {'guestAttributes': []}
        if '/nodes/' in path:
            return 200, self.node(last)
        return 200, {
            'name': PROJECT,
            'kind': 'compute#project',
            'commonInstanceMetadata': {'items': [], 'fingerprint': 'eA=='},
        }


class Handler(http.server.BaseHTTPRequestHandler):
    server: CloudApi

    def do_GET(self) -> None:
        length = int(self.headers.get('Content-Length') or 0)
        body = json.loads(self.rfile.read(length) or 'null')
        code, answer = self.server.answer(self.command, self.path, body)
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_PATCH = do_DELETE = do_GET

    def log_message(self, *arguments: Any) -> None:
        """Stays silent."""


@contextlib.contextmanager
def cloud_api(hosts: int) -> Iterator[CloudApi]:
    server = CloudApi(hosts)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# What follows the host and one `--` is joined by spaces and read by a shell, as ssh and sshd do.
SSH = """#!{python}
import json, os, re, subprocess, sys
arguments = sys.argv[1:]
host = next(a for a in arguments if re.search(r'127[.]0[.]0[.]\\d+$', a.split(':')[0]))
rest = arguments[arguments.index(host) + 1:]
command = ' '.join(rest[rest[:1] == ['--']:])
ip = host.split('@')[-1]
home = os.path.join({hosts!r}, ip)
os.makedirs(home, exist_ok=True)
with open({log!r}, 'a') as log:
    log.write(json.dumps([ip, command]) + '\\n')
environment = dict(os.environ, HOME=home, PATH={path!r})
sys.exit(subprocess.run(['bash', '-c', command], cwd=home, env=environment).returncode)
"""
SCP = """#!{python}
import os, shutil, sys
source, target = sys.argv[-2:]
ip, path = target.split('@')[-1].split(':', 1)
os.makedirs(os.path.join({hosts!r}, ip), exist_ok=True)
shutil.copy(source, os.path.join({hosts!r}, ip, path))
"""


class Hosts:
    """Directories 127.0.0.K that stand for hosts; ssh and scp stand-ins that act on them."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder, self.bin, self.log = folder / 'hosts', folder / 'bin', folder / 'ssh.jsonl'
        self.bin.mkdir()
        values = {
            'python': python,
            'hosts': str(self.folder),
            'log': str(self.log),
            'path': os.environ['PATH'],
        }
        for name, text in (('ssh', SSH), ('scp', SCP)):
            (self.bin / name).write_text(text.format(**values))
            (self.bin / name).chmod(0o755)

    def commands(self) -> list[tuple[str, str]]:
        """(host, command) of every ssh so far, by host."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return sorted(tuple(json.loads(line)) for line in lines)


def environment(folder: Path, port: int, hosts: Hosts) -> dict[str, str]:
    """For gcloud without credentials, with its requests sent to loopback."""
    kept = {name: os.environ[name] for name in ('PYTHONPATH', 'LANG') if name in os.environ}
    return kept | {
        'HOME': str(folder),
        'PATH': f'{hosts.bin}:{os.environ["PATH"]}',
        'CLOUDSDK_CONFIG': str(folder / 'gcloud'),
        'CLOUDSDK_CORE_PROJECT': PROJECT,
        'CLOUDSDK_CORE_CHECK_GCE_METADATA': 'false',
        'CLOUDSDK_CORE_DISABLE_USAGE_REPORTING': 'true',
        'CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK': 'true',
        'CLOUDSDK_AUTH_DISABLE_CREDENTIALS': 'true',
        'CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU': f'http://127.0.0.1:{port}/',
        'CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE': f'http://127.0.0.1:{port}/compute/v1/',
    }
