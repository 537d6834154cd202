"""Heads that are written, answers that are read, and their limits."""

from __future__ import annotations

import httptools
import pytest

from kubetorch.lib import tuning as lib_tuning
from kubetorch.lib.http1 import (
    AnswerReader,
    BrokenError,
    IncompleteError,
    MessageMeter,
    TooLongError,
    UnansweredError,
    answer_head,
    chunk,
    encoded,
    request_head,
    whole_answer,
)


def read(*pieces: bytes, may_upgrade: bool = False) -> AnswerReader:
    answer = AnswerReader(may_upgrade=may_upgrade)
    for piece in pieces:
        answer.feed(piece)
    return answer


# ---------------------------------------------------------------------------------------- writing


def test_a_head_is_written_line_by_line() -> None:
    head = request_head("GET", "/a?b=c", encoded([("Host", "here"), ("X", "\xe9")]))
    assert head == b"GET /a?b=c HTTP/1.1\r\nHost: here\r\nX: \xe9\r\n\r\n"
    assert answer_head(204, []) == b"HTTP/1.1 204 No Content\r\n\r\n"
    assert answer_head(499, []) == b"HTTP/1.1 499 Other\r\n\r\n"


@pytest.mark.parametrize("target", ["/a b", "/a\r\nX: y", "/a\tb", "/\x7f", "/é", b"/\xff"])
def test_a_target_that_would_be_read_as_something_else_is_refused(target: str | bytes) -> None:
    with pytest.raises(ValueError, match="is no target of a request"):
        request_head("GET", target, [])


@pytest.mark.parametrize("bad", [b"a\r\nX: y", b"a\nb", b"a\rb", b"a\0b"])
def test_a_header_with_a_line_break_is_refused(bad: bytes) -> None:
    for header in ((b"x", bad), (bad, b"x")):
        with pytest.raises(ValueError, match="line break"):
            request_head("GET", "/", [header])
        with pytest.raises(ValueError, match="line break"):
            answer_head(200, [header])


def test_an_empty_chunk_is_left_out_since_it_would_end_the_body() -> None:
    assert chunk(b"x" * 17) == b"11\r\n" + b"x" * 17 + b"\r\n"
    assert chunk(b"") == b""


# ---------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_is_read_however_its_bytes_are_cut(size: int) -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    whole = b"HTTP/1.1 201 Made\r\nX: 1\r\nx: 2\r\nContent-Length: 3\r\n\r\nabc"
    sent = early + whole
    answer = read(*(sent[start : start + size] for start in range(0, len(sent), size)))
    assert (answer.status, answer.reason) == (201, b"Made")
    assert answer.fields == [(b"x", b"1"), (b"x", b"2"), (b"content-length", b"3")]
    assert answer.headers == {"x": "2", "content-length": "3"}
    assert answer.is_complete
    assert answer.allows_reuse
    assert answer.take() == b"abc"
    assert answer.take() == b""


def test_trailers_are_no_headers() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = read(head, chunk(b"ab"), chunk(b"c"), b"0\r\nX: late\r\n\r\n")
    assert answer.take() == b"abc"
    assert answer.is_complete
    assert "x" not in answer.headers


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nmore",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
    ],
)
def test_no_request_follows_an_answer_that_closes_is_cut_or_is_followed(sent: bytes) -> None:
    assert not read(sent).allows_reuse


def test_without_a_length_the_end_of_the_connection_ends_the_body() -> None:
    answer = read(b"HTTP/1.1 200 OK\r\n\r\nabc")
    assert answer.ends_with_connection
    assert not answer.is_complete
    answer.feed(b"")
    assert answer.is_complete
    assert not answer.allows_reuse
    assert not read(b"HTTP/1.1 204 No Content\r\n\r\n").ends_with_connection


def test_a_connection_that_ends_too_early_is_an_error_of_its_kind() -> None:
    with pytest.raises(UnansweredError):
        read(b"")
    for sent in (b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc"):
        with pytest.raises(IncompleteError):
            read(sent, b"")


@pytest.mark.parametrize(
    "sent",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    ],
)
def test_what_is_no_answer_is_refused(sent: bytes) -> None:
    with pytest.raises(BrokenError, match="not an HTTP answer"):
        read(sent)


def test_a_change_of_protocol_hands_over_the_rest_if_it_was_asked_for() -> None:
    sent = b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n\x81\x00"
    answer = read(sent, b"more", may_upgrade=True)
    assert answer.is_upgraded
    assert answer.rest == b"\x81\x00more"
    with pytest.raises(BrokenError, match="unasked"):
        read(sent)


def test_a_whole_answer_can_be_read_back() -> None:
    answer = read(whole_answer(503, b"no", "text/plain"))
    assert (answer.status, answer.take(), answer.allows_reuse) == (503, b"no", False)


# ---------------------------------------------------------------------------------------- limits

_SLACK = 2 * 16 * 1024  # what a parser is given at once, and the piece in which a message begins


class Owner:
    """Reports to a meter what its parser says."""

    def __init__(self) -> None:
        self.meter = MessageMeter()
        self.parser = httptools.HttpRequestParser(self)

    def on_headers_complete(self) -> None:
        self.meter.end_head()

    def on_body(self, body: bytes) -> None:
        self.meter.add_body(len(body))

    def feed(self, data: bytes) -> None:
        self.meter.feed(self.parser, data)


def test_an_endless_head_ends_early() -> None:
    owner = Owner()
    owner.feed(b"GET / HTTP/1.1\r\nX: " + b"x" * (lib_tuning.LIMITS.http_head_bytes - 100))
    with pytest.raises(TooLongError) as raised:
        owner.feed(b"x" * _SLACK)
    assert raised.value.status == 431


def test_endless_trailers_end_early_and_a_long_body_does_not() -> None:
    owner = Owner()
    owner.feed(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(50_000):
        owner.feed(b"1\r\nx\r\n")
    owner.feed(b"0\r\nX: ")
    with pytest.raises(TooLongError) as raised:
        owner.feed(
            b"x"
            * (
                (1 + lib_tuning.LIMITS.chunk_framing_bytes) * 50_000
                + lib_tuning.LIMITS.http_trailers_bytes
                + _SLACK
            )
        )
    assert raised.value.status == 400


def test_a_message_is_measured_anew_after_the_one_before() -> None:
    meter = MessageMeter()

    class Parser:
        def feed_data(self, data: bytes) -> None:
            assert len(data) <= 16 * 1024

    parser = Parser()
    for _ in range(3):
        meter.begin()
        meter.feed(parser, b"x" * lib_tuning.LIMITS.http_head_bytes)  # type: ignore[arg-type]  # it parses nothing
    with pytest.raises(TooLongError):
        meter.feed(parser, b"x" * _SLACK)  # type: ignore[arg-type]  # it parses nothing
