import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clock_loop import pause, run
from kubetorch.lib import tuning as lib_tuning
from kubetorch.lib import websocket_protocol
from kubetorch.lib.http_server import Refusal
from kubetorch.pod import streams as module
from kubetorch.pod.http.auth import Credentials, Guard
from kubetorch.pod.payloads import OwnedPayload
from kubetorch.pod.streams import ClientStream
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.specs.workload import Origin
from kubetorch.wire import frames, routes, tokens, versions
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.frames import Ack, Attach, Body, Cancel, Credit, Inbox, Kind, Open, Outbox
from tests.decoding import decode
from tests.unit.pod.fakes import FakeRunner, line, make_calls, spec

MIB = 1024 * 1024


class Connection:
    """A connection whose other end is the test."""

    def __init__(self) -> None:
        self.is_open = True
        self.is_congested = False
        self.close_code: int | None = None
        self.sent: list[bytes] = []

    def send(self, *parts, opcode=websocket_protocol.BINARY) -> None:
        if self.is_open:
            self.sent.append(b"".join(parts))

    def close(self, code=websocket_protocol.NORMAL, reason="") -> None:
        self.is_open, self.close_code = False, code

    def abort(self, reason: str) -> None:
        self.is_open = False


def allocated(size):
    return OwnedPayload(bytearray(size))


class Client:
    """The other end, without a network: what it sends arrives at once."""

    def __init__(self, served=None, *, allocate=allocated) -> None:
        self.calls = make_calls()
        self.runner = FakeRunner()
        self.calls.serve(served or spec(allowed=("json", "pickle")), self.runner)
        self.ended: list[ClientStream] = []
        self.stream = ClientStream(
            "client",
            incarnation="one",
            pod_name="demo-0",
            calls=self.calls,
            allocate=allocate,
            on_over=self.ended.append,
        )
        self.stream.expect(None)
        self.connection = Connection()
        self.stream.on_open(self.connection)

    def send(self, kind: Kind, number: int, meta=None, payload: bytes = b"") -> None:
        self.deliver(frames.encode(kind, number, meta) + payload)

    def deliver(self, frame: bytes) -> None:
        if len(frame) <= lib_tuning.LIMITS.large_message_bytes:
            self.stream.on_message(websocket_protocol.BINARY, memoryview(frame))
            return
        head, rest = frame[:16], frame[16:]
        buffer = self.stream.on_large(memoryview(head), len(frame))
        buffer = memoryview(bytearray(len(rest))) if buffer is None else buffer
        buffer[:] = rest
        self.stream.on_placed(head, buffer)

    def open(self, number: int, payload: bytes = b"{}", **more) -> None:
        more.setdefault("id", f"call-{number:04}")
        body = Body(more.pop("codec", "json"), (len(payload),), len(payload))
        opening = Open(callable=more.pop("name", "f"), body=body, **more)
        if len(payload) <= wire_tuning.LIMITS.chunk_bytes:
            self.send(Kind.OPEN, number, opening, payload)
            return
        self.send(Kind.OPEN, number, opening)
        for begin in range(0, len(payload), wire_tuning.LIMITS.chunk_bytes):
            self.send(
                Kind.DATA, number, None, payload[begin : begin + wire_tuning.LIMITS.chunk_bytes]
            )

    def take(self) -> list[tuple[Kind, int, object, bytes]]:
        """What has come since the last time, but for WELCOME."""
        decoded_frames = []
        for data in self.connection.sent:
            kind, number, meta, payload = decode(data)
            if kind != Kind.WELCOME:
                decoded_frames.append((kind, number, meta, bytes(payload)))
        self.connection.sent.clear()
        return decoded_frames

    def kinds(self) -> list[Kind]:
        return [kind for kind, *_ in self.take()]


def test_the_first_frame_welcomes():
    async def scenario():
        client = Client()
        kind, _, meta, _ = decode(client.connection.sent[0])
        assert kind == Kind.WELCOME
        assert isinstance(meta, frames.Welcome)
        assert (meta.incarnation, meta.pod, meta.generation) == ("one", "demo-0", 1)
        assert not meta.resumed

    run(scenario())


def test_a_call_goes_to_the_worker_and_its_result_comes_back():
    async def scenario():
        client = Client()
        client.open(7, b"[1]", method="m", request_id="r")
        assert client.runner.payloads[1] == b"[1]"
        client.runner.give(1, b"42")
        ((kind, number, meta, payload),) = client.take()
        assert (kind, number, payload) == (Kind.RESULT, 7, b"42")
        assert meta == frames.Result(Body("json", (2,), 2), 1)

    run(scenario())


@pytest.mark.parametrize(
    "size", [wire_tuning.LIMITS.chunk_bytes, wire_tuning.LIMITS.chunk_bytes + 1, 3 * MIB + 5]
)
def test_arguments_of_any_size_arrive_whole(size):
    async def scenario():
        client = Client()
        payload = bytes(range(256)) * (size // 256 + 1)
        client.open(1, payload[:size])
        assert client.runner.payloads[1] == payload[:size]

    run(scenario())


def test_credit_for_arguments_is_given_as_they_come():
    async def scenario():
        client = Client()
        client.open(1, bytes(9 * MIB))
        given = [meta.bytes for kind, _, meta, _ in client.take() if kind == Kind.CREDIT]
        assert sum(given) >= MIB
        assert all(size == 2 * MIB for size in given)

    run(scenario())


def test_a_large_result_waits_for_credit_and_comes_whole():
    async def scenario():
        client = Client()
        client.open(1)
        value = bytes(range(256)) * (40 * 1024)  # 10 MiB
        client.runner.give(1, value)
        decoded_frames = client.take()
        assert (decoded_frames[0][0], decoded_frames[0][3]) == (Kind.RESULT, b"")
        got = b"".join(payload for kind, _, _, payload in decoded_frames if kind == Kind.DATA)
        assert len(got) == wire_tuning.LIMITS.window_bytes
        client.send(Kind.CREDIT, 1, Credit(4 * MIB))
        got += b"".join(payload for _, _, _, payload in client.take())
        assert got == value

    run(scenario())


def test_chunks_of_several_results_take_turns():
    async def scenario():
        client = Client()
        client.connection.is_congested = True
        for number in (1, 2):
            client.open(number)
            client.runner.give(number, bytes(MIB))
        assert client.take() == []
        client.connection.is_congested = False
        client.stream.on_writable()
        numbers = [number for kind, number, *_ in client.take() if kind == Kind.DATA]
        assert numbers == [1, 2] * 4

    run(scenario())


def test_what_comes_after_something_that_waits_waits_behind_it():
    async def scenario():
        client = Client()
        client.open(1)
        client.connection.is_congested = True
        sink = client.runner.sink(1)
        sink.on_log(line("one"))
        client.runner.give_one(1, b"1")
        client.connection.is_congested = False
        sink.on_log(line("two"))
        assert client.take() == []
        client.stream.on_writable()
        assert client.kinds() == [Kind.LOG, Kind.YIELD, Kind.LOG]
        client.runner.give(1, b"null", streamed=True)
        assert client.kinds() == [Kind.RESULT]

    run(scenario())


def test_of_reports_of_progress_that_wait_the_last_stays():
    async def scenario():
        client = Client()
        client.open(1)
        client.connection.is_congested = True
        for current in range(5):
            client.runner.sink(1).on_progress(frames.Progress(current, 5))
        client.connection.is_congested = False
        client.stream.on_writable()
        ((_, _, meta, _),) = client.take()
        assert meta == frames.Progress(4, 5)

    run(scenario())


def test_a_generator_is_granted_values_as_they_are_sent():
    async def scenario():
        client = Client()
        client.open(1)
        for _ in range(LIMITS.granted_values * 2):
            client.runner.give_one(1, b"1")
        assert client.runner.granted == [(1, LIMITS.granted_values)] * 2
        client.connection.is_congested = True
        for _ in range(LIMITS.granted_values):
            client.runner.give_one(1, b"1")
        assert len(client.runner.granted) == 2
        client.connection.is_congested = False
        client.stream.on_writable()
        assert len(client.runner.granted) == 3

    run(scenario())


def test_lines_are_filtered_by_the_callers_level():
    async def scenario():
        client = Client()
        client.open(1, log_level="warning")
        sink = client.runner.sink(1)
        for level in ("DEBUG", "INFO", "WARNING", "ERROR", "CUSTOM"):
            sink.on_log(line(level, level))
        sink.on_log(line("print"))
        assert [meta.text for _, _, meta, _ in client.take()] == [
            "WARNING",
            "ERROR",
            "CUSTOM",
            "print",
        ]

    run(scenario())


def test_cancel_reaches_the_worker_and_news_of_ended_calls_are_ignored():
    async def scenario():
        client = Client()
        client.open(1)
        client.send(Kind.CANCEL, 1, Cancel("enough"))
        assert client.runner.cancelled == [(1, "enough", False)]
        client.runner.give(1, b"1")
        client.send(Kind.CANCEL, 1, Cancel())
        client.send(Kind.CREDIT, 1, Credit(5))
        client.send(Kind.DATA, 1, None, b"late")
        assert client.connection.is_open

    run(scenario())


def test_a_waiting_call_is_reported_and_given_back_to_a_client_that_wants_it_unless_it_has_begun():
    async def scenario():
        served = spec()
        client = Client(replace(served, compute=replace(served.compute, concurrency=1)))
        for number in (1, 2, 3):
            client.open(number, queue_news=True)
        client.open(4)  # this client does not want to know
        assert [(kind, number) for kind, number, *_ in client.take()] == [
            (Kind.QUEUED, 2),
            (Kind.QUEUED, 3),
        ]
        for number in (1, 2):
            client.send(Kind.CANCEL, number, Cancel(unless_begun=True))
        ((kind, number, _, payload),) = client.take()
        assert (kind, number, json.loads(payload)["started"]) == (Kind.ERROR, 2, False)
        client.runner.give(1, b"1")
        assert [(kind, number) for kind, number, *_ in client.take()] == [
            (Kind.BEGUN, 3),
            (Kind.RESULT, 1),
        ]
        assert client.runner.cancelled == []

    run(scenario())


def test_data_of_a_refused_call_is_dropped():
    async def scenario():
        client = Client()
        client.open(1, bytes(MIB), name="other")
        ((kind, _, _, payload), *_rest) = client.take()
        assert kind == Kind.ERROR
        assert json.loads(payload)["error_type"] == "CallableNotFoundError"
        assert not client.runner.calls
        assert client.connection.is_open

    run(scenario())


def test_an_attached_caller_gets_the_outcome_of_a_running_or_an_ended_call():
    async def scenario():
        client = Client()
        client.open(1, detached=True)
        client.send(Kind.ATTACH, 2, Attach("call-0001"))
        client.runner.give(1, b"42")
        client.send(Kind.ATTACH, 3, Attach("call-0001"))
        client.send(Kind.ATTACH, 4, Attach("unknown"))
        decoded_frames = client.take()
        assert [(kind, number) for kind, number, *_ in decoded_frames] == [
            (Kind.ACCEPTED, 1),
            (Kind.RESULT, 1),
            (Kind.RESULT, 2),
            (Kind.RESULT, 3),
            (Kind.ERROR, 4),
        ]
        assert json.loads(decoded_frames[-1][3])["error_type"] == "ResultExpiredError"

    run(scenario())


def test_frames_are_acknowledged_after_64():
    async def scenario():
        client = Client()
        for number in range(1, 65):
            client.open(number)
        assert [m for k, _, m, _ in client.take() if k == Kind.ACK] == [Ack(64)]

    run(scenario())


def test_a_client_that_acknowledges_nothing_is_sent_no_more_than_the_limit():
    async def scenario():
        client = Client()
        size = 4 * MIB
        for number in range(1, 33):
            client.open(number)
            client.runner.give(number, bytes(size))
        sent = sum(len(payload) for *_, payload in client.take())
        assert LIMITS.unacknowledged_bytes <= sent < LIMITS.unacknowledged_bytes + 2 * MIB
        client.send(Kind.ACK, 0, Ack(100))
        assert client.take()

    run(scenario())


def test_a_first_connection_stands_for_the_calls_that_were_opened_on_it():
    async def scenario():
        client = Client()
        client.open(1, detached=True)
        client.send(Kind.ATTACH, 2, Attach("call-0001"))
        (call,) = client.calls.detached()
        assert client.stream.counted_calls() == client.stream.open_calls() == {call}

        client.connection.is_open = False
        client.stream.on_close("broken")
        assert client.stream.counted_calls() == set()
        client.stream.expect(0)
        client.stream.on_open(Connection())
        # A connection that resumes may have come another way.
        assert client.stream.counted_calls() == set()
        assert client.stream.open_calls() == {call}

    run(scenario())


def test_whoever_attaches_stands_for_no_call():
    async def scenario():
        client = Client()
        client.open(1, detached=True)
        (call,) = client.calls.detached()
        second_stream = ClientStream(
            "other",
            incarnation="one",
            pod_name="demo-0",
            calls=client.calls,
            allocate=allocated,
            on_over=lambda _: None,
        )
        second_stream.expect(None)
        second_stream.on_open(Connection())
        attach = frames.encode(Kind.ATTACH, 1, Attach("call-0001"))
        second_stream.on_message(websocket_protocol.BINARY, memoryview(attach))
        assert second_stream.counted_calls() == set()
        assert second_stream.open_calls() == {call}

    run(scenario())


def test_arguments_for_which_there_is_no_memory_fail_their_call_alone():
    def no_memory(size):
        raise MemoryError("on purpose")

    async def scenario():
        client = Client(allocate=no_memory)
        client.open(1, bytes(3 * MIB))
        client.open(2)
        client.runner.give(1, b"42")
        (kind, number, _, failure), (kind_of_other, *_) = (
            f for f in client.take() if f[0] != Kind.ACK
        )
        assert (kind, number, kind_of_other) == (Kind.ERROR, 1, Kind.RESULT)
        error = json.loads(failure)
        assert f"no memory for arguments of {3 * MIB} bytes" in error["message"]
        assert error["started"] is False
        assert client.connection.is_open

    run(scenario())


def test_a_spawned_call_with_the_key_of_another_is_confirmed_too():
    async def scenario():
        client = Client()
        client.open(1, detached=True, idempotency_key="k")
        client.open(2, id="call-0002", detached=True, idempotency_key="k")
        assert [(kind, number) for kind, number, *_ in client.take()] == [
            (Kind.ACCEPTED, 1),
            (Kind.ACCEPTED, 2),
        ]
        client.runner.give(1, b"42")
        assert client.kinds() == [Kind.RESULT] * 2

    run(scenario())


def test_whose_code_runs_is_said_before_a_call_of_other_code_is_refused():
    async def scenario():
        origin = Origin("1111", "shop", "train.py:f")
        client = Client(replace(spec("other"), origin=origin))
        client.open(1, origin="another")
        (log, _, log_meta, _), (error, *_) = client.take()
        assert (log, error) == (Kind.LOG, Kind.ERROR)
        assert f"now runs {origin}" in log_meta.text
        # Whoever spawns takes a line for the begin of the call.
        client.open(2, id="call-0002", origin="another", detached=True)
        assert client.kinds() == [Kind.ERROR]

    run(scenario())


# ------------------------------------------------------------------------------------- upgrades


class Door:
    """The streams of an agent, and the headers of a client that is let in."""

    def __init__(self) -> None:
        key = b"k" * 32
        guard = Guard(Credentials(key), audience="ns/f", host="127.0.0.1", clock=lambda: 0.0)
        self.streams = module.Streams(
            incarnation="one",
            pod_name="demo-0",
            calls=make_calls(),
            guard=guard,
            allocate=allocated,
        )
        self.headers = {
            "host": "localhost",
            "authorization": f"Bearer {tokens.sign(key, tokens.Claims('ns/f', 60.0))}",
            routes.PROTOCOL.lower(): str(versions.PROTOCOL),
            routes.CLIENT.lower(): "client",
        }

    def accept(self, path=routes.STREAM, **more):
        return self.streams.accept(path, {**self.headers, **more})

    def refused(self, path=routes.STREAM, **more):
        with pytest.raises(Refusal) as caught:
            self.accept(path, **more)
        return caught.value.status, json.loads(caught.value.body)


def test_a_client_has_one_stream_until_it_is_gone():
    async def scenario():
        door = Door()
        first = door.accept()
        assert door.accept(**{routes.RESUME.lower(): "one:0"}) is first
        assert door.accept(**{routes.RESUME.lower(): "before:0"}) is not first
        assert door.accept(**{routes.CLIENT.lower(): "another"}) is not first

    run(scenario())


@pytest.mark.parametrize(
    ("more", "status", "expected_message"),
    [
        ({"origin": "https://evil.example"}, 403, "evil.example"),
        ({"host": "evil.example"}, 403, "evil.example"),
        ({"authorization": ""}, 401, "this needs a token"),
        ({"path": "/v1/other"}, 404, "there is no stream at '/v1/other'"),
        ({routes.PROTOCOL.lower(): "x"}, 409, "version"),
        ({routes.CLIENT.lower(): ""}, 400, "must name the client"),
        ({routes.CLIENT.lower(): "a b"}, 400, "must name the client"),
        ({routes.RESUME.lower(): "one"}, 400, "it must be <name>:<number>"),
    ],
)
def test_what_may_not_have_a_stream_is_refused(more, status, expected_message):
    async def scenario():
        status_sent, failure = Door().refused(**more)
        assert status_sent == status
        assert expected_message in failure["message"]

    run(scenario())


def test_a_pod_that_is_being_stopped_takes_no_new_clients_and_keeps_those_that_it_has():
    async def scenario():
        door = Door()
        accepted_stream = door.accept()
        door.streams.stop_accepting("SIGTERM")
        assert door.accept(**{routes.RESUME.lower(): "one:0"}) is accepted_stream
        _, failure = door.refused(**{routes.CLIENT.lower(): "another"})
        assert "pod demo-0 is being stopped: SIGTERM" in failure["message"]

    run(scenario())


def test_a_pod_has_no_more_clients_than_the_limit():
    async def scenario():
        door = Door()
        for number in range(LIMITS.clients):
            door.accept(**{routes.CLIENT.lower(): f"client-{number}"})
        _, failure = door.refused(**{routes.CLIENT.lower(): "another"})
        assert f"has {LIMITS.clients} clients" in failure["message"]
        await pause(TIMING.client_linger_seconds + 1)
        assert door.accept(**{routes.CLIENT.lower(): "another"})

    run(scenario())


# --------------------------------------------------------------------------- broken connections


def test_a_client_that_breaks_off_has_30_s_to_come_back():
    async def scenario():
        client = Client()
        client.open(1)
        client.connection.is_open = False
        client.stream.on_close("broken")
        await pause(29)
        assert not client.ended
        assert not client.runner.cancelled
        await pause(2)
        assert client.ended == [client.stream]
        assert [number for number, *_ in client.runner.cancelled] == [1]

    run(scenario())


@pytest.mark.parametrize(
    "code", [websocket_protocol.NORMAL, websocket_protocol.GOING_AWAY, websocket_protocol.TOO_BIG]
)
def test_a_client_that_says_goodbye_or_nonsense_is_gone_at_once(code):
    async def scenario():
        client = Client()
        client.open(1)
        client.open(2, detached=True)
        client.connection.close(code)
        client.stream.on_close("bye")
        assert client.ended == [client.stream]
        assert [number for number, *_ in client.runner.cancelled] == [1]

    run(scenario())


def test_a_handshake_that_is_never_finished_leaves_nothing():
    async def scenario():
        client = Client()
        client.stream.expect(0)
        client.stream.on_close("the client has opened another connection")
        await pause(TIMING.client_linger_seconds + 1)
        assert client.ended == [client.stream]

    run(scenario())


def too_much_meta(kind: Kind, meta) -> bytes:
    frame = frames.encode(kind, 9, meta)
    assert len(frame) <= module.MESSAGE_LIMIT
    return frame


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        frames.pack_header(99, 1),
        frames.pack_header(Kind.RESULT, 1),
        frames.pack_header(Kind.WELCOME, 1),
        frames.pack_header(Kind.OPEN, 1, 100) + b"x",
        frames.pack_header(Kind.OPEN, 1, 1) + b"\xc1",
        frames.encode(Kind.ACK, 0, Ack(5)),
        frames.encode(Kind.OPEN, 1, Open("x", "f", Body("json", (5,), 5))) + b"xy",
        frames.encode(Kind.OPEN, 1, Open("x", "f", Body("json", (-5,), -5))) + b"xy",
        frames.pack_header(Kind.CANCEL, 9, 100_000) + bytes(90_000),
        too_much_meta(Kind.CANCEL, Cancel("x" * wire_tuning.LIMITS.meta_bytes)),
    ],
    ids=range(12),
)
@pytest.mark.parametrize("in_fragments", [False, True])
def test_a_frame_that_makes_no_sense_ends_the_stream(data, in_fragments):
    async def scenario():
        client = Client()
        client.open(9)
        if in_fragments:  # put together from fragments, a message of any length comes whole
            client.stream.on_message(websocket_protocol.BINARY, memoryview(data))
        else:
            client.deliver(data)
        assert client.connection.close_code == websocket_protocol.PROTOCOL_ERROR
        assert client.ended == [client.stream]
        assert [number for number, *_ in client.runner.cancelled] == [1]

    run(scenario())


def test_meta_of_a_large_data_frame_is_no_payload():
    async def scenario():
        client = Client()
        body = Body("json", (3 * MIB,), 3 * MIB)
        client.send(Kind.OPEN, 1, Open("call-0001", "f", body))
        client.deliver(frames.pack_header(Kind.DATA, 1, 5) + bytes(100_000))
        assert client.connection.close_code == websocket_protocol.PROTOCOL_ERROR

    run(scenario())


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_a_frame_or_end_the_stream(data, large):
    async def scenario():
        client = Client()
        if large and len(data) > 16:
            head = data[:16]
            buffer = client.stream.on_large(memoryview(head), len(data))
            rest = memoryview(bytearray(data[16:])) if buffer is None else buffer
            client.stream.on_placed(head, rest)
        else:
            client.stream.on_message(websocket_protocol.BINARY, memoryview(data))
        assert client.connection.is_open or client.ended
        client.stream.end()

    run(scenario())


actions = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.sampled_from([2, 300_000])),
        st.tuples(st.just("log"), st.integers(0, 5)),
        st.tuples(st.just("yield"), st.integers(0, 5)),
        st.tuples(st.just("give"), st.sampled_from([1, 300_000, 9 * MIB])),
        st.tuples(st.just("cut"), st.integers(0, 5)),
        st.tuples(st.just("congest"), st.booleans()),
        st.tuples(st.just("ack"), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(actions)
def test_every_frame_arrives_once_and_in_order_however_often_the_connection_breaks(sequence):
    """A client that counts, acknowledges and resumes as it should, over lossy connections."""

    async def scenario():
        client = Client()
        inbox = Inbox()
        outbox = Outbox()
        received: dict[int, list[bytes]] = {}
        expected: dict[int, list[bytes]] = {}
        values: dict[int, bytes] = {}
        ended: set[int] = set()
        opened = 0

        def absorb(lost: int = 0) -> None:
            sent = client.connection.sent
            delivered = sent[: max(len(sent) - lost, 0)]
            sent.clear()
            for data in delivered:
                kind, number, meta, payload = decode(data)
                if kind in frames.UNCOUNTED:
                    continue
                inbox.count(len(data))
                if kind in (Kind.LOG, Kind.YIELD):
                    text = meta.text.encode() if kind == Kind.LOG else bytes(payload)
                    received.setdefault(number, []).append(text)
                elif kind in (Kind.RESULT, Kind.DATA):
                    values[number] = values.get(number, b"") + bytes(payload)
                    grant = frames.encode(Kind.CREDIT, number, Credit(len(payload)))
                    deliver(grant)

        def deliver(frame: bytes) -> None:
            outbox.keep((frame,))
            client.stream.on_message(websocket_protocol.BINARY, memoryview(frame))

        def reconnect() -> None:
            client.connection.is_open = False
            client.stream.on_close("cut")
            client.stream.expect(inbox.received)
            client.connection = Connection()
            client.stream.on_open(client.connection)
            kind, _, welcome, _ = decode(client.connection.sent[0])
            assert kind == Kind.WELCOME
            assert welcome.resumed
            assert welcome.received == outbox.sent

        for action, value in sequence:
            live = [n for n in range(1, opened + 1) if n not in ended]
            if action == "open":
                opened += 1
                payload = bytes(value)
                body = Body("json", (len(payload),), len(payload))
                opening = Open(id=f"call-{opened:04}", callable="f", body=body)
                small = len(payload) <= wire_tuning.LIMITS.chunk_bytes
                deliver(frames.encode(Kind.OPEN, opened, opening) + (payload if small else b""))
                if not small:
                    for begin in range(0, len(payload), wire_tuning.LIMITS.chunk_bytes):
                        piece = payload[begin : begin + wire_tuning.LIMITS.chunk_bytes]
                        deliver(frames.encode(Kind.DATA, opened) + piece)
            elif action == "congest":
                client.connection.is_congested = value
                if not value:
                    client.stream.on_writable()
            elif action == "cut":
                absorb(lost=value)
                reconnect()
            elif action == "ack":
                absorb()
                frame = frames.encode(Kind.ACK, 0, Ack(inbox.acknowledged()))
                client.stream.on_message(websocket_protocol.BINARY, memoryview(frame))
            elif live:
                number = live[value % len(live)]
                if action == "log":
                    text = f"line {len(expected.get(number, []))}"
                    client.runner.sink(number).on_log(line(text))
                    expected.setdefault(number, []).append(text.encode())
                elif action == "yield":
                    data = b"%d" % len(expected.get(number, []))
                    client.runner.give_one(number, data)
                    expected.setdefault(number, []).append(data)
                else:
                    client.runner.give(number, bytes([number % 256]) * value)
                    expected.setdefault(-number, []).append(b"%d" % value)
                    ended.add(number)
        client.connection.is_congested = False
        client.stream.on_writable()
        for _ in range(20):
            absorb()
        assert received == {n: texts for n, texts in expected.items() if n > 0}
        for number in ended:
            size = int(expected[-number][0])
            assert values[number] == bytes([number % 256]) * size
        assert client.calls.running == opened - len(ended)
        client.stream.end()

    run(scenario())
