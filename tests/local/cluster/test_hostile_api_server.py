"""A default kubeconfig that leads to what is no API server: a doubt that is said, and no fault."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import create_server, socket

import pytest

from kubetorch.sdk.transport import cluster_session
from kubetorch.sdk.transport.session import Choice, ClusterSettings

pytestmark = pytest.mark.security

PATIENCE = 1.5


def _answer(body: bytes, *, status: str = "200 OK", head: bytes = b"") -> bytes:
    start = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n".encode()
    return start + head + b"\r\n" + body


def _pods(*items: object) -> bytes:
    return _answer(json.dumps({"items": items}).encode())


def _pod(**status: object) -> bytes:
    return _pods({"metadata": {"name": "x"}, "status": status})


ANSWERS = {
    "nothing": b"",
    "garbage": b"\xff" * 1000,
    "a page": _answer(b"<html>"),
    "a list": _answer(b"[]"),
    "no list": _answer(b'{"items": 1}'),
    "nested": _answer(b"[" * 100_000),
    "no objects": _pods(1),
    "objects of nothing": _pods({}),
    "no name": _pods({"metadata": {}}),
    "a number for a name": _pods({"metadata": {"name": 5}}),
    "words for a status": _pods({"metadata": {"name": "x"}, "status": "well"}),
    "conditions that are none": _pod(conditions=[3]),
    "conditions in words": _pod(conditions="Ready"),
    "containers that are none": _pod(containerStatuses=[3]),
    "labels that are none": _pods(
        {
            "metadata": {"name": "x", "labels": 3},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        }
    ),
    "elsewhere": _answer(b"", status="302 Found", head=b"Location: http://127.0.0.1:1/\r\n"),
    "a refusal of nothing": _answer(b'{"message": {}, "details": []}', status="403 Forbidden"),
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
}


@contextmanager
def _server(answer: bytes, *, repeated: bytes = b"") -> Iterator[str]:
    """A server that answers whatever it is asked, and then goes on with `repeated`."""

    def serve(connection: socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65536)
            connection.sendall(answer)
            while repeated:
                connection.sendall(repeated)
                time.sleep(0.05)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(2)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kt").mkdir()
    return tmp_path


def _detect(home: Path, server: str) -> Choice:
    entry = {"name": "d", "context": {"cluster": "c", "user": "u"}}
    config = {
        "current-context": "d",
        "contexts": [entry],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "x"}}],
    }
    (home / ".kube/config").write_text(json.dumps(config))
    return cluster_session.detect(ClusterSettings(None, "kubetorch", None), patience=PATIENCE)


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_what_is_no_answer_of_kubernetes_is_a_doubt(home: Path, answer: bytes) -> None:
    with _server(answer) as server:
        choice = _detect(home, server)
    assert choice.cluster is None
    assert choice.is_doubtful


@pytest.mark.parametrize(
    ("begin", "repeated"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    ],
    ids=["head", "body"],
)
def test_an_answer_without_end_is_waited_for_no_longer(
    home: Path, begin: bytes, repeated: bytes
) -> None:
    with _server(begin, repeated=repeated) as server:
        start = time.monotonic()
        assert _detect(home, server).is_doubtful
        assert time.monotonic() - start < PATIENCE + 58


def test_a_list_of_contexts_that_cannot_be_read_names_none(home: Path) -> None:
    (home / ".kt/contexts").write_bytes(b"\xff\xfe\x00" * 1000 + b"\nd2\n")
    with _server(b"") as server:
        assert _detect(home, server).is_doubtful
    cluster_session.note_deploy("d")
    with _server(b"") as server:
        assert _detect(home, server).cluster is not None
