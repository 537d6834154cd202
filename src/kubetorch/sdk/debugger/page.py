"""The page of a debugger in a browser: source, stack, variables and a prompt.

`kt debug` serves it on loopback, to programs of this user. Each request brings the token that is in
the page's address, and names this server as its host: no other site gets a prompt.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kubetorch.sdk.debugger import local_peers
from kubetorch.sdk.debugger.terminal import DebugTerminal
from kubetorch.sdk.tuning import TIMING
from kubetorch.wire import tuning as wire_tuning

_TOKEN_HEADER = "X-Kubetorch-Token"
#: What pdb is asked for after each command, for the panels of the page.
_PANELS = {
    "source": "ll",
    "stack": "w",
    "variables": "pp {n: v for n, v in locals().items() if not n.startswith('__')}",
}


class DebugPage:
    """Serves the page of one debugger until it is over."""

    def __init__(self, debug_terminal: DebugTerminal) -> None:
        self._terminal = debug_terminal
        self._token = secrets.token_urlsafe(32)
        # Held from a command until the browser has its answer.
        self.answering = threading.Lock()
        page = self

        class Handler(_Handler):
            debug_page = page

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.host}/?token={self._token}"
        self._first_output = debug_terminal.collect()
        thread = threading.Thread(target=self._server.serve_forever, name="kubetorch-page")
        thread.start()

    def wait(self) -> None:
        """Wait until the debugger is over, and the browser has the answer to its last command."""
        self._terminal.over.wait()
        with self.answering:
            pass

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._terminal.leave()

    def is_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token.encode())

    def answer(self, line: str) -> dict[str, object]:
        """The output of a command, and the panels after it; an empty line asks for panels alone."""
        output, self._first_output = self._first_output, ""
        if line.strip() and not self._terminal.is_over:
            self._terminal.answer(line)
            output += self._terminal.collect()
        panels = {}
        for name, command in _PANELS.items():
            if not self._terminal.is_over:
                self._terminal.answer(command)
                panels[name] = self._terminal.collect()
        return {"output": output, "is_over": self._terminal.is_over, **panels}


class _Server(ThreadingHTTPServer):
    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ANN401  # as the base class has it
        """False for a program of another user, which then gets no thread."""
        assert isinstance(request, socket.socket)
        return local_peers.is_of_this_user(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401  # as above
        """Write nothing on the terminal: the client of a request has gone."""


class _Handler(BaseHTTPRequestHandler):
    debug_page: DebugPage
    timeout = TIMING.debug_page_seconds
    server_version, sys_version = "kubetorch", ""

    def do_GET(self) -> None:  # as the base class calls it
        prefix = "/?token="
        if not self.path.startswith(prefix) or not self._is_allowed(self.path[len(prefix) :]):
            self.send_error(403)
            return
        nonce = secrets.token_urlsafe(16)
        text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        self._reply(text.replace("{nonce}", nonce).encode(), "text/html; charset=utf-8", nonce)

    def do_POST(self) -> None:  # as above
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > wire_tuning.LIMITS.debug_message_bytes:
            self.send_error(413)
            return
        # Before a refusal, too: a connection that is closed with an unread body is reset, and the
        # client may never see the answer.
        line = self.rfile.read(int(length)).decode(errors="replace").partition("\n")[0]
        if self.path != "/command" or not self._is_allowed(self.headers.get(_TOKEN_HEADER, "")):
            self.send_error(403)
            return
        with self.debug_page.answering, contextlib.suppress(OSError):  # the browser is gone
            answer = json.dumps(self.debug_page.answer(line)).encode()
            self._reply(answer, "application/json")

    def _is_allowed(self, token: str) -> bool:
        host, origin = self.headers.get("Host"), self.headers.get("Origin")
        is_here = host == self.debug_page.host and origin in (None, f"http://{host}")
        return is_here and self.debug_page.is_token(token)

    def _reply(self, body: bytes, kind: str, nonce: str = "") -> None:
        policy = "default-src 'none'; connect-src 'self'"
        if nonce:
            policy += f"; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'"
        self.send_response(200)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", policy),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Write no line for each request."""
