"""Exceptions of all kinds arrive with their class, text and attributes."""

import builtins
import dataclasses
import datetime
import json
import pathlib
import pickle
import subprocess
import sys
import traceback
from enum import IntEnum
from typing import ClassVar

import numpy
import pydantic
import pytest
from pydantic_core import PydanticCustomError

from kubetorch import errors
from kubetorch.wire import exceptions


def sent(error: BaseException) -> Exception:
    return exceptions.rebuild(exceptions.parse_json(exceptions.describe(error).to_json()))


class Opaque:
    def __repr__(self) -> str:
        return "<opaque>"


class Colour(IntEnum):
    RED = 1


class NeedsArgumentsError(Exception):
    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class SaysItselfError(KeyError):
    def __str__(self) -> str:
        return f"there is no {self.args[0]}"


class SlottedError(Exception):
    __slots__ = ("where",)

    def __init__(self, where: tuple[int, int]) -> None:
        super().__init__("not here")
        self.where = where


class MissingDataError(FileNotFoundError):
    def __init__(self, number: int, name: str) -> None:
        super().__init__(number, "no data", name)
        self.name = name


class MadeOddlyError(Exception):
    def __new__(cls, *, reason: str) -> "MadeOddlyError":
        return super().__new__(cls, reason)

    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)


class BadTextError(UnicodeDecodeError):
    pass


class ObjectTextError(Exception):
    def __init__(self, thing: Opaque) -> None:
        self.thing = thing
        self.count = 3

    def __str__(self) -> str:
        return f"about {self.thing.__class__.__name__} {self.count}"


def raised(action, *args, **kwargs) -> Exception:
    try:
        action(*args, **kwargs)
    except Exception as error:
        return error
    raise AssertionError("it did not raise")


KINDS = {
    "open": (lambda: raised(open, "/data/x.csv"), ["errno", "strerror", "filename"]),
    "open of bytes": (lambda: raised(open, b"/data/\xff"), ["filename"]),
    "open of an odd name": (lambda: raised(open, "/data/\udcff"), ["filename"]),
    "rename": (
        lambda: raised(pathlib.Path("/data/a").rename, "/data/b"),
        ["filename", "filename2"],
    ),
    "a path": (lambda: FileNotFoundError(2, "gone", pathlib.Path("/x")), ["filename"]),
    "errno of another class": (lambda: OSError(5, "broken"), ["errno"]),
    "an OSError of one argument": (lambda: OSError("broken"), ["errno", "args"]),
    "a written count": (lambda: BlockingIOError(11, "later", 7), ["characters_written"]),
    "decoding": (
        lambda: raised(b"\xff\xfe".decode),
        ["encoding", "object", "start", "end", "reason"],
    ),
    "encoding": (lambda: raised("\ud800x".encode), ["object", "start", "end", "reason"]),
    "translating": (lambda: UnicodeTranslateError("abc", 0, 1, "no"), ["object", "reason"]),
    "syntax": (
        lambda: raised(compile, "a = (1,\nb = 2", "their.py", "exec"),
        ["msg", "filename", "lineno", "offset", "text", "args"],
    ),
    "import": (lambda: raised(__import__, "nonsense.of.theirs"), ["name", "path", "msg"]),
    "import from": (
        lambda: raised(exec, "from json import nonsense", {}),
        ["name", "path"],
    ),
    "a name": (lambda: raised(eval, "nonsense", {}), ["name"]),
    "an attribute": (lambda: raised(getattr, Opaque(), "nonsense"), ["name"]),
    "a key": (lambda: raised({}.__getitem__, "k"), ["args"]),
    "a tuple for a key": (lambda: raised({}.__getitem__, (1, "a")), ["args"]),
    "bytes for a key": (lambda: raised({}.__getitem__, b"k"), ["args"]),
    "an object for a key": (lambda: raised({}.__getitem__, Opaque()), []),
    "a number that is no JSON": (lambda: ValueError(float("inf"), -0.0), ["args"]),
    "an enumeration": (lambda: ValueError("not", Colour.RED), []),
    "a path among others": (lambda: ValueError("not", pathlib.Path("a")), ["args"]),
    "a dict of odd keys": (lambda: ValueError({1: (2,), "a": [b"b"]}), ["args"]),
    "an object": (lambda: ValueError(Opaque()), []),
    "an object among others": (lambda: ValueError("not", Opaque()), []),
    "an exception among others": (lambda: ValueError("not", KeyError("k")), []),
    "a surrogate": (lambda: ValueError("\ud800"), ["args"]),
    "surrogates all over": (
        lambda: ValueError({"\ud800": ["\ud801", Opaque()]}, pathlib.Path("\udcff"), "a"),
        [],
    ),
    "a long text": (lambda: ValueError("x" * 100_000), ["args"]),
    "no arguments": (lambda: ValueError(), ["args"]),
    "the end of an iteration": (lambda: StopIteration((1, 2)), ["value", "args"]),
    "a process": (
        lambda: subprocess.CalledProcessError(3, ["do", "it"], output=b"\x00out", stderr="err"),
        ["returncode", "cmd", "output", "stdout", "stderr"],
    ),
    "a process of paths": (
        lambda: subprocess.CalledProcessError(3, [pathlib.Path("do"), b"it"]),
        ["returncode", "cmd"],
    ),
    "a process that is late": (
        lambda: subprocess.TimeoutExpired(("do", "it"), 1.5),
        ["cmd", "timeout"],
    ),
    "JSON": (lambda: raised(json.loads, "{nonsense"), ["msg", "doc", "pos", "lineno", "colno"]),
    "a constructor with arguments": (
        lambda: NeedsArgumentsError(7, detail="bad"),
        ["code", "detail", "args"],
    ),
    "a text of its own": (lambda: SaysItselfError("x"), ["args"]),
    "slots": (lambda: SlottedError((1, 2)), ["where"]),
    "a subclass of a built-in one": (
        lambda: MissingDataError(2, "x.csv"),
        ["errno", "strerror", "filename", "name"],
    ),
    "a way of its own to make one": (lambda: MadeOddlyError(reason="odd"), ["args"]),
    "a subclass that lives in C": (
        lambda: BadTextError("utf-8", b"\xff", 0, 1, "no"),
        ["object", "start"],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_arrives_with_its_class_text_and_attributes(kind):
    make, attributes = KINDS[kind]
    error = make()

    arrived = sent(error)

    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert repr(arrived) == repr(error)
    for name in attributes:
        assert getattr(arrived, name) == getattr(error, name), name
        assert type(getattr(arrived, name)) is type(getattr(error, name)), name


@dataclasses.dataclass
class Step:
    number: int
    colours: tuple[Colour, ...]


def test_attributes_and_arguments_arrive_as_values_of_a_call_do():
    error = NeedsArgumentsError(1, detail="x")
    attributes = {
        "loss": numpy.float32(1.5),
        "gradient": numpy.arange(3.0),
        "step": Step(2, (Colour.RED,)),
        "at": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
        "by": {Colour.RED: (1, {2})},
    }
    vars(error).update(attributes)
    error.args = ("bad", Step(1, ()))

    arrived = sent(error)

    numpy.testing.assert_array_equal(vars(arrived).pop("gradient"), attributes.pop("gradient"))
    for name, value in attributes.items():
        assert getattr(arrived, name) == value, name
        assert type(getattr(arrived, name)) is type(value), name
    assert arrived.args == ("bad", Step(1, ()))


def test_an_attribute_that_is_too_large_or_cannot_travel_leaves_the_others():
    error = NeedsArgumentsError(1, detail="x")
    error.large, error.opaque, error.small = numpy.zeros(100_000), Opaque(), numpy.int64(3)

    arrived = sent(error)

    assert arrived.large == "<a value of type ndarray, too large for an exception>"
    assert not hasattr(arrived, "opaque")
    assert arrived.small == numpy.int64(3)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_that_arrived_can_be_sent_on(kind):
    error = KINDS[kind][0]()

    arrived = sent(sent(error))

    assert type(arrived) is type(error)
    assert str(arrived) == str(error)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with 3.11")
def test_a_group_arrives_with_its_exceptions():
    group_class = builtins.ExceptionGroup
    group = group_class("both", [ValueError("a"), raised(open, "/data/x.csv")])

    arrived = sent(group)

    assert type(arrived) is group_class
    assert str(arrived) == str(group)
    assert [str(exception) for exception in arrived.exceptions] == [
        str(exception) for exception in group.exceptions
    ]
    assert isinstance(arrived.exceptions[1], FileNotFoundError)


def test_an_exception_whose_text_cannot_be_made_here_is_told_by_a_subclass():
    arrived = sent(ObjectTextError(Opaque()))

    assert isinstance(arrived, ObjectTextError)
    assert type(arrived).__name__ == "ObjectTextError"
    assert (str(arrived), arrived.count) == ("about Opaque 3", 3)
    assert "about Opaque 3" in "".join(traceback.format_exception(arrived))
    for copied_error in (pickle.loads(pickle.dumps(arrived)), sent(arrived)):
        assert isinstance(copied_error, ObjectTextError)
        assert (str(copied_error), copied_error.count) == ("about Opaque 3", 3)


def test_the_text_survives_where_the_bytes_are_too_many():
    error = raised((b"\xff" * 1_000_000).decode)

    arrived = sent(error)

    assert isinstance(arrived, UnicodeDecodeError)
    assert (str(arrived), arrived.start, arrived.reason) == (str(error), 0, error.reason)
    assert len(exceptions.describe(error).to_json()) < 1_000_000


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_told_of_an_exception_is_utf_8_everywhere(kind):
    failure_parts = exceptions.describe(KINDS[kind][0]()).to_dict()

    json.dumps(failure_parts, ensure_ascii=False, allow_nan=False).encode()


def test_a_surrogate_in_an_error_of_our_own_does_no_harm():
    assert str(sent(errors.SpecError("\ud800"))) == "\ud800"


def test_an_exception_among_its_own_arguments_is_told():
    error = ValueError("loop")
    error.args = ("loop", error)

    assert isinstance(sent(error), ValueError)


def test_the_body_of_a_response_has_plain_values_as_other_clients_know_them():
    body = json.loads(exceptions.describe(KeyError(("a", 1)), pod_name="demo-0").to_json())

    assert (body["error_type"], body["message"]) == ("KeyError", "('a', 1)")
    assert (body["pod_name"], body["args"], body["state"]) == ("demo-0", [["a", 1]], {})


@pytest.mark.parametrize(
    "members",
    [
        [],
        "x",
        {"filename": {}},
        {"filename": {"bytes": "zz"}},
        {"filename": {"nonsense": 1}},
        {"args": {"tuple": 3}},
        {"args": 3, "errno": "x", "__class__": 5},
        {"args": {"dict": [[{"dict": []}, 1]]}},
    ],
)
def test_members_that_make_no_sense_are_left_out(members):
    failure_parts = exceptions.describe(FileNotFoundError(2, "gone")).to_dict() | {
        "members": members
    }

    arrived = exceptions.rebuild(exceptions.parse(failure_parts))

    assert isinstance(arrived, FileNotFoundError)
    assert str(arrived) == "[Errno 2] gone"


def test_the_class_of_an_exception_may_refuse_subclasses():
    class Closed(Exception):
        is_closed: ClassVar[bool] = True

        def __init_subclass__(cls) -> None:
            raise TypeError("closed")

        def __str__(self) -> str:
            return str(self.thing)

    globals()["Closed"] = Closed
    Closed.__qualname__ = "Closed"
    error = Closed()
    error.thing = Opaque()

    arrived = sent(error)

    assert isinstance(arrived, errors.RemoteError)
    assert "<opaque>" in str(arrived)


def test_the_text_of_a_stand_in_names_the_class_that_was_raised():
    arrived = sent(GeneratorExit())
    assert isinstance(arrived, errors.RemoteError)
    assert repr(arrived) == "RemoteError('GeneratorExit')"


def test_values_that_are_too_large_together_say_so():
    error = NeedsArgumentsError(3, detail="full")
    for number in range(6):
        setattr(error, f"part{number}", "x" * 200_000)
        setattr(error, f"pair{number}", ("x" * 60_000, number))
    error.thing = Opaque()
    arrived = sent(error)
    assert (arrived.code, arrived.detail, str(arrived)) == (3, "full", "3: full")
    parts = [getattr(arrived, f"part{number}") for number in range(6)]
    assert parts[0] == "x" * 200_000
    assert "too large" in parts[5]
    assert arrived.pair0 == ("x" * 60_000, 0)
    assert "too large" in arrived.pair5
    assert not hasattr(arrived, "thing")


def test_notes_that_are_no_list_of_texts_do_no_harm():
    error = ValueError("x")
    error.__notes__ = ["a", 3, "b" * 1_000_000]
    first, second = sent(error).__notes__
    assert (first, len(second) < 300_000) == ("a", True)
    error.__notes__ = 5
    assert not hasattr(sent(error), "__notes__")


class Checked(pydantic.BaseModel):
    count: int
    names: list[str] = []

    @pydantic.field_validator("count")
    @classmethod
    def small(cls, count: int) -> int:
        if count == 1:
            raise PydanticCustomError("odd", "{count} is odd", {"count": count})
        if count > 2:
            raise ValueError("too {large}")
        return count


@pytest.mark.parametrize(
    "values", ['{"count": "x"}', '{"count": 1}', '{"count": 5, "names": [1]}', "{}", "["]
)
@pytest.mark.parametrize("make", [Checked.model_validate_json, lambda text: Checked(count=text)])
def test_a_validation_error_of_pydantic_arrives_with_its_lines(make, values: str) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        make(values)
    arrived_error = sent(caught.value)
    assert isinstance(arrived_error, pydantic.ValidationError)
    assert str(arrived_error) == str(caught.value)
    lines = [
        validation_error.errors(include_context=False)
        for validation_error in (arrived_error, caught.value)
    ]
    assert lines[0] == lines[1]


def test_a_validation_error_of_pydantic_that_makes_no_sense_is_another_one() -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        Checked(count="x")
    failure = exceptions.describe(caught.value)
    for parts in (None, 3, [], ["x"], ["x", 3], ["x", [{"type": 5}]], {"tuple": [1, 2, 3]}):
        rebuilt_error = exceptions.rebuild(
            dataclasses.replace(failure, members={"pydantic": parts})
        )
        assert str(caught.value) in str(rebuilt_error)
