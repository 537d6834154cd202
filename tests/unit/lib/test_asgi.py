import asyncio
import gzip
import zlib

import pytest

from clock_loop import pause, run
from kubetorch.errors import ForeignOriginError, ProtocolError
from kubetorch.lib.asgi import ClientGoneError, Request, Responder, check_link, request_id
from kubetorch.wire import exceptions


def request(pieces, **headers) -> Request:
    messages = [
        {"type": "http.request", "body": piece, "more_body": index < len(pieces) - 1}
        for index, piece in enumerate(pieces)
    ]
    messages.append({"type": "http.disconnect"})
    taken = []

    async def receive():
        taken.append(messages[len(taken)])
        return taken[-1]

    scope = {
        "method": "POST",
        "path": "/",
        "query_string": b"",
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()],
    }
    new_request = Request(scope, receive)
    new_request.taken = taken
    return new_request


def body(pieces, limit=100, **headers) -> bytes:
    return run(request(pieces, **headers).body(limit))


def test_a_body_in_pieces_is_put_together():
    assert body([b"one", b"", b"two"]) == b"onetwo"
    assert body([b"x" * 100]) == b"x" * 100
    assert body([b""]) == b""


def test_a_body_that_is_announced_too_long_is_not_read():
    async def scenario():
        sent_request = request([b"x"], content_length="101")
        with pytest.raises(ProtocolError, match="101 bytes; 100 are allowed") as caught:
            await sent_request.body(100)
        assert exceptions.http_status(caught.value) == 413
        assert sent_request.taken == []

    run(scenario())


@pytest.mark.parametrize("length", ["-1", "1e3", "²", "x"])
def test_a_length_that_is_no_number_is_refused(length):
    with pytest.raises(ProtocolError):
        body([b"x"], content_length=length)


def test_a_body_is_read_no_further_than_its_limit():
    async def scenario():
        sent_request = request([b"x" * 60] * 50)
        with pytest.raises(ProtocolError) as caught:
            await sent_request.body(100)
        assert exceptions.http_status(caught.value) == 413
        assert len(sent_request.taken) == 2

    run(scenario())


def test_a_compressed_body_is_decompressed_in_any_pieces():
    data = gzip.compress(b"y" * 90)
    assert body([data], content_encoding="gzip") == b"y" * 90
    pieces = [data[i : i + 1] for i in range(len(data))]
    assert body(pieces, content_encoding="GZIP ") == b"y" * 90


@pytest.mark.parametrize("size", [0, 65535, 65536, 65537, 131072, 1024 * 1024])
def test_a_compressed_body_is_whole_whatever_the_pieces_that_it_is_made_in(size):
    data = gzip.compress(bytes(size))
    assert body([data], limit=10**8, content_encoding="gzip") == bytes(size)


@pytest.mark.security
def test_others_have_their_turn_while_bodies_are_decompressed():
    text = "".join(f"{number} " for number in range(400_000)).encode()
    data = gzip.compress(text, 1)

    async def scenario():
        bodies = [
            asyncio.ensure_future(request([data], content_encoding="gzip").body(10**8))
            for _ in "12"
        ]
        turns = 0
        while not all(body_task.done() for body_task in bodies):
            turns += 1
            await asyncio.sleep(0)
        assert [body_task.result() for body_task in bodies] == [text, text]
        assert turns > len(text) // 65536

    run(scenario())


@pytest.mark.security
def test_a_body_that_is_compressed_too_well_is_refused_long_before_its_limit():
    data = gzip.compress(bytes(60_000_000))
    with pytest.raises(ProtocolError, match="100 times as many are allowed") as caught:
        body([data], limit=64 * 1024 * 1024, content_encoding="gzip")
    assert exceptions.http_status(caught.value) == 413


@pytest.mark.parametrize("pieces", [1, 5])
def test_a_bomb_is_decompressed_no_further_than_its_limit(pieces):
    data = gzip.compress(bytes(10_000_000))
    step = len(data) // pieces + 1
    with pytest.raises(ProtocolError) as caught:
        body([data[i : i + step] for i in range(0, len(data), step)], content_encoding="gzip")
    assert exceptions.http_status(caught.value) == 413


@pytest.mark.parametrize(
    ("data", "encoding", "status"),
    [
        (b"not gzip", "gzip", 400),
        (gzip.compress(b"cut", mtime=0)[:-3], "gzip", 400),
        (zlib.compress(b"x"), "gzip", 400),
        (b"x", "br", 415),
        (b"x", "gzip, gzip", 415),
    ],
)
def test_a_body_that_cannot_be_decompressed_is_refused(data, encoding, status):
    with pytest.raises(ProtocolError) as caught:
        body([data], content_encoding=encoding)
    assert exceptions.http_status(caught.value) == status


def test_a_client_that_goes_before_its_body_is_complete():
    async def scenario():
        sent_request = request([b"x", b"y"])
        sent_request.taken.append({})
        sent_request.taken.append({})
        with pytest.raises(ClientGoneError):
            await sent_request.body(100)

    run(scenario())


def answer(act) -> list:
    sent = []

    async def send(message):
        sent.append(message)

    run(act(Responder(send, {"X-Request-ID": "r"})))
    return sent


def test_an_answer_has_its_length_and_the_headers_of_every_answer():
    start, rest = answer(lambda respond: respond.answer_json(200, {"a": "ü"}))
    assert start["status"] == 200
    assert (b"content-length", b"11") in start["headers"]
    assert (b"X-Request-ID", b"r") in start["headers"]
    assert (rest["body"], rest["more_body"]) == ('{"a": "ü"}'.encode(), False)


@pytest.mark.parametrize(
    ("status", "header"),
    [(401, (b"www-authenticate", b'Bearer realm="kubetorch"')), (413, (b"connection", b"close"))],
)
def test_failures_say_what_the_client_is_to_do(status, header):
    failure = exceptions.Failure("Some", "text", status=status)
    start, rest = answer(lambda respond: respond.refuse(status, failure.to_json()))
    assert start["status"] == status
    assert header in start["headers"]
    assert exceptions.parse_json(rest["body"]) == failure


@pytest.mark.parametrize(("sent_id", "is_kept"), [("abc", True), ("", False), ("x" * 300, False)])
def test_a_request_id_is_kept_or_made(sent_id, is_kept):
    used_id = request_id(sent_id)
    assert (used_id == sent_id) is is_kept
    assert is_kept or (len(used_id) == 10 and int(used_id, 16) >= 0)


@pytest.mark.parametrize("may_be_beside", [True, False])
@pytest.mark.parametrize(
    ("method", "site", "more", "expected"),
    [
        ("GET", None, {}, "passes"),
        ("POST", "same-origin", {}, "passes"),
        ("POST", "none", {}, "passes"),
        ("GET", "cross-site", {"mode": "navigate"}, "passes"),
        ("GET", "cross-site", {"mode": "navigate", "dest": "iframe"}, "passes"),
        ("GET", "cross-site", {"mode": "no-cors"}, "is refused"),
        ("POST", "cross-site", {"mode": "navigate"}, "is refused"),
        ("GET", "same-site", {"mode": "navigate", "dest": "document"}, "passes"),
        ("GET", "same-site", {"mode": "navigate", "dest": "iframe"}, "may"),
        ("GET", "same-site", {"mode": "no-cors"}, "may"),
        ("POST", "same-site", {"mode": "navigate"}, "may"),
    ],
)
def test_only_links_of_other_sites_pass(method, site, more, expected, may_be_beside):
    headers = {} if site is None else {"sec-fetch-site": site}
    headers |= {f"sec-fetch-{name}": value for name, value in more.items()}
    if expected == "is refused" or (expected == "may" and not may_be_beside):
        with pytest.raises(ForeignOriginError):
            check_link(headers, method, may_be_beside=may_be_beside)
    else:
        check_link(headers, method, may_be_beside=may_be_beside)


def test_a_stream_ends_with_its_client():
    async def scenario():
        sent, closed = [], []

        async def send(message):
            sent.append(message)

        async def chunks():
            try:
                yield b"one"
                await asyncio.Event().wait()
            finally:
                closed.append(True)

        await asyncio.wait_for(Responder(send, {}).stream(chunks(), "text/plain", pause(5)), 60)
        assert closed == [True]
        assert [message.get("more_body") for message in sent] == [None, True]

    run(scenario())


def test_an_error_in_a_stream_reaches_whoever_answers():
    async def scenario():
        async def send(message):
            pass

        async def chunks():
            yield b"one"
            raise ValueError("on purpose")

        with pytest.raises(ValueError, match="on purpose"):
            await Responder(send, {}).stream(chunks(), "text/plain", pause(5))

    run(scenario())
