"""Finding, starting and stopping the local service, as every client does it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

import leaks
from kubetorch.errors import ConfigError, ControllerUnavailableError
from kubetorch.lib.http_client import HttpClient
from kubetorch.local import lifetime
from kubetorch.wire import routes
from tests.local.service_harness import reserve_port


def answers(endpoint: lifetime.Endpoint) -> bool:
    with (
        HttpClient(endpoint.url, endpoint.token) as client,
        client.request("GET", routes.STATUS) as response,
    ):
        return response.status == 200


def service_pid() -> int:
    running = lifetime.status().running
    assert running is not None
    return running.pid


@contextmanager
def unfinished_request(endpoint: lifetime.Endpoint) -> Iterator[None]:
    """A request whose body does not come."""
    with socket.create_connection(("127.0.0.1", int(endpoint.url.rpartition(":")[2]))) as client:
        head = f"POST {routes.BLOBS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n"
        client.sendall(f"{head}Authorization: Bearer {endpoint.token}\r\n\r\n".encode())
        yield


def test_there_is_no_service_before_one_is_needed(service_home: Path) -> None:
    assert lifetime.find() is None
    assert lifetime.status().running is None
    assert lifetime.stop() is False
    assert not service_home.exists(), "looking for one leaves no trace"


def test_ensure_starts_one_and_finds_it_again(service_home: Path) -> None:
    first = lifetime.ensure()
    assert first.started
    assert answers(first)
    second = lifetime.ensure()
    assert (second.url, second.token, second.started) == (first.url, first.token, False)
    assert lifetime.find() == second


def test_the_service_is_detached_from_whoever_started_it(service_home: Path) -> None:
    lifetime.ensure()
    process = psutil.Process(service_pid())
    assert process not in psutil.Process().children(recursive=True)
    assert os.getsid(process.pid) != os.getsid(0)
    assert process.cwd() == str(service_home)
    assert process.uids().real == os.getuid()


def test_nothing_listens_beyond_loopback(service_home: Path) -> None:
    lifetime.ensure()
    sockets = psutil.Process(service_pid()).net_connections(kind="inet")
    assert {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


def test_everything_in_the_home_is_the_users_alone(service_home: Path) -> None:
    lifetime.ensure()
    modes = {}
    for path in [service_home, *service_home.rglob("*")]:
        with suppress(FileNotFoundError):  # it was there for a moment
            modes[path] = path.stat().st_mode & 0o077
    assert not any(modes.values()), modes


def test_many_clients_at_once_start_one_service(service_home: Path) -> None:
    code = "from kubetorch.local import lifetime; print(lifetime.ensure().url)"
    clients = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    urls = {client.communicate(timeout=60)[0] for client in clients}
    assert len(urls) == 1
    named = [p for p in leaks.processes_of(service_home) if "kubetorch.local" in p.cmdline()]
    assert [process.pid for process in named] == [service_pid()]


def test_stop_ends_it_and_the_next_ensure_starts_another(service_home: Path) -> None:
    first = lifetime.ensure()
    service = psutil.Process(service_pid())
    assert lifetime.stop() is True
    service.wait(60)
    assert lifetime.find() is None
    second = lifetime.ensure()
    assert second.started
    assert second.token == first.token
    assert answers(second)


def test_a_program_that_starts_while_the_service_stops_gets_the_next_one(
    service_home: Path,
) -> None:
    for _ in range(3):
        endpoint = lifetime.ensure()
        assert endpoint.started
        pid = service_pid()
        with unfinished_request(endpoint):
            assert answers(endpoint)
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + 60
            # It waits for the request before it ends.
            while lifetime.find() is not None:
                assert time.monotonic() < deadline
            second = lifetime.ensure()
        assert second.started
        assert answers(second)
        assert service_pid() != pid
        assert lifetime.stop()


@pytest.mark.faults
def test_fault_a_killed_service_is_not_found_and_started_again(service_home: Path) -> None:
    reserve_port(service_home)
    first = lifetime.ensure()
    service = psutil.Process(service_pid())
    service.kill()
    service.wait(60)
    assert lifetime.find() is None
    second = lifetime.ensure()
    assert second.started
    assert second.url == first.url
    assert answers(second)


@pytest.mark.faults
def test_fault_the_port_of_a_killed_service_may_belong_to_somebody_else(service_home: Path) -> None:
    reserve_port(service_home)
    first = lifetime.ensure()
    service = psutil.Process(service_pid())
    service.kill()
    service.wait(60)
    port = int(first.url.rpartition(":")[2])
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        second = lifetime.ensure()
        assert second.url != first.url
        assert answers(second)


def test_a_service_that_cannot_start_says_why(service_home: Path) -> None:
    service_home.mkdir(mode=0o700)
    (service_home / "state.sqlite").write_bytes(b"this is no database" * 100)
    with pytest.raises(Exception, match=r"state\.sqlite cannot be used") as caught:
        lifetime.ensure()
    assert type(caught.value).__name__ == "ControllerError"
    (service_home / "state.sqlite").unlink()
    assert answers(lifetime.ensure())


def test_a_service_that_dies_while_it_starts_is_reported_with_its_log(
    service_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An interpreter that is broken for the service, and only for it.
    (service_home.parent / "kubetorch").mkdir()
    (service_home.parent / "kubetorch" / "__init__.py").write_text("raise SystemError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(service_home.parent))
    with pytest.raises(ControllerUnavailableError, match="SystemError: broken"):
        lifetime.ensure()


def test_an_impossible_setting_is_an_error_before_anything_starts(
    service_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_LOCAL_IDLE", "soon")
    with pytest.raises(ConfigError, match="KT_LOCAL_IDLE"):
        lifetime.ensure()


def test_a_home_that_others_can_use_is_refused(service_home: Path) -> None:
    service_home.mkdir()
    service_home.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        lifetime.ensure()
    service_home.chmod(0o700)


def test_a_token_that_others_can_read_is_refused(service_home: Path) -> None:
    lifetime.ensure()
    (service_home / "token").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        lifetime.ensure()
    (service_home / "token").chmod(0o600)


def test_a_start_that_another_program_does_not_finish_is_given_up(service_home: Path) -> None:
    service_home.mkdir(mode=0o700)
    lock = os.open(service_home / "start.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with pytest.raises(ControllerUnavailableError, match="another program starts"):
            lifetime.stop(timeout=0.2)
    finally:
        os.close(lock)
    deadline = time.monotonic() + 60
    while any(thread.name == "kubetorch-lock" for thread in threading.enumerate()):
        assert time.monotonic() < deadline


def test_ensure_waits_for_the_start_of_another_program(service_home: Path) -> None:
    service_home.mkdir(mode=0o700)
    lock = os.open(service_home / "start.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    endpoints: list[lifetime.Endpoint] = []
    waiting = threading.Thread(target=lambda: endpoints.append(lifetime.ensure()))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    os.close(lock)
    waiting.join(60)
    assert answers(endpoints[0])


def test_a_program_of_another_user_cannot_read_the_token(service_home: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    endpoint = lifetime.ensure()
    service_home.parent.chmod(0o755)
    code = (
        "import encodings.idna, os, sys, urllib.request, urllib.error\n"
        "os.setgid(12345); os.setuid(12345)\n"
        f"for name in ('token', 'secret', 'service.json'):\n"
        f"    try: open('{service_home}/' + name); sys.exit('could read ' + name)\n"
        "    except PermissionError: pass\n"
        f"try: urllib.request.urlopen('{endpoint.url}/v1/workloads'); sys.exit('could ask')\n"
        "except urllib.error.HTTPError as error: assert error.code == 401, error\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert completed.returncode == 0, completed.stderr
