"""VS Code, and other clients of the debug adapter protocol, debug calls in pods."""

from __future__ import annotations

import io
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

import kubetorch as kt
from kubetorch.errors import CallCancelledError, ProtocolError, SpecError
from kubetorch.sdk.debugger import adapter
from tests.local.debugger.adapters import AdapterClient
from tests.local.debugger.sessions import DEADLINE, attempts


@pytest.fixture
def client(project):
    """Starts `kt debug --vscode` in the folder of the project, with a client."""
    clients = []

    def start(*words, **environ):
        clients.append(
            AdapterClient(*words, folder=str(project.folder), environ={**os.environ, **environ})
        )
        return clients[-1]

    yield start
    for started in clients:
        started.close()


@pytest.fixture
def source(project):
    """The path of the project's file, and the number of a line in it."""
    file = project.folder / f"jobs{project.suffix}.py"

    def line_of(text):
        return 1 + file.read_text().splitlines().index(text)

    return str(file), line_of


def test_a_client_debugs_a_function_in_a_synced_file(deployed, stopped, client, source):
    file, line_of = source
    deployed("price")
    program = stopped("f(4)", service="price")
    debugged = client("price")
    (point,) = debugged.attach({file: [line_of("    return total")]})
    assert point["verified"]
    thread, frames = debugged.stop()
    assert frames[0]["name"] == "price"
    assert frames[0]["source"]["path"] == file
    assert frames[0]["line"] == line_of("    total += 1")
    assert debugged.variables(frames[0]["id"]) == {"each": "2", "total": "8", "units": "4"}
    debugged.request("evaluate", expression="total = 20", frameId=frames[0]["id"], context="repl")
    debugged.request("continue", threadId=thread)
    thread, frames = debugged.stop()
    assert frames[0]["line"] == line_of("    return total")
    assert debugged.variables(frames[0]["id"])["total"] == "21"
    debugged.request("continue", threadId=thread)
    debugged.terminated()
    debugged.end()
    assert debugged.program.returncode == 0
    assert "result: 21" in program.communicate(timeout=DEADLINE)[0]


def test_a_client_debugs_a_rank_while_the_others_go_on(deployed, client, source):
    file, line_of = source
    compute = kt.Compute(cpus="0.1").distribute("spmd", workers=1, num_proc=2)
    handle = deployed("plain", service="two-ranks", compute=compute)
    config = kt.DebugConfig(mode="dap")
    with ThreadPoolExecutor(1) as pool:
        results = pool.submit(handle, 4, debug=config, stream_logs=False)
        debugged = wait_for_stop(client, "two-ranks", "--rank", "1")
        debugged.attach({file: [line_of("    return z")]})
        thread, frames = debugged.stop()
        assert frames[0]["line"] == line_of("    z = x + y")
        assert debugged.variables(frames[0]["id"]) == {"x": "4", "y": "1"}
        answer = debugged.request(
            "evaluate", expression="__import__('os').environ['RANK']", frameId=frames[0]["id"]
        )
        assert answer["result"] == "'1'"
        debugged.request("next", threadId=thread)
        thread, frames = debugged.stop()
        assert debugged.variables(frames[0]["id"])["z"] == "5"
        debugged.request("evaluate", expression="z = 50", frameId=frames[0]["id"], context="repl")
        debugged.request("disconnect", terminateDebuggee=True)  # the worker lives
        assert results.result(DEADLINE) == [5, 50]


def wait_for_stop(client, *words):
    """A client, as soon as something has stopped."""
    for _ in attempts():
        debugged = client(*words)
        if debugged.port:
            return debugged
    raise AssertionError(debugged.lines)


def test_a_worker_is_debugged_again_and_an_error_where_it_was_raised(deployed, stopped, client):
    deployed("divide")
    for number in range(2):
        program = stopped(f"f.options(post_mortem=True)({number}, 0)", service="divide")
        debugged = client("divide")
        debugged.attach({})
        thread, frames = debugged.stop()
        assert debugged.variables(frames[0]["id"]) == {"x": str(number), "y": "0"}
        debugged.request("continue", threadId=thread)
        debugged.terminated()
        assert "ZeroDivisionError" in program.communicate(timeout=DEADLINE)[0]


def test_a_running_call_stops_for_a_client(deployed, client):
    handle = deployed("spin")
    running = handle.options(request_id="request-dap").spawn(600)
    debugged = client("spin", "--call", "request-dap")
    debugged.attach({})
    _, frames = debugged.stop()
    assert debugged.variables(frames[0]["id"])["seconds"] == "600"
    running.cancel()
    debugged.terminated()
    with pytest.raises(CallCancelledError):
        running.get(DEADLINE)


def test_a_call_goes_on_when_its_client_is_killed_and_the_next_one_is_debugged(
    deployed, stopped, client
):
    deployed("price")
    for _ in range(3):  # in the same thread of the worker
        program = stopped("f(4)", service="price")
        debugged = client("price")
        debugged.attach({})
        debugged.stop()
        debugged.program.kill()
        rest = program.communicate(timeout=DEADLINE)[0]
        assert "the terminal of the debugger is gone: the call goes on" in rest
        assert "result: 9" in rest


def test_a_pod_without_debugpy_and_network_says_so_and_the_call_goes_on(deployed, stopped, client):
    variables = {"UV_OFFLINE": "1", "PIP_NO_INDEX": "1", "UV_NO_CACHE": "1"}
    deployed("without_debugpy", compute=kt.Compute(cpus="0.1", env_vars=variables))
    program = stopped("f()", service="without-debugpy")
    debugged = client("without-debugpy")
    assert "the pod does not have debugpy, nor can it be installed" in debugged.end()
    assert debugged.program.returncode == 1
    rest = program.communicate(timeout=DEADLINE)[0]
    assert "nor can it be installed" in rest
    assert "result: went on" in rest


def test_a_client_that_breaks_the_protocol_ends_the_session(deployed, stopped, client):
    deployed("price")
    program = stopped("f(4)", service="price")
    debugged = client("price")
    with socket.create_connection(("127.0.0.1", debugged.port), DEADLINE) as connection:
        adapter.write(connection.makefile("wb"), {"command": "attach", "arguments": ["x"]})
        ended = debugged.end()
    assert "the arguments of a request are no object: ['x']" in ended
    assert "kubetorch: \n" not in ended
    assert debugged.program.returncode == 1
    assert "result: 9" in program.communicate(timeout=DEADLINE)[0]


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b"null", b"[" * 100_000])
def test_what_is_no_message_is_an_error_of_the_protocol(content):
    stream = io.BytesIO(b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
    with pytest.raises(ProtocolError):
        adapter.read(stream)


def test_launch_json_is_written_on_request_and_kept(project):
    folder = project.folder
    configuration = adapter.launch_configuration("price", 5678)
    for _ in range(2):
        file = adapter.write_launch_json(folder, configuration)
    entries = json.loads(file.read_text())["configurations"]
    assert entries == [configuration]
    file.write_text("{ // mine\n}")
    with pytest.raises(SpecError, match="cannot be changed"):
        adapter.write_launch_json(folder, configuration)
    assert "mine" in file.read_text()
    file.unlink()
    file.parent.rmdir()
    file.parent.touch()
    with pytest.raises(SpecError, match="cannot be changed"):
        adapter.write_launch_json(folder, configuration)


def test_launch_json_keeps_its_texts_and_its_link(tmp_path):
    shared_file = tmp_path / "shared.json"
    entry = {"name": "größer"}
    shared_file.write_text(json.dumps({"configurations": [entry]}), encoding="utf-8")
    (tmp_path / ".vscode").mkdir()
    (tmp_path / ".vscode" / "launch.json").symlink_to(shared_file)
    configuration = adapter.launch_configuration("price", 5678)
    adapter.write_launch_json(tmp_path, configuration)
    text = shared_file.read_text(encoding="utf-8")
    assert "größer" in text
    assert json.loads(text)["configurations"] == [entry, configuration]
