"""The terminal's end of a connection to a stopped program."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from kubetorch.lib import websocket_protocol
from kubetorch.sdk.debugger.terminal import show_answers
from kubetorch.sdk.tuning import LIMITS, Timing
from kubetorch.wire import debugger as wire
from tests.local.debugger.fake_pods import FakePod, frame, message


def test_a_call_that_prints_much_while_the_user_thinks_leaves_the_connection_alive() -> None:
    fake_pod = FakePod(message(wire.PROMPT, "(Pdb) "))
    pod, terminal = fake_pod.socket, fake_pod.terminal
    assert terminal.collect() == ""
    count = 3 * LIMITS.debug_messages
    pod.sendall(b"".join(message(wire.OUTPUT, f"line {number}\n") for number in range(count)))
    pod.sendall(frame(websocket_protocol.PING, b"alive"))
    assert pod.recv(2)[0] & 0x0F == websocket_protocol.PONG

    pod.sendall(message(wire.PROMPT, "(Pdb) "))
    lines = terminal.collect().splitlines()
    shown = LIMITS.debug_messages // 2
    assert lines[:-1] == [f"line {number}" for number in range(shown)]
    assert lines[-1].startswith(f"… {count - shown} more messages of output")
    fake_pod.close()


def test_output_of_a_command_comes_whole_however_much_it_is() -> None:
    fake_pod = FakePod(message(wire.PROMPT, "(Pdb) "))
    pod, terminal = fake_pod.socket, fake_pod.terminal
    terminal.collect()
    terminal.answer("p everything")
    count = 3 * LIMITS.debug_messages
    output = [message(wire.OUTPUT, f"line {number}\n") for number in range(count)]
    pod.sendall(b"".join([*output, message(wire.PROMPT, "(Pdb) ")]))
    assert terminal.collect().splitlines() == [f"line {number}" for number in range(count)]
    fake_pod.close()


@pytest.fixture
def pods():
    """Makes pods with these messages."""
    fakes = []

    def make(*messages: bytes) -> FakePod:
        fakes.append(FakePod(b"".join(messages)))
        return fakes[-1]

    yield make
    for fake in fakes:
        fake.close()


def test_a_terminal_whose_output_waits_for_a_pager_shows_that_it_lives(pods) -> None:
    fake = pods()
    for number in range(2 * LIMITS.debug_messages):
        fake.send(wire.OUTPUT, f"line {number}\n")
    assert fake.socket.recv(2)[0] & 0x0F == websocket_protocol.PONG


@pytest.mark.security
def test_completions_that_nobody_asked_for_end_no_terminal(pods) -> None:
    fake = pods()
    for content in ("[" * 60_000, "{", '["name"]', '["name"]'):
        fake.send(wire.COMPLETIONS, content)
    fake.send(wire.PROMPT, "(Pdb) ")
    assert fake.terminal.collect() == ""
    assert not fake.terminal.is_over


@pytest.mark.security
def test_a_completion_steers_no_terminal(pods, monkeypatch) -> None:
    timing = Timing(debug_completion_seconds=60.0)
    monkeypatch.setattr("kubetorch.sdk.debugger.terminal.TIMING", timing)
    fake = pods()
    with ThreadPoolExecutor(1) as pool:
        names = pool.submit(fake.terminal.complete, "a", "a", 0, 1)
        fake.socket.recv(1)
        fake.send(wire.COMPLETIONS, json.dumps(["\x1b[2J", "a\nb"]))
        assert names.result() == ["\\x1b[2J", "a\\x0ab"]


@pytest.mark.security
def test_a_prompt_steers_no_terminal(pods, monkeypatch, capsys) -> None:
    fake = pods(message(wire.PROMPT, "\x1b[2J\n(Pdb) "), message(wire.RUNS, ""))
    monkeypatch.setattr("sys.stdin", io.StringIO("c\n"))
    assert fake.terminal.interact()
    assert capsys.readouterr().out == "\\x1b[2J\\x0a(Pdb) "


@pytest.mark.security
def test_no_program_speaks_under_the_label_of_another_one(pods, capsys) -> None:
    forged = "0.1\n\x1b[1A(rank 1) 0.9\r(rank 1) 0.9\n"
    terminals = {
        label: pods(message(wire.OUTPUT, text), message(wire.PROMPT, "(Pdb) ")).terminal
        for label, text in (("rank 0", forged), ("rank 1", "a\tb\n"))
    }
    show_answers(terminals)
    assert capsys.readouterr().out.splitlines() == [
        "(rank 0) 0.1",
        "(rank 0) \\x1b[1A(rank 1) 0.9",
        "(rank 0) (rank 1) 0.9",
        "(rank 1) a       b",
    ]
