"""Messages of debuggers, and the line that says how to attach."""

from __future__ import annotations

import pytest

from kubetorch.errors import ProtocolError
from kubetorch.wire import debugger, routes
from kubetorch.wire.tuning import LIMITS


def test_messages_come_in_any_pieces() -> None:
    data = debugger.pack(debugger.LINE, "p x") + debugger.pack(debugger.QUIT)
    data += debugger.pack(debugger.COMPLETIONS, ["a", "b"])
    expected = [
        (debugger.LINE, b"p x"),
        (debugger.QUIT, b""),
        (debugger.COMPLETIONS, b'["a", "b"]'),
    ]
    assert list(debugger.Messages().feed(data)) == expected
    messages = debugger.Messages()
    pieces = [message for byte in data for message in messages.feed(bytes([byte]))]
    assert pieces == expected


def test_a_message_that_claims_too_much_is_an_error_before_it_comes() -> None:
    longest = debugger.pack(debugger.OUTPUT, b"x" * LIMITS.debug_message_bytes)
    assert len(list(debugger.Messages().feed(longest))) == 1
    head = debugger.pack(debugger.OUTPUT, b"x" * (LIMITS.debug_message_bytes + 1))[:5]
    with pytest.raises(ProtocolError, match="claims"):
        list(debugger.Messages().feed(head))


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff", b"[" * 100_000])
def test_content_that_is_no_object_is_an_error(content: bytes) -> None:
    with pytest.raises(ProtocolError):
        debugger.decode(content)


def test_the_command_that_attaches_names_the_address_for_pdb_alone() -> None:
    assert (
        debugger.attach_command("price-0", 5678, "research", "pdb", "10.0.0.7")
        == "kt debug price-0 --port 5678 --namespace research --mode pdb --pod-ip 10.0.0.7"
    )
    assert debugger.attach_command("price-0", 6000, "research", "pdb-ui", "10.0.0.7") == (
        "kt debug price-0 --port 6000 --namespace research --mode pdb-ui"
    )


@pytest.mark.security
@pytest.mark.parametrize("is_caller", [True, False])
def test_the_name_of_a_session_is_one_word_of_a_path(is_caller: bool) -> None:
    path = routes.debug_terminal("x/../../shell\r\nHost: evil ?#", is_caller=is_caller)
    assert path.startswith(f"{routes.DEBUGGER}/")
    name = path.rpartition("/")[2]
    assert name == "x%2F..%2F..%2Fshell%0D%0AHost%3A%20evil%20%3F%23"
