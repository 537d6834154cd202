import contextlib
import itertools
import re
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kubetorch.lib import tuning as lib_tuning
from kubetorch.lib import websocket_protocol
from kubetorch.lib.websocket_protocol import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    ClientHandshake,
    UpgradeRefusedError,
    WebSocketError,
)

LIMIT = 400_000


class Recorder:
    """A handler that keeps what it is told; places large messages in memory of its own."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, bytes]] = []
        self.placed = 0

    def on_message(self, opcode: int, payload: memoryview) -> None:
        self.messages.append((opcode, bytes(payload)))

    def on_control(self, opcode: int, payload: bytes) -> None:
        self.messages.append((opcode, payload))

    def on_large(self, head: memoryview, length: int) -> memoryview | None:
        assert len(head) == lib_tuning.LIMITS.large_message_head_bytes
        self.placed += 1
        return None if length % 2 else memoryview(bytearray(length - len(head)))

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        self.messages.append((BINARY, head + bytes(rest)))


def frame(opcode: int, payload: bytes, *, key: bytes | None = None, final: bool = True) -> bytes:
    head = bytearray(websocket_protocol.frame_header(opcode, len(payload), masked=key is not None))
    if not final:
        head[0] &= 0x7F
    if key is not None:
        head[-4:] = key
        payload = bytes(byte ^ key[index % 4] for index, byte in enumerate(payload))
    return bytes(head) + payload


def parse(data: bytes, cuts: list[int], *, masked: bool, limit: int = LIMIT) -> Recorder:
    recorder = Recorder()
    parser = websocket_protocol.Parser(recorder, masked=masked, max_message=limit)
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for begin, end in itertools.pairwise(edges):
        parser.feed(data[begin:end])
    return recorder


sizes = st.sampled_from([0, 1, 125, 126, 127, 4096, 65535, 65536, 65537, 70_001, 140_000, 300_001])
payloads = st.builds(
    lambda size, seed: bytes((seed + index) % 256 for index in range(min(size, 997))).ljust(
        size, bytes([seed])
    ),
    sizes,
    st.integers(0, 255),
)
keys = st.sampled_from([b"\0\0\0\0", b"\1\2\3\4", b"\xff\0\xaa\x55"])


@st.composite
def conversations(draw) -> tuple[list[tuple[int, bytes]], bytes, bool]:
    """Messages, the bytes that carry them, whether they are masked."""
    masked = draw(st.booleans())
    messages: list[tuple[int, bytes]] = []
    data = b""

    def add(opcode: int, payload: bytes, *, final: bool = True) -> None:
        nonlocal data
        data += frame(opcode, payload, key=draw(keys) if masked else None, final=final)

    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["whole", "control", "fragments"]))
        opcode = draw(st.sampled_from([TEXT, BINARY]))
        if kind == "whole":
            payload = draw(payloads)
            add(opcode, payload)
            messages.append((opcode, payload))
        elif kind == "control":
            control = draw(st.sampled_from([PING, PONG, CLOSE])), draw(st.binary(max_size=125))
            add(*control)
            messages.append(control)
        else:
            pieces = draw(st.lists(payloads.filter(lambda p: len(p) < 100_000), max_size=3))
            pieces.append(draw(st.binary(max_size=10)))
            for index, piece in enumerate(pieces):
                add(CONTINUATION if index else opcode, piece, final=index == len(pieces) - 1)
                if index < len(pieces) - 1 and draw(st.booleans()):
                    add(PING, b"between")
                    messages.append((PING, b"between"))
            messages.append((opcode, b"".join(pieces)))
    return messages, data, masked


@given(conversations(), st.lists(st.integers(0, 1_000_000), max_size=12))
def test_any_split_of_the_bytes_gives_the_same_messages(conversation, cuts):
    messages, data, masked = conversation
    assert parse(data, cuts, masked=masked).messages == messages


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=4), st.booleans())
def test_bytes_that_come_one_by_one_give_the_same_messages(texts, masked):
    data = b"".join(frame(TEXT, t, key=b"abcd" if masked else None) for t in texts)
    recorder = parse(data, list(range(len(data))), masked=masked)
    assert recorder.messages == [(TEXT, t) for t in texts]


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5), st.booleans())
@example(b"\x82\xff" + b"\xff" * 8, [], True)
@example(b"\x82\x7f" + b"\x80" + b"\0" * 7, [], False)
@example(b"\x00\x00", [], False)
def test_garbage_is_refused_with_a_websocket_error_and_no_other(data, cuts, masked):
    with contextlib.suppress(WebSocketError):
        parse(data, cuts, masked=masked)


@given(conversations(), st.integers(0, 1_000_000), st.integers(1, 255), st.lists(st.integers(0)))
def test_a_damaged_byte_gives_messages_or_a_websocket_error(conversation, position, change, cuts):
    _, data, masked = conversation
    broken = bytearray(data)
    broken[position % len(broken)] ^= change
    with contextlib.suppress(WebSocketError):
        parse(bytes(broken), cuts, masked=masked)


@given(conversations(), st.integers(1, 1_000_000))
def test_a_truncated_conversation_gives_its_first_messages_and_no_more(conversation, length):
    messages, data, masked = conversation
    parsed_messages = parse(data[: length % len(data)], [], masked=masked).messages
    assert parsed_messages == messages[: len(parsed_messages)]
    assert len(parsed_messages) < len(messages)


def test_large_binary_messages_are_placed_by_the_handler():
    data = frame(BINARY, b"x" * 300_000) + frame(BINARY, b"y" * 300_000) + frame(BINARY, b"z")
    recorder = parse(data, [10_000, 350_000], masked=False)
    assert recorder.placed == 2
    assert [payload[:1] for _, payload in recorder.messages] == [b"x", b"y", b"z"]


def test_after_a_large_message_little_is_read_ahead():
    parser = websocket_protocol.Parser(Recorder(), masked=False, max_message=LIMIT)
    assert len(parser.get_buffer()) > 4096
    parser.feed(frame(BINARY, b"x" * 300_000)[:100_000])
    parser.feed(frame(BINARY, b"x" * 300_000)[100_000:])
    assert len(parser.get_buffer()) < 4096
    parser.feed(frame(BINARY, b"small"))
    assert len(parser.get_buffer()) > 4096


def test_a_connection_that_says_little_has_little_memory_and_one_that_says_much_gets_more():
    parser = websocket_protocol.Parser(Recorder(), masked=False, max_message=LIMIT)
    for _ in range(1000):
        parser.feed(frame(BINARY, b"x" * 100))
    assert len(parser.get_buffer()) <= 8192
    for _ in range(4):
        parser.feed(frame(BINARY, b"x" * 60_000))
        parser.feed(frame(BINARY, b"x" * 60_000) * 8)
    assert lib_tuning.LIMITS.large_message_bytes < len(parser.get_buffer()) <= 256 * 1024


@pytest.mark.parametrize("first", [0x80 | BINARY, 0x80 | TEXT, BINARY])
def test_a_message_beyond_the_limit_is_refused_before_it_has_arrived(first):
    head = struct.pack("!BBQ", first, 127, LIMIT + 1)
    with pytest.raises(WebSocketError, match="400001 bytes; 400000 are allowed") as caught:
        parse(head, [], masked=False)
    assert caught.value.code == websocket_protocol.TOO_BIG


def test_fragments_that_sum_up_beyond_the_limit_are_refused():
    data = frame(TEXT, b"a" * 300_000, final=False) + frame(CONTINUATION, b"a" * 300_000)
    with pytest.raises(WebSocketError, match="600000 bytes") as caught:
        parse(data, [], masked=False)
    assert caught.value.code == websocket_protocol.TOO_BIG


def test_a_control_frame_may_come_inside_a_message_at_the_limit():
    data = (
        frame(TEXT, b"a" * 300_000, final=False)
        + frame(PING, b"p" * 125)
        + frame(CONTINUATION, b"a" * 100_000)
    )
    parsed_messages = parse(data, [], masked=False).messages
    assert [opcode for opcode, _ in parsed_messages] == [PING, TEXT]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (frame(BINARY, b"x"), "without a mask"),
        (b"\xc2\x80\0\0\0\0", "byte 0xc2"),
        (b"\x83\x80\0\0\0\0", "byte 0x83"),
        (frame(PING, b"p" * 126, key=b"\0\0\0\0"), "control frame"),
        (frame(PING, b"p", key=b"\0\0\0\0", final=False), "control frame"),
        (frame(CONTINUATION, b"x", key=b"\0\0\0\0"), "out of order"),
        (
            frame(TEXT, b"x", key=b"\0\0\0\0", final=False) + frame(TEXT, b"x", key=b"\0\0\0\0"),
            "out of order",
        ),
    ],
)
def test_a_frame_that_breaks_the_rules_is_refused(data, message):
    with pytest.raises(WebSocketError, match=message) as caught:
        parse(data, [], masked=True)
    assert caught.value.code == websocket_protocol.PROTOCOL_ERROR


def test_a_masked_frame_from_a_server_is_refused():
    with pytest.raises(WebSocketError, match="a masked frame"):
        parse(frame(BINARY, b"x", key=b"abcd"), [], masked=False)


def test_the_accept_key_is_that_of_the_rfc():
    assert (
        websocket_protocol.accept_key("dGhlIHNhbXBsZSBub25jZQ==") == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    )


def test_a_close_payload_is_read_back_and_its_reason_is_cut():
    assert websocket_protocol.parse_close(websocket_protocol.close_payload(1002, "bad")) == (
        1002,
        "bad",
    )
    assert websocket_protocol.parse_close(b"") == (websocket_protocol.NORMAL, "")
    assert len(websocket_protocol.close_payload(1002, "é" * 500)) <= 125


def answer_to(handshake, status="101 Switching", accept=None):
    key = re.search(rb"Sec-WebSocket-Key: (.*)\r\n", handshake.request)[1].decode()
    accept = accept or websocket_protocol.accept_key(key)
    head = f"HTTP/1.1 {status}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    return f"{head}Sec-WebSocket-Accept: {accept}\r\nSec-WebSocket-Protocol: p\r\n\r\n".encode()


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_handshake_ends_with_the_answer_and_keeps_what_follows(step):
    handshake = ClientHandshake("h:1", "/p", [("X-A", "1")])
    assert handshake.request.startswith(b"GET /p HTTP/1.1\r\nHost: h:1\r\n")
    assert b"\r\nX-A: 1\r\n" in handshake.request
    answer = answer_to(handshake) + b"rest"
    handshake_steps = [handshake.feed(answer[i : i + step]) for i in range(0, len(answer), step)]
    assert handshake_steps[-1]
    assert handshake.rest == b"rest"
    assert handshake.subprotocol == "p"


def test_an_answer_with_another_key_is_no_websocket():
    handshake = ClientHandshake("h:1", "/p", [])
    with pytest.raises(WebSocketError, match="wrong Sec-WebSocket-Accept"):
        handshake.feed(answer_to(handshake, accept="other"))


def test_a_refusal_has_status_and_body():
    handshake = ClientHandshake("h:1", "/p", [])
    assert not handshake.feed(b"HTTP/1.1 403 No\r\nContent-Length: 4\r\n\r\nno")
    assert handshake.is_refused
    with pytest.raises(UpgradeRefusedError) as caught:
        handshake.feed(b"pe")
    assert (caught.value.status, caught.value.body) == (403, b"nope")


@pytest.mark.parametrize("head", [b"HTTP/1.1 101 x\r\nX: ", b"HTTP/1.1 200 x\r\nX: ", b"x"])
def test_an_answer_whose_head_has_no_end_is_refused_while_it_arrives(head):
    handshake = ClientHandshake("h:1", "/p", [])
    handshake.feed(head) if head != b"x" else None
    with pytest.raises(WebSocketError, match="not an HTTP answer"):
        for _ in range(lib_tuning.LIMITS.http_head_bytes // 100 + 1000):
            handshake.feed(b"x" * 100)


@given(st.binary(max_size=200))
@example("HTTP/1.1 \u00b200 x".encode("latin-1"))
def test_an_answer_that_is_no_http_is_a_websocket_error(head):
    handshake = ClientHandshake("h:1", "/p", [])
    try:
        assert not handshake.feed(head or b"x")
    except WebSocketError:
        return
    except UpgradeRefusedError as error:
        assert 100 <= error.status <= 999
