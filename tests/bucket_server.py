"""A bucket server in memory, with the part of the Cloud Storage JSON API that qkattn needs.

Unlike emulators on PyPI, it checks preconditions on generations, that is, versions of an object.
The bucket `forbidden` refuses all requests, and the bucket `read-only` refuses all changes.
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

# Such as /storage/v1/b/BUCKET/o/NAME or /upload/storage/v1/b/BUCKET/o.
PATH = re.compile(r'/(?:(upload|download)/)?storage/v1/b/([^/]+)(/o)?/?(.*)')
OCTETS = {'Content-Type': 'application/octet-stream'}


class Stored(NamedTuple):
    """One generation of an object."""

    data: bytes
    generation: int
    updated: datetime.datetime


class Refused(Exception):
    """An error answer. The argument is its status, such as 404."""


class Server(http.server.ThreadingHTTPServer):
    """Serves its buckets until it is closed."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *buckets: str):
        """Starts a server with empty buckets of these names, in a thread, on any free port."""
        any_port = 0
        super().__init__(('127.0.0.1', any_port), Handler)
        # The objects of each bucket by name.
        self.buckets: dict[str, dict[str, Stored]] = {name: {} for name in buckets}
        self.lock = threading.RLock()
        # A resumable upload takes two requests. This dictionary has, by the ID of the upload, the
        # object's name and the first request's query.
        self.uploads: dict[str, tuple[str, dict[str, str]]] = {}
        self.numbers = itertools.count(1)  # the next generation or ID of an upload
        self.skew = datetime.timedelta()  # how far the server's clock is ahead of this machine's
        self.url = f'http://127.0.0.1:{self.server_port}'

        poll_seconds = 0.02
        threading.Thread(target=self.serve_forever, args=(poll_seconds,), daemon=True).start()

    def names(self, bucket: str, prefix: str = '') -> list[str]:
        """Returns the names of objects that begin with the prefix, sorted."""
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
            stored = self.buckets[bucket][name]
            self.buckets[bucket][name] = stored._replace(updated=updated)

    def _now(self) -> datetime.datetime:
        return datetime.datetime.now(datetime.UTC) + self.skew

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors of connections, because tests kill clients."""


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""

    def _handle(self) -> None:
        """Answers one request of any method, with the bytes of an object or with JSON."""
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query))
        body_length = int(self.headers.get('Content-Length', 0))
        self.body = self.rfile.read(body_length)

        # A path looks like /storage/v1/b/BUCKET/o/NAME. It may begin with /upload or /download.
        kind, bucket, objects, name = PATH.fullmatch(url.path).groups()
        headers: dict[str, str] = {}
        try:
            with self.server.lock:
                status, answer, headers = self._answer(kind, bucket, objects, name)
        except Refused as refused:
            status = refused.args[0]
            answer = {'error': {'code': status, 'message': f'refused with {status}'}}

        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        # `headers` may replace the Content-Type.
        self._send(status, content, {'Content-Type': 'application/json'} | headers)

    do_GET = do_POST = do_PUT = do_DELETE = _handle

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status in (204, 304):  # these have no content
            content = b''
        else:
            self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _answer(
        self, kind: str | None, bucket: str, objects: str | None, name: str
    ) -> tuple[int, Any, dict]:
        """Returns status, content and headers of the answer to a request.

        Args:
            kind: 'upload' or 'download' if the path of the URL begins with it, or else None.
            bucket: Name of the bucket.
            objects: '/o' if the request is about objects, or else None.
            name: Quoted name of an object, or '' for a request about all objects.

        Raises:
            Refused: The answer is an error.
        """
        # `forbidden` refuses all requests, and `read-only` refuses all changes.
        if bucket == 'forbidden':
            raise Refused(403)
        if bucket == 'read-only' and self.command != 'GET':
            raise Refused(403)
        if bucket not in self.server.buckets:
            raise Refused(404)

        # These requests name no object in their path.
        if not objects:
            return 200, {'kind': 'storage#bucket', 'name': bucket}, {}
        if kind == 'upload':
            return self._upload(bucket)
        if not name:
            return 200, self._listing(bucket), {}

        # A request about one object deletes it, or asks for its content or its metadata.
        name = urllib.parse.unquote(name)
        self._check_generation(bucket, name, self.query)
        stored = self.server.buckets[bucket].get(name)
        if stored is None:
            raise Refused(404)
        # Earlier generations are not kept.
        generation = str(stored.generation)
        if self.query.get('generation', generation) != generation:
            raise Refused(404)
        if self.command == 'DELETE':
            del self.server.buckets[bucket][name]
            return 204, b'', {}
        if kind == 'download' or self.query.get('alt') == 'media':
            return self._download(stored)
        return 200, self._metadata(bucket, name), {}

    def _check_generation(self, bucket: str, name: str, query: dict[str, str]) -> None:
        """Raises Refused if the query has a condition on the generation that does not hold."""
        stored = self.server.buckets[bucket].get(name)
        generation = str(stored.generation) if stored else '0'
        if query.get('ifGenerationMatch', generation) != generation:
            raise Refused(412)
        if query.get('ifGenerationNotMatch') == generation:
            raise Refused(304 if self.command == 'GET' else 412)

    def _metadata(self, bucket: str, name: str) -> dict[str, Any]:
        """Returns the metadata of an object, as the JSON API of Cloud Storage writes them.

        https://cloud.google.com/storage/docs/json_api/v1/objects#resource describes the fields.
        """
        stored = self.server.buckets[bucket][name]
        # The API writes UTC as 'Z', but Python writes it as '+00:00'.
        updated = stored.updated.isoformat(timespec='milliseconds').replace('+00:00', 'Z')
        checksum_bytes = google_crc32c.Checksum(stored.data).digest()
        checksum = base64.b64encode(checksum_bytes).decode()
        return {
            'kind': 'storage#object',
            'bucket': bucket,
            'name': name,
            # The API writes whole numbers as strings.
            'size': str(len(stored.data)),
            'generation': str(stored.generation),
            'metageneration': '1',  # metadata are never changed here
            'updated': updated,
            'crc32c': checksum,
        }

    def _listing(self, bucket: str) -> dict[str, Any]:
        """Lists the objects whose names begin with the prefix of the query.

        With the delimiter '/', lists only what is directly below the prefix, as `ls` does. For
        example, take the prefix 'a/' and the objects 'a/b' and 'a/c/d'. The result has the object
        'a/b' and the folder 'a/c/'.
        """
        prefix = self.query.get('prefix', '')
        delimiter = self.query.get('delimiter')  # '/' or None
        items = []
        folders = set()
        for name in self.server.names(bucket, prefix):
            rest = name.removeprefix(prefix)
            is_in_folder = delimiter and delimiter in rest
            if is_in_folder:
                folder = rest.split(delimiter)[0]
                folders.add(prefix + folder + delimiter)
            else:
                items.append(self._metadata(bucket, name))
        return {'kind': 'storage#objects', 'items': items, 'prefixes': sorted(folders)}

    def _download(self, stored: Stored) -> tuple[int, bytes, dict[str, str]]:
        """Returns status, content and headers of an answer with the data of an object.

        If the request has the header Range, the answer has a range of bytes, with the status 206.
        Else the status is 200. A range that begins behind the last byte is refused with 416.
        """
        headers = OCTETS | {'x-goog-generation': str(stored.generation)}
        size = len(stored.data)
        byte_range = re.fullmatch(r'bytes=(\d*)-(\d*)', self.headers.get('Range', ''))
        if byte_range is None:
            return 200, stored.data, headers

        # A range is FIRST-LAST, FIRST-, or -LENGTH for the last LENGTH bytes.
        first, last_or_length = byte_range.groups()
        start = int(first) if first else max(0, size - int(last_or_length))
        stop = size
        if first and last_or_length:
            stop = min(size, int(last_or_length) + 1)

        if start >= size:
            raise Refused(416)
        headers['Content-Range'] = f'bytes {start}-{stop - 1}/{size}'
        return 206, stored.data[start:stop], headers

    def _upload(self, bucket: str) -> tuple[int, Any, dict[str, str]]:
        """Stores an uploaded object. Returns status, content and headers of the answer.

        The query says how the object is uploaded:

        media: The query has the name, and the body is the object.
        multipart: The body has a part with the name, and a part with the object.
        resumable: The first request has the name, and is answered with a URL. The second request
            goes to this URL, and its body is the object.
        """
        query = self.query
        data = self.body
        name = query.get('name', '')
        if 'upload_id' in query:
            # The second request of a resumable upload.
            name, query = self.server.uploads.pop(query['upload_id'])
        elif query['uploadType'] == 'resumable':
            # The first request of a resumable upload stores no object.
            upload_id = str(next(self.server.numbers))
            name = name or json.loads(data)['name']
            self.server.uploads[upload_id] = (name, query)
            path = f'/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={upload_id}'
            return 200, b'', {'Location': self.server.url + path}
        elif query['uploadType'] == 'multipart':
            metadata, data = self._parts_of_body()
            name = json.loads(metadata)['name']

        # The query may demand that the object has a certain generation, or does not exist yet.
        self._check_generation(bucket, name, query)
        self.server.put(bucket, name, data)
        return 200, self._metadata(bucket, name), {}

    def _parts_of_body(self) -> list[bytes]:
        """Splits a multipart body into the contents of its two parts, without their headers."""
        header = f'Content-Type: {self.headers["Content-Type"]}\r\n\r\n'.encode()
        boundary = email.message_from_bytes(header).get_boundary().encode()
        parts = re.split(b'\r?\n?--' + re.escape(boundary) + b'(?:--)?', self.body)
        contents = []
        for part in parts[1:3]:  # parts[0] is what precedes the first boundary
            _headers, content = re.split(b'\r?\n\r?\n', part, maxsplit=1)
            contents.append(content)
        return contents
