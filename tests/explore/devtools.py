"""A page in headless Chromium, driven by the DevTools protocol over two pipes."""

import base64
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = ['--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars', '--no-first-run']
FLAGS += ['--disable-extensions', '--disable-background-networking', '--disable-dev-shm-usage']


class Page:
    """One open page; messages are JSON that ends in a zero byte."""

    def __init__(self, write: int, read: int, complaints: Path):
        self._write, self._read = os.fdopen(write, 'wb', 0), os.fdopen(read, 'rb')
        self._complaints = complaints
        self._id, self._session = 0, None
        self.events: list[dict[str, Any]] = []

    def open(self, url: str) -> None:
        target = self.send('Target.createTarget', url='about:blank')['targetId']
        attached = self.send('Target.attachToTarget', targetId=target, flatten=True)
        self._session = attached['sessionId']
        for domain in ('Page', 'Runtime', 'Network', 'Log'):
            self.send(f'{domain}.enable')
        self.send('Page.navigate', url=url)
        while not any(event['method'] == 'Page.loadEventFired' for event in self.events):
            self._take()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command; AssertionError where it fails."""
        self._id += 1
        message = {'id': self._id, 'method': method, 'params': params}
        if self._session:
            message['sessionId'] = self._session
        self._write.write(json.dumps(message).encode() + b'\0')
        while (answer := self._take()).get('id') != self._id:
            pass
        assert 'error' not in answer, answer
        return answer['result']

    def _take(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._read.read(1)) != b'\0':
            assert byte, f'Chromium has ended: {self._complaints.read_text()[-1000:]}'
            data += byte
        message = json.loads(data)
        if 'method' in message:
            self.events.append(message)
        return message

    def run(self, script: str) -> Any:
        """The value of an expression in the page, a promise's included."""
        options = {'returnByValue': True, 'awaitPromise': True}
        answer = self.send('Runtime.evaluate', expression=script, **options)
        assert 'exceptionDetails' not in answer, answer['exceptionDetails']
        return answer['result'].get('value')

    def center(self, selector: str) -> tuple[float, float]:
        """Where an element is, after it is scrolled into view."""
        quoted = json.dumps(selector)
        box = self.run(
            f'(() => {{ const e = document.querySelector({quoted}); '
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect(); "
            'return [r.x + r.width / 2, r.y + r.height / 2] })()'
        )
        return box[0], box[1]

    def drag(self, selector: str, right: float) -> None:
        """Presses on an element, moves to the right in steps, and lets go."""
        x, y = self.center(selector)
        self.mouse('mousePressed', x, y)
        for step in range(1, 5):
            self.mouse('mouseMoved', x + right * step / 4, y)
        self.mouse('mouseReleased', x + right, y)

    def mouse(self, kind: str, x: float, y: float, held: bool = True) -> None:
        """One event of the mouse, with its left button held or with none."""
        button = {'button': 'left', 'buttons': 1, 'clickCount': 1} if held else {}
        self.send('Input.dispatchMouseEvent', type=kind, x=x, y=y, **button)

    def press(self, key: str, shift: bool = False) -> None:
        """One key, down and up; a character types itself."""
        text = {'text': key} if len(key) == 1 else {}
        for kind in ('keyDown', 'keyUp'):
            text = text if kind == 'keyDown' else {}
            self.send('Input.dispatchKeyEvent', type=kind, key=key, modifiers=8 * shift, **text)

    def screenshot(self, path: Path, width: int, height: int, dark: bool = False) -> None:
        """A PNG of the first `height` pixels at a width; a phone below 600."""
        size = {'width': width, 'height': height, 'deviceScaleFactor': 1, 'mobile': width < 600}
        self.send('Emulation.setDeviceMetricsOverride', **size)
        scheme = {'name': 'prefers-color-scheme', 'value': 'dark' if dark else 'light'}
        self.send('Emulation.setEmulatedMedia', features=[scheme])
        self.run('new Promise((done) => setTimeout(done, 250))')  # what fades has done so
        path.write_bytes(base64.b64decode(self.send('Page.captureScreenshot')['data']))


@contextmanager
def opened(chromium: str, url: str, profile: Path, seconds: float = 60) -> Iterator[Page]:
    """A page at `url`; after `seconds` the browser is ended, and so is a test that waits for it."""
    to_read, write = os.pipe()
    read, to_write = os.pipe()
    command = [chromium, *FLAGS, f'--user-data-dir={profile}', '--remote-debugging-pipe']
    program = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
    complaints = profile.with_suffix('.log')
    with complaints.open('wb') as log:
        process = subprocess.Popen(
            ['bash', '-c', program, *command],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
    os.close(to_read)
    os.close(to_write)
    watch = threading.Timer(seconds, process.kill)
    watch.start()
    try:
        page = Page(write, read, complaints)
        page.open(url)
        yield page
    finally:
        watch.cancel()
        process.kill()
        process.wait()
