"""A web server on this machine, and a network that is down."""

import contextlib
import functools
import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[str]:
    """Serves the files of a directory; yields their address."""
    handler = functools.partial(Quiet, directory=str(directory))
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f'http://127.0.0.1:{server.server_port}'
        finally:
            server.shutdown()
            thread.join()


def unplug(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on no name resolves; returns the names that were looked up."""
    asked = []

    def unresolved(host, *args, **kwargs):
        asked.append(host)
        # Retries take minutes, so a second look-up of a name ends the test.
        assert asked.count(host) == 1, 'the download was tried again'
        raise socket.gaierror(socket.EAI_NONAME, 'Name or service not known')

    monkeypatch.setattr(socket, 'getaddrinfo', unresolved)
    for name in ('HTTP_PROXY', 'HTTPS_PROXY', 'ALL_PROXY'):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return asked
