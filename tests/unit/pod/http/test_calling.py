import base64
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubetorch.errors import ProtocolError
from kubetorch.pod.http import calling
from kubetorch.wire import codecs


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
    found = json.loads(calling.parse_arguments(body, "json").encoded)
    assert found == {"args": args, "kwargs": kwargs}


@given(st.lists(st.recursive(st.none() | st.integers() | st.text(), st.lists)), st.text())
def test_any_json_arguments_survive(args, key):
    body = json.dumps({"args": args, "kwargs": {key: args}}).encode()
    found = json.loads(calling.parse_arguments(body, "json").encoded)
    assert found == {"args": args, "kwargs": {key: args}}


@given(st.binary(max_size=100), st.sampled_from(codecs.CODECS))
def test_any_body_becomes_arguments_or_a_protocol_error(body, codec):
    try:
        found = calling.parse_arguments(body, codec)
    except ProtocolError:
        return
    if codec != "pickle":
        assert set(json.loads(found.encoded)) == {"args", "kwargs"}


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
    ("body", "workers", "restart_procs"),
    [
        ({"args": [1]}, None, False),
        ({"workers": "any"}, "any", False),
        ({"workers": [0, "1", "10.0.0.7"], "restart_procs": True}, (0, "1", "10.0.0.7"), True),
        ({"workers": None, "restart_procs": None}, None, False),
    ],
)
def test_workers_and_restart_procs_are_keys_of_the_body(body, workers, restart_procs):
    found = calling.parse_arguments(json.dumps(body).encode(), "json")
    assert found[1:] == (workers, restart_procs)
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
def test_trust_06_a_key_that_means_nothing_is_an_error_that_names_it(body, key, hint):
    with pytest.raises(ProtocolError, match=key) as caught:
        calling.parse_arguments(json.dumps(body).encode(), "json")
    assert hint in caught.value.hint


def test_trust_06_what_lies_under_a_key_that_means_nothing_is_not_read():
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
        found = calling.parse_arguments(json.dumps(body).encode(), "pickle")
        assert found == (b"pickled", None, False)
    with pytest.raises(ProtocolError, match="base64"):
        calling.parse_arguments(b'{"data": "!"}', "pickle")
    with pytest.raises(ProtocolError, match="data"):
        calling.parse_arguments(b"{}", "pickle")


def test_out_of_band_buffers_become_one_pickle_that_gives_the_same_value():
    value = {"a": np.arange(1000), "b": [np.ones(3), "text"]}
    segments = [memoryview(bytes(segment)) for segment in codecs.encode("pickle", value)]
    assert len(segments) == 3
    again = pickle.loads(calling.in_band(segments))
    assert np.array_equal(again["a"], value["a"])
    assert again["b"][1] == "text"
    again["a"][0] = 5
    plain = [memoryview(segment) for segment in codecs.encode("pickle", "text")]
    assert calling.in_band(plain) == pickle.dumps("text", protocol=5)
