"""A bucket server in memory, on loopback: what qkattn needs of the Cloud Storage JSON API.

Uploads, ranges, listings, and preconditions on generations, which the emulators of the package
index lack. A bucket named `forbidden` may not be entered, one named `read-only` takes no objects.
"""

import base64
import datetime
import email
import http.server
import itertools
import json
import re
import threading
import urllib.parse
from typing import Any, NamedTuple

import google_crc32c

PATH = re.compile(r'/(?:(upload|download)/)?storage/v1/b/([^/]+)(/o)?/?(.*)')
OCTETS = {'Content-Type': 'application/octet-stream'}


class Stored(NamedTuple):
    """One generation of an object."""

    data: bytes
    generation: int
    updated: datetime.datetime


class Refused(Exception):
    """An answer that is an error, with its status."""


class Server(http.server.ThreadingHTTPServer):
    """Serves its buckets until it is closed."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *buckets: str):
        super().__init__(('127.0.0.1', 0), Handler)
        self.buckets: dict[str, dict[str, Stored]] = {name: {} for name in buckets}
        self.lock = threading.RLock()
        self.uploads: dict[str, tuple[str, dict[str, str]]] = {}
        self.numbers = itertools.count(1)
        self.skew = datetime.timedelta()  # what the clock of the buckets is ahead of this machine's
        self.url = f'http://127.0.0.1:{self.server_port}'
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def names(self, bucket: str, prefix: str = '') -> list[str]:
        with self.lock:
            return sorted(name for name in self.buckets[bucket] if name.startswith(prefix))

    def read(self, bucket: str, name: str) -> bytes:
        return self.buckets[bucket][name].data

    def put(self, bucket: str, name: str, data: bytes) -> None:
        with self.lock:
            self.buckets[bucket][name] = Stored(data, next(self.numbers), self._now())

    def set_age(self, bucket: str, name: str, seconds: float) -> None:
        """Makes an object `seconds` old, in the same generation."""
        with self.lock:
            updated = self._now() - datetime.timedelta(seconds=seconds)
            self.buckets[bucket][name] = self.buckets[bucket][name]._replace(updated=updated)

    def _now(self) -> datetime.datetime:
        return datetime.datetime.now(datetime.UTC) + self.skew

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed cut their connections."""


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def _handle(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query))
        self.body = self.rfile.read(int(self.headers.get('Content-Length', 0)))
        headers: dict[str, str] = {}
        try:
            with self.server.lock:
                code, answer, headers = self._answer(*PATH.fullmatch(url.path).groups())
        except Refused as refused:
            code = refused.args[0]
            answer = {'error': {'code': code, 'message': f'refused with {code}'}}
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(code)
        for name, value in ({'Content-Type': 'application/json'} | headers).items():
            self.send_header(name, value)
        if code in (204, 304):  # these have no content
            data = b''
        else:
            self.send_header('Content-Length', str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_DELETE = _handle

    def _answer(self, head: str, bucket: str, objects: str, name: str) -> tuple[int, Any, dict]:
        """Returns status, content and headers of the answer to a request."""
        if bucket == 'forbidden' or (bucket == 'read-only' and self.command != 'GET'):
            raise Refused(403)
        if bucket not in self.server.buckets:
            raise Refused(404)
        if not objects:
            return 200, {'kind': 'storage#bucket', 'name': bucket}, {}
        if head == 'upload':
            return self._upload(bucket)
        if not name:
            return 200, self._listing(bucket), {}
        name = urllib.parse.unquote(name)
        self._check_generation(bucket, name, self.query)
        stored = self.server.buckets[bucket].get(name)
        if stored is None:
            raise Refused(404)
        if self.command == 'DELETE':
            del self.server.buckets[bucket][name]
            return 204, b'', {}
        if head == 'download' or self.query.get('alt') == 'media':
            return self._download(stored)
        return 200, self._about(bucket, name), {}

    def _check_generation(self, bucket: str, name: str, query: dict[str, str]) -> None:
        stored = self.server.buckets[bucket].get(name)
        generation = str(stored.generation if stored else 0)
        if query.get('ifGenerationMatch', generation) != generation:
            raise Refused(412)
        if query.get('ifGenerationNotMatch') == generation:
            raise Refused(304 if self.command == 'GET' else 412)

    def _about(self, bucket: str, name: str) -> dict[str, Any]:
        stored = self.server.buckets[bucket][name]
        return {
            'kind': 'storage#object',
            'bucket': bucket,
            'name': name,
            'size': str(len(stored.data)),
            'generation': str(stored.generation),
            'metageneration': '1',
            'updated': stored.updated.isoformat(timespec='milliseconds').replace('+00:00', 'Z'),
            'crc32c': base64.b64encode(google_crc32c.Checksum(stored.data).digest()).decode(),
        }

    def _listing(self, bucket: str) -> dict[str, Any]:
        """All objects below a prefix; with a delimiter, objects and folders directly below it."""
        prefix = self.query.get('prefix', '')
        delimiter = self.query.get('delimiter')
        items = []
        folders = set()
        for name in self.server.names(bucket, prefix):
            folder, separator, _ = name[len(prefix) :].partition(delimiter or '\0')
            if separator:
                folders.add(prefix + folder + separator)
            else:
                items.append(self._about(bucket, name))
        return {'kind': 'storage#objects', 'items': items, 'prefixes': sorted(folders)}

    def _download(self, stored: Stored) -> tuple[int, bytes, dict[str, str]]:
        headers = OCTETS | {'x-goog-generation': str(stored.generation)}
        size = len(stored.data)
        span = re.fullmatch(r'bytes=(\d*)-(\d*)', self.headers.get('Range', ''))
        if span is None:
            return 200, stored.data, headers
        first, last = span.groups()
        start = int(first) if first else max(0, size - int(last))
        stop = min(size, int(last) + 1) if first and last else size
        if start >= size:
            raise Refused(416)
        headers['Content-Range'] = f'bytes {start}-{stop - 1}/{size}'
        return 206, stored.data[start:stop], headers

    def _upload(self, bucket: str) -> tuple[int, Any, dict[str, str]]:
        """Stores an object that is uploaded in one of three ways.

        media: the body is the object. multipart: the body has a part of metadata with the name,
        and one of data. resumable: a first request gives the name and is told where to send the
        data, which a second request does.
        """
        query = self.query
        data = self.body
        name = query.get('name', '')
        if 'upload_id' in query:
            name, query = self.server.uploads.pop(query['upload_id'])
        elif query['uploadType'] == 'resumable':
            number = str(next(self.server.numbers))
            self.server.uploads[number] = name or json.loads(data)['name'], query
            path = f'/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={number}'
            return 200, b'', {'Location': self.server.url + path}
        elif query['uploadType'] == 'multipart':
            head = f'Content-Type: {self.headers["Content-Type"]}\r\n\r\n'.encode()
            boundary = email.message_from_bytes(head).get_boundary().encode()
            parts = re.split(b'\r?\n?--' + re.escape(boundary) + b'(?:--)?', data)
            # Each part has headers of its own before an empty line.
            metadata, data = (re.split(b'\r?\n\r?\n', part, maxsplit=1)[1] for part in parts[1:3])
            name = json.loads(metadata)['name']
        self._check_generation(bucket, name, query)
        self.server.put(bucket, name, data)
        return 200, self._about(bucket, name), {}
