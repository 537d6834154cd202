"""Who gets the page of a debugger, and what a browser may do with it."""

from __future__ import annotations

import contextlib
import http.client
import socket

import pytest

from kubetorch.sdk.debugger.page import DebugPage
from kubetorch.wire import debugger as wire
from kubetorch.wire import tuning as wire_tuning
from tests.local.debugger.fake_pods import FakePod, message
from tests.local.debugger.other_users import another_user, as_root
from tests.local.debugger.sessions import DEADLINE

pytestmark = pytest.mark.security
TOKEN = "X-Kubetorch-Token"


@pytest.fixture(scope="module")
def page():
    pod = FakePod(message(wire.PROMPT, "(Pdb) "))
    page = DebugPage(pod.terminal)
    yield page
    page.close()
    pod.close()


@pytest.fixture
def ask(page):
    """The status and headers with which the page answers a request."""

    def ask(method, path, *, host=page.host, body=None, **headers):
        connection = http.client.HTTPConnection(page.host, timeout=DEADLINE)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, body, {"Host": host, **headers})
            answer = connection.getresponse()
            answer.read()
            return answer.status, answer.headers
        finally:
            connection.close()

    return ask


@pytest.fixture
def token(page):
    return page.url.partition("token=")[2]


def test_the_page_is_kept_nowhere_and_loads_nothing_from_elsewhere(ask, token):
    status, headers = ask("GET", f"/?token={token}")
    assert status == 200
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    policy = headers["Content-Security-Policy"].split("; ")
    assert policy[:2] == ["default-src 'none'", "connect-src 'self'"]
    assert all(part.split()[1].startswith("'nonce-") for part in policy[2:])


@pytest.mark.parametrize("path", ["/", "/?token=", "/?token=x", "/?token=%ff", "/command", "//[x"])
def test_without_its_token_there_is_no_page(ask, path):
    assert ask("GET", path)[0] == 403


def test_commands_are_posted_with_the_token_to_this_host_alone(ask, page, token):
    assert ask("GET", "/command", X_Kubetorch_Token=token)[0] == 403
    assert ask("POST", "/command", body="p 1")[0] == 403
    assert ask("POST", "/command", body="p 1", X_Kubetorch_Token="x")[0] == 403
    origin = {"X_Kubetorch_Token": token, "Origin": "http://evil.example"}
    assert ask("POST", "/command", body="p 1", **origin)[0] == 403
    assert ask("POST", "/command", host="evil.example", body="p", X_Kubetorch_Token=token)[0] == 403
    assert ask("GET", f"/?token={token}", host="evil.example")[0] == 403


def test_a_command_has_a_bounded_length(ask, token):
    body = "x" * (wire_tuning.LIMITS.debug_message_bytes + 1)
    assert ask("POST", "/command", body=body, X_Kubetorch_Token=token)[0] == 413


def test_a_request_that_is_none_writes_nothing_on_the_terminal(page, capfd):
    for request in (
        b"GET http://[x HTTP/1.1\r\n\r\n",
        b"\xff\r\n\r\n",
        b"POST /command HTTP/1.1\r\n",
    ):
        with socket.create_connection(page.host.split(":"), DEADLINE) as dialled:
            dialled.sendall(request)
            dialled.shutdown(socket.SHUT_WR)
            while dialled.recv(4096):
                pass
    assert capfd.readouterr().err == ""


@as_root
def test_a_program_of_another_user_gets_no_answer(page, token):
    with another_user():
        dialled = socket.create_connection(page.host.split(":"), DEADLINE)
    with dialled, contextlib.suppress(ConnectionError):
        dialled.sendall(f"GET /?token={token} HTTP/1.1\r\nHost: {page.host}\r\n\r\n".encode())
        assert dialled.recv(1) == b""
