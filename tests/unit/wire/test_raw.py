"""What results of the codec `none` come to at the caller's end."""

import pickle

import pytest

from kubetorch.wire import calls, codecs


def decoded(content: bytes, content_type: str) -> object:
    return codecs.decode("none", [content, content_type.encode()])


def test_text_arrives_as_text_that_knows_its_bytes_and_type():
    value = decoded("héllo".encode(), "text/plain; charset=utf-8")

    assert value == "héllo"
    assert (value.text, value.content) == ("héllo", "héllo".encode())
    assert value.content_type == "text/plain; charset=utf-8"


def test_bytes_arrive_as_bytes_that_know_their_type():
    value = decoded(b"\x00\xffA", "application/octet-stream")

    assert value == b"\x00\xffA"
    assert (value.content, value.text) == (b"\x00\xffA", "\x00\ufffdA")
    assert value.content_type == "application/octet-stream"


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/problem+json"]
)
def test_content_that_is_json_is_decoded(kind):
    assert decoded(b'{"a": [1, null]}', kind) == {"a": [1, None]}


def test_content_that_is_said_to_be_json_and_is_not_can_be_looked_at():
    assert decoded(b"{oops", "application/json").text == "{oops"


@pytest.mark.parametrize(
    ("content", "kind", "text"),
    [
        ("né".encode("latin-1"), "text/html; charset=latin-1", "né"),
        (b"n\xff", "text/html", "n\ufffd"),
        (b"n", 'text/html; charset="nonsense"', "n"),
        ("\ud800".encode(errors="surrogatepass"), "text/plain; charset=utf-8", "\ud800"),
    ],
)
def test_text_of_any_encoding_is_made_the_best_of(content, kind, text):
    assert decoded(content, kind) == text


def test_a_value_that_the_pod_encoded_as_json_is_itself():
    assert codecs.decode("none", [b'{"a":1}']) == {"a": 1}
    assert codecs.decode("none", [b""]) is None


def test_the_outcome_of_a_spawned_call_may_be_raw():
    segments = [b"<p>hi</p>", b"text/html"]
    payload = b"".join(codecs.join(segments))
    packed = calls.pack_outcome(calls.Returned("none", (9, 9), payload))

    value = calls.value_of(calls.unpack_outcome(packed))

    assert (value, value.text, value.content_type) == ("<p>hi</p>", "<p>hi</p>", "text/html")


def test_raw_values_can_be_pickled():
    for value in (decoded(b"hi", "text/html"), decoded(b"hi", "image/png")):
        unpickled = pickle.loads(pickle.dumps(value))
        assert (unpickled, unpickled.text, unpickled.content) == (value, "hi", b"hi")
        assert unpickled.content_type == value.content_type
