"""Serve the live report, the page and its data, on 127.0.0.1 only."""

import errno
import json
import threading
from collections.abc import Sequence
from hashlib import blake2b
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fedcsd.errors import UserError
from fedcsd.results.report.collect import collect
from fedcsd.results.report.page import page
from fedcsd.results.report.runs import stamp

ADDRESS = "127.0.0.1"


class LiveContent:
    """Keeps the content of the page, and reads it again only when a file has changed."""

    def __init__(self, paths: Sequence[Path]):
        self.paths = paths
        self._lock = threading.Lock()
        self._stamp: str | None = None
        self._content = b""
        self.version = ""

    def content(self) -> tuple[bytes, str]:
        """Return the data as JSON, and a version that changes with it."""
        with self._lock:
            now = stamp(self.paths)
            if now != self._stamp:
                self._content = json.dumps(collect(self.paths, live=True), allow_nan=False).encode()
                self._stamp = now
                self.version = f'"{blake2b(now.encode(), digest_size=12).hexdigest()}"'
            return self._content, self.version


class ReportServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int = 0):
        super().__init__((ADDRESS, port), ReportHandler)
        self.source = LiveContent(paths)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"


class ReportHandler(BaseHTTPRequestHandler):
    server: ReportServer
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        # A web page elsewhere can give this machine's address a name of its own, but it cannot forge the header.
        if self.headers.get("Host", "") not in {
            f"{n}:{self.server.server_port}" for n in (ADDRESS, "localhost")
        }:
            self._answer(HTTPStatus.FORBIDDEN, b"unknown host\n")
        elif self.path == "/":
            content, _ = self.server.source.content()
            text = page(json.loads(content), live=True).encode()
            self._answer(HTTPStatus.OK, text, "text/html; charset=utf-8")
        elif self.path == "/data.json":
            content, version = self.server.source.content()
            if self.headers.get("If-None-Match") == version:
                self._answer(HTTPStatus.NOT_MODIFIED, version=version)
            else:
                self._answer(HTTPStatus.OK, content, "application/json", version)
        elif self.path == "/favicon.ico":
            self._answer(HTTPStatus.NO_CONTENT)
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"there is nothing here\n")

    def _answer(
        self,
        status: HTTPStatus,
        content: bytes = b"",
        kind: str = "text/plain; charset=utf-8",
        version: str = "",
    ) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        headers |= {"X-Frame-Options": "DENY", "Cross-Origin-Resource-Policy": "same-origin"}
        if status not in (HTTPStatus.NOT_MODIFIED, HTTPStatus.NO_CONTENT):
            headers["Content-Length"] = str(len(content))
        if version:
            headers["ETag"] = version
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: a line every second would hide other messages."""


def serve(paths: Sequence[Path], port: int) -> None:
    """Serve until Ctrl-C."""
    from fedcsd.results.terminal import say

    try:
        server = ReportServer(paths, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} is in use: give another --port, or none for a free one") from None
        raise UserError(f"cannot listen on port {port}: {error.strerror or error}") from None
    try:
        there = all(path.exists() for path in paths)
        say(
            f"{'watching' if there else 'waiting for'} {', '.join(map(str, paths))} at {server.url} (Ctrl-C ends it)"
        )
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        say("stopped watching")
    finally:
        server.server_close()
