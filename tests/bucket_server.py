"""A bucket server in memory, on loopback: what qkattn needs of the Cloud Storage JSON API.

    python -m tests.bucket_server BUCKET...     prints the STORAGE_EMULATOR_HOST to export

Uploads (media, multipart, resumable), ranges, listings, copies, and preconditions on generations,
which the emulators of the package index lack. A bucket named `forbidden` may not be entered, one
named `read-only` takes no objects.
"""

import base64
import dataclasses
import datetime
import email
import email.policy
import hashlib
import http.server
import itertools
import json
import re
import sys
import threading
import urllib.parse
from typing import Any

import google_crc32c


@dataclasses.dataclass(frozen=True)
class Stored:
    """One generation of an object."""

    data: bytes
    generation: int
    updated: datetime.datetime


class Refused(Exception):
    """An answer other than 200, with its status."""


class Server(http.server.ThreadingHTTPServer):
    """Serves its buckets until it is closed; a context manager."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *buckets: str):
        super().__init__(('127.0.0.1', 0), Handler)
        self.buckets: dict[str, dict[str, Stored]] = {name: {} for name in buckets}
        self.log: list[str] = []
        """Method and path of every request."""
        self.lock = threading.RLock()
        self.uploads: dict[str, tuple[str, dict[str, str], bytearray]] = {}
        self.numbers = itertools.count(1)
        self.skew = datetime.timedelta()
        """What the clock of the buckets is ahead of this machine's."""
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f'http://127.0.0.1:{self.server_port}'

    def environment(self) -> dict[str, str]:
        """What a process needs to use this server and nothing else."""
        return {'STORAGE_EMULATOR_HOST': self.url, 'NO_GCE_CHECK': 'true'}

    def names(self, bucket: str, prefix: str = '') -> list[str]:
        with self.lock:
            return sorted(name for name in self.buckets[bucket] if name.startswith(prefix))

    def read(self, bucket: str, name: str) -> bytes:
        return self.buckets[bucket][name].data

    def put(self, bucket: str, name: str, data: bytes, age: float = 0.0) -> Stored:
        now = datetime.datetime.now(datetime.UTC) + self.skew - datetime.timedelta(seconds=age)
        with self.lock:
            stored = self.buckets[bucket][name] = Stored(data, next(self.numbers), now)
        return stored

    def set_age(self, bucket: str, name: str, seconds: float) -> None:
        """Makes an object `seconds` old, in the same generation."""
        with self.lock:
            now = datetime.datetime.now(datetime.UTC) + self.skew
            old = now - datetime.timedelta(seconds=seconds)
            self.buckets[bucket][name] = dataclasses.replace(
                self.buckets[bucket][name], updated=old
            )

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
        self.body = self._read_body()
        self.server.log.append(f'{self.command} {self.path}')
        parts = [urllib.parse.unquote(part) for part in url.path.strip('/').split('/')]
        head = parts[0] if parts[0] in ('upload', 'download') else ''
        parts = parts[bool(head) :]
        try:
            if parts[:3] != ['storage', 'v1', 'b'] or len(parts) < 4:
                raise Refused(404)
            bucket, rest = parts[3], parts[5:]
            if bucket == 'forbidden':
                raise Refused(403)
            if bucket not in self.server.buckets:
                raise Refused(404)
            if bucket == 'read-only' and self.command != 'GET':
                raise Refused(403)
            with self.server.lock:
                if len(parts) == 4:
                    self._answer_json({'kind': 'storage#bucket', 'name': bucket})
                elif head == 'upload':
                    self._upload(bucket)
                elif not rest:
                    self._list(bucket)
                elif len(rest) > 1:
                    self._copy(bucket, rest)
                elif self.command == 'DELETE':
                    self._precondition(bucket, rest[0])
                    self._get(bucket, rest[0])
                    del self.server.buckets[bucket][rest[0]]
                    self._answer(b'', 204)
                elif head == 'download' or self.query.get('alt') == 'media':
                    self._download(bucket, rest[0])
                else:
                    self._answer_json(self._about(bucket, rest[0]))
        except Refused as refused:
            code = refused.args[0]
            error = {'code': code, 'message': f'refused with {code}'}
            self._answer(b'' if code == 304 else json.dumps({'error': error}).encode(), code)

    do_GET = do_POST = do_PUT = do_DELETE = _handle

    def _read_body(self) -> bytes:
        if self.headers.get('Transfer-Encoding') != 'chunked':
            return self.rfile.read(int(self.headers.get('Content-Length', 0)))
        data = b''
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _get(self, bucket: str, name: str) -> Stored:
        stored = self.server.buckets[bucket].get(name)
        if stored is None:
            raise Refused(404)
        return stored

    def _precondition(self, bucket: str, name: str, query: dict[str, str] | None = None) -> None:
        query = self.query if query is None else query
        stored = self.server.buckets[bucket].get(name)
        generation = stored.generation if stored else 0
        if 'ifGenerationMatch' in query and int(query['ifGenerationMatch']) != generation:
            raise Refused(412)
        if 'ifGenerationNotMatch' in query and int(query['ifGenerationNotMatch']) == generation:
            raise Refused(304 if self.command == 'GET' else 412)

    def _about(self, bucket: str, name: str) -> dict[str, Any]:
        self._precondition(bucket, name)
        stored = self._get(bucket, name)
        updated = stored.updated.isoformat(timespec='milliseconds').replace('+00:00', 'Z')
        return {
            'kind': 'storage#object',
            'bucket': bucket,
            'name': name,
            'size': str(len(stored.data)),
            'generation': str(stored.generation),
            'metageneration': '1',
            'updated': updated,
            'timeCreated': updated,
            'md5Hash': base64.b64encode(hashlib.md5(stored.data).digest()).decode(),
            'crc32c': base64.b64encode(google_crc32c.Checksum(stored.data).digest()).decode(),
        }

    def _list(self, bucket: str) -> None:
        query = self.query
        prefix, delimiter = query.get('prefix', ''), query.get('delimiter')
        names = self.server.names(bucket, prefix)
        names = [n for n in names if n >= query.get('startOffset', '')]
        names = [n for n in names if 'endOffset' not in query or n < query['endOffset']]
        folders = set()
        if delimiter:
            inside = [n for n in names if delimiter in n[len(prefix) :]]
            folders = {prefix + n[len(prefix) :].split(delimiter)[0] + delimiter for n in inside}
            names = [n for n in names if n not in set(inside)]
        entries = sorted([*names, *folders])
        start = int(query.get('pageToken', 0))
        end = start + int(query.get('maxResults', 1000))
        page = entries[start:end]
        answer: dict[str, Any] = {'kind': 'storage#objects'}
        answer['items'] = [self._about(bucket, n) for n in page if n not in folders]
        answer['prefixes'] = [n for n in page if n in folders]
        if end < len(entries):
            answer['nextPageToken'] = str(end)
        self._answer_json(answer)

    def _download(self, bucket: str, name: str) -> None:
        self._precondition(bucket, name)
        stored = self._get(bucket, name)
        headers = {'x-goog-generation': str(stored.generation)}
        wanted = re.fullmatch(r'bytes=(\d*)-(\d*)', self.headers.get('Range', ''))
        if wanted is None:
            self._answer(stored.data, 200, headers)
            return
        size = len(stored.data)
        first, last = wanted.groups()
        start = int(first) if first else max(0, size - int(last))
        stop = min(size, int(last) + 1) if first and last else size
        if start >= size:
            raise Refused(416)
        headers['Content-Range'] = f'bytes {start}-{stop - 1}/{size}'
        self._answer(stored.data[start:stop], 206, headers)

    def _upload(self, bucket: str) -> None:
        kind, query = self.query.get('uploadType'), self.query
        if 'upload_id' in query:
            self._resume(bucket, query['upload_id'])
        elif kind == 'resumable':
            about = json.loads(self.body or b'{}')
            name = query.get('name') or about['name']
            upload = str(next(self.server.numbers))
            self.server.uploads[upload] = name, query, bytearray()
            where = f'/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={upload}'
            self._answer(b'', 200, {'Location': self.server.url + where})
        elif kind == 'multipart':
            head = f'Content-Type: {self.headers["Content-Type"]}\r\n\r\n'.encode()
            boundary = email.message_from_bytes(head).get_boundary()
            parts = re.split(b'\r?\n?--' + re.escape(boundary.encode()) + b'(?:--)?', self.body)
            about, data = (re.split(b'\r?\n\r?\n', part, maxsplit=1)[1] for part in parts[1:3])
            self._store(bucket, json.loads(about)['name'], query, data)
        else:
            self._store(bucket, query['name'], query, self.body)

    def _resume(self, bucket: str, upload: str) -> None:
        name, query, received = self.server.uploads[upload]
        span = self.headers.get('Content-Range', 'bytes 0-/0')
        first, last, total = re.fullmatch(r'bytes (?:(\d+)-(\d*)|\*)/(\d+|\*)', span).groups()
        if first is not None:
            received[int(first) :] = self.body
        if total != '*' or last == '':
            del self.server.uploads[upload]
            self._store(bucket, name, query, bytes(received))
        else:
            self._answer(b'', 308, {'Range': f'bytes=0-{len(received) - 1}'} if received else {})

    def _store(self, bucket: str, name: str, query: dict[str, str], data: bytes) -> None:
        self._precondition(bucket, name, query)
        self.server.put(bucket, name, data)
        self.query = {}
        self._answer_json(self._about(bucket, name))

    def _copy(self, bucket: str, rest: list[str]) -> None:
        """o/NAME/rewriteTo/b/BUCKET/o/NAME and o/NAME/moveTo/o/NAME."""
        source, call, target = rest[0], rest[1], rest[-1]
        there = rest[3] if call == 'rewriteTo' else bucket
        if call not in ('rewriteTo', 'moveTo') or there not in self.server.buckets:
            raise Refused(404)
        self.server.put(there, target, self._get(bucket, source).data)
        if call == 'moveTo':
            del self.server.buckets[bucket][source]
        about = self._about(there, target)
        self._answer_json({'done': True, 'resource': about} if call == 'rewriteTo' else about)

    def _answer_json(self, value: Any) -> None:
        self._answer(json.dumps(value).encode(), 200, {'Content-Type': 'application/json'})

    def _answer(self, data: bytes, code: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if code not in (204, 304):
            self.send_header('Content-Length', str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == '__main__':
    server = Server(*sys.argv[1:])
    print(server.url, flush=True)
    threading.Event().wait()
