import asyncio
import base64
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clock_loop import run
from kubetorch.errors import ProtocolError, SerializationError
from kubetorch.lib import asgi
from kubetorch.pod.http import calling
from kubetorch.pod.payloads import OwnedPayload
from kubetorch.pod.tuning import LIMITS
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import codecs, routes
from tests.unit.pod.fakes import FakeCaller, FakeRunner, begin, make_calls, opening, spec


@pytest.mark.parametrize(
    ("body", "args", "kwargs"),
    [
        (b"", [], {}),
        (b"  \n", [], {}),
        (b"{}", [], {}),
        (b'{"args": [1, "\\u00fc"]}', [1, "ü"], {}),
        (b'{"kwargs": {"a": [null]}, "debugger": {"mode": "pdb"}}', [], {"a": [None]}),
        (b' {"args" : [ 1.5e3 ] , "kwargs" : { } } ', [1500.0], {}),
    ],
)
def test_arguments_are_passed_on_as_they_stand(body, args, kwargs):
    parsed_body = json.loads(calling.parse_arguments(body, "json").encoded)
    assert parsed_body == {"args": args, "kwargs": kwargs}


@given(st.lists(st.recursive(st.none() | st.integers() | st.text(), st.lists)), st.text())
def test_any_json_arguments_survive(args, key):
    body = json.dumps({"args": args, "kwargs": {key: args}}).encode()
    parsed_body = json.loads(calling.parse_arguments(body, "json").encoded)
    assert parsed_body == {"args": args, "kwargs": {key: args}}


@given(st.binary(max_size=100), st.sampled_from(codecs.CODECS))
def test_any_body_becomes_arguments_or_a_protocol_error(body, codec):
    try:
        arguments = calling.parse_arguments(body, codec)
    except ProtocolError:
        return
    if codec != "pickle":
        assert set(json.loads(arguments.encoded)) == {"args", "kwargs"}


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"1",
        b"null",
        b'"x"',
        b"{",
        b'{"args": {}}',
        b'{"kwargs": []}',
        b'{"args": 1}',
        b"\xff",
    ],
)
def test_bodies_of_another_form_are_refused(body):
    with pytest.raises(ProtocolError, match="args"):
        calling.parse_arguments(body, "json")


@pytest.mark.parametrize(
    ("body", "escape"),
    [
        (rb'{"args": ["\ud800"]}', r"\ud800 at byte 11,"),
        (rb'{"kwargs": {"\\\uDC00": 1}}', r"\uDC00 at byte 15,"),
        (rb'{"args": ["\ud83d\ude00\ud83d"]}', r"\ud83d at byte 23,"),
        (rb'{"args": ["\\ud800"], "other": 1}', 'the key "other"'),
    ],
)
def test_half_of_a_character_is_named(body: bytes, escape: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        calling.parse_arguments(body, "json")
    assert escape in caught.value.message


@pytest.mark.parametrize(
    ("body", "workers", "restart_procs"),
    [
        ({"args": [1]}, None, False),
        ({"workers": "any"}, "any", False),
        ({"workers": [0, "1", "10.0.0.7"], "restart_procs": True}, (0, "1", "10.0.0.7"), True),
        ({"workers": None, "restart_procs": None}, None, False),
    ],
)
def test_workers_and_restart_procs_are_keys_of_the_body(body, workers, restart_procs):
    arguments = calling.parse_arguments(json.dumps(body).encode(), "json")
    assert arguments[1:] == (workers, restart_procs)
    pickled = json.dumps({**body, "data": "cGlja2xlZA=="}).encode()
    assert calling.parse_arguments(pickled, "pickle")[1:] == (workers, restart_procs)


@pytest.mark.parametrize(
    ("body", "key", "hint"),
    [
        ({"arg": [1]}, '"arg"', "args"),
        ({"args": [1], "kwarg": {}}, '"kwarg"', "kwargs"),
        ({"x": 1}, '"x"', "kwargs"),
        ({"args": {}, "worker": 1}, '"worker"', "workers"),
        ({"timeout": 5}, '"timeout"', "kwargs"),
        ({"data": "cGlja2xlZA=="}, '"data"', "pickle"),
    ],
)
def test_a_key_that_means_nothing_is_an_error_that_names_it(body, key, hint):
    with pytest.raises(ProtocolError, match=key) as caught:
        calling.parse_arguments(json.dumps(body).encode(), "json")
    assert hint in caught.value.hint


def test_what_lies_under_a_key_that_means_nothing_is_not_read():
    for body in (b'{"x":%b}' % (b"[" * 10**6), b'{"%b":1}' % (b"args" * 10**6)):
        with pytest.raises(ProtocolError, match="means nothing") as caught:
            calling.parse_arguments(body, "json")
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("key", ["debugger", "distributed_env_vars"])
def test_keys_of_earlier_clients_are_known(key):
    body = {"args": [1], key: {"mode": "pdb", "port": 5678}}
    assert calling.parse_arguments(json.dumps(body).encode(), "json").encoded


@pytest.mark.parametrize("workers", [2.5, 0, True, {}, [None], [[0]]])
def test_workers_of_another_form_are_refused(workers):
    with pytest.raises(ProtocolError, match="workers"):
        calling.parse_arguments(json.dumps({"workers": workers}).encode(), "json")


def test_pickled_arguments_are_taken_from_the_object_or_the_bare_string():
    data = base64.b64encode(b"pickled").decode()
    for body in ({"data": data}, data):
        arguments = calling.parse_arguments(json.dumps(body).encode(), "pickle")
        assert arguments == (b"pickled", None, False)
    with pytest.raises(ProtocolError, match="base64"):
        calling.parse_arguments(b'{"data": "!"}', "pickle")
    with pytest.raises(ProtocolError, match="data"):
        calling.parse_arguments(b"{}", "pickle")


def test_out_of_band_buffers_become_one_pickle_that_gives_the_same_value():
    value = {"a": np.arange(1000), "b": [np.ones(3), "text"]}
    segments = [memoryview(bytes(segment)) for segment in codecs.encode("pickle", value)]
    assert len(segments) == 3
    unpickled = pickle.loads(codecs.in_band(segments))
    assert np.array_equal(unpickled["a"], value["a"])
    assert unpickled["b"][1] == "text"
    unpickled["a"][0] = 5
    plain = [memoryview(segment) for segment in codecs.encode("pickle", "text")]
    assert codecs.in_band(plain) == pickle.dumps("text", protocol=5)


# ------------------------------------------------------------------------------------------- calls


class Post:
    """A request for a call, and what was answered."""

    def __init__(self, calls, body=b"", **headers) -> None:
        self.sent = []
        self.disconnected = asyncio.Event()
        self._pieces = [{"type": "http.request", "body": body, "more_body": False}]
        scope = {
            "method": "POST",
            "path": "/f",
            "query_string": b"",
            "headers": [
                (name.replace("_", "-").encode(), value.encode())
                for name, value in {"x_request_id": "r", **headers}.items()
            ],
        }
        call = calling.call(
            asgi.Request(scope, self._receive), asgi.Responder(self._send, {}), calls, "f", None
        )
        self.answered = asyncio.ensure_future(call)

    async def _receive(self):
        if self._pieces:
            return self._pieces.pop()
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message) -> None:
        self.sent.append(message)

    async def answer(self):
        """Status, headers and body."""
        await self.answered
        head = {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}
        body = b"".join(message.get("body", b"") for message in self.sent)
        return self.sent[0]["status"], head, body


async def turns(count=5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def serving(results=None):
    calls, runner = make_calls(results), FakeRunner()
    calls.serve(spec(allowed=("json", "values")), runner)
    return calls, runner


def test_a_value_is_the_answer():
    async def scenario():
        calls, runner = serving()
        post = Post(calls, b'{"args": [1]}', x_kubetorch_timeout="5")
        await turns()
        assert runner.payloads == {1: b'{"args":[1],"kwargs":{}}'}
        runner.give(1, b"[42]")
        status, head, body = await post.answer()
        assert (status, head["content-type"], body) == (200, "application/json", b"[42]")
        assert calls.running == 0

    run(scenario())


def test_values_of_a_generator_are_lines_and_more_are_asked_for_as_they_go_out():
    async def scenario():
        calls, runner = serving()
        post = Post(calls)
        await turns()
        for number in range(LIMITS.granted_values + 1):
            runner.give_one(1, b"%d" % number)
        await turns(100)
        assert runner.granted == [(1, LIMITS.granted_values)]
        runner.give(1, b"null", streamed=True)
        status, head, body = await post.answer()
        assert (status, head["content-type"]) == (200, "application/x-ndjson")
        lines = [json.loads(line) for line in body.splitlines()]
        assert lines == [
            *({"yield": n} for n in range(LIMITS.granted_values + 1)),
            {"return": None},
        ]

    run(scenario())


def test_a_failure_has_its_status_or_is_the_last_line():
    async def scenario():
        calls, runner = serving()
        failure = b'{"error_type": "ValueError", "message": "no", "status": 500}'
        for has_begun in (False, True):
            post = Post(calls)
            await turns()
            number = len(runner.calls)
            if has_begun:
                runner.give_one(number, b"1")
                await turns()
            runner.sink(number).on_error(failure)
            status, _, body = await post.answer()
            assert status == (200 if has_begun else 500)
            assert body == (b'{"yield":1}\n' + failure + b"\n" if has_begun else failure)

    run(scenario())


def test_a_call_ends_with_its_client():
    async def scenario():
        calls, runner = serving()
        post = Post(calls)
        await turns()
        post.disconnected.set()
        await post.answered
        assert [number for number, *_ in runner.cancelled] == [1]
        assert post.sent == []

    run(scenario())


def test_a_new_instance_is_told_in_a_header():
    async def scenario():
        calls, runner = make_calls(), FakeRunner()
        served = WorkloadSpec("ns", "f", CallableRef("cls", "f", "m", "f"))
        calls.serve(served, runner, "it was \u00fc")
        post = Post(calls)
        await turns()
        runner.give(1, b"1")
        _, head, _ = await post.answer()
        assert "is a new instance" in head["x-kubetorch-instance-replaced"]
        assert head["x-kubetorch-instance-replaced"].endswith("it was \\xfc")

    run(scenario())


def test_a_codec_of_streams_is_none_of_requests():
    async def scenario():
        calls, runner = serving()
        with pytest.raises(SerializationError, match="'values' is for streams"):
            await Post(calls, x_serialization="values").answered
        assert runner.calls == {}

    run(scenario())


@pytest.mark.parametrize(("value", "is_json"), [(b'{"a": 1}', True), (b"NaN", False)])
def test_of_a_call_of_a_program_with_the_same_key_the_value_is_answered_if_it_is_json(
    value, is_json
):
    async def scenario():
        calls, runner = serving()
        first = opening(codec="values", idempotency_key="k")
        begin(calls, first, FakeCaller())
        runner.sink(1).on_result("values", (len(value),), OwnedPayload(value), streamed=False)
        post = Post(calls, idempotency_key="k")
        if is_json:
            assert (await post.answer())[2] == value
        else:
            with pytest.raises(SerializationError, match="a program made the first call"):
                await post.answered
        assert len(runner.calls) == 1

    run(scenario())


@pytest.mark.parametrize("text", ["x", "-1", "nan", "inf", "1e99"])
def test_a_timeout_that_is_none_is_refused(text):
    async def scenario():
        calls, runner = serving()
        with pytest.raises(ProtocolError, match="it must be a number of seconds from 0"):
            await Post(calls, **{routes.TIMEOUT.lower().replace("-", "_"): text}).answered
        assert runner.calls == {}

    run(scenario())
