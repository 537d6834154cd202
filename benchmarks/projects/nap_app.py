"""A plain HTTP app that waits: what a bare Knative service runs beside `naps.nap`."""

from __future__ import annotations

import os
import signal
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class Handler(BaseHTTPRequestHandler):
    """`GET /?number=7&seconds=0.2` answers `7` after 0.2 s."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        time.sleep(float(query["seconds"][0]))
        body = query["number"][0].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """No line for each request: ours has none either."""


class Server(ThreadingHTTPServer):
    request_queue_size = 256


if __name__ == "__main__":
    # The first process of a container ignores what it does not handle.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    Server(("", int(os.environ["PORT"])), Handler).serve_forever()
