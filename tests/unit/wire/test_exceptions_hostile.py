"""Exceptions whose own code raises when they are looked at arrive all the same."""

import builtins
import dataclasses
import io
import pickle
import sys
import traceback
import urllib.error
import warnings
from email.message import Message
from typing import Any

import pytest

from kubetorch import errors
from kubetorch.wire import codecs, exceptions, introspection


def sent(error: BaseException) -> Exception:
    try:
        raise error
    except BaseException as caught:
        described_json = exceptions.describe(caught, pod_name="demo-0").to_json()
    return exceptions.rebuild(exceptions.parse_json(described_json))


class LazyError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.inner: dict[str, object] = {}

    def __getattr__(self, name: str) -> object:
        return self.__dict__["inner"][name]


class StatusError(Exception):
    @property
    def status_code(self) -> int:
        raise SystemExit(3)


class TextError(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class InterruptedTextError(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__


class ArgsError(Exception):
    @property
    def args(self) -> Any:
        raise SystemExit(3)


class DictError(Exception):
    @property
    def __dict__(self) -> Any:
        raise SystemExit(3)


class ClassError(Exception):
    @property
    def __class__(self) -> Any:
        raise SystemExit(3)


class CauseError(Exception):
    @property
    def __cause__(self) -> Any:
        raise SystemExit(3)


class EveryAttributeError(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(3)


class NoSettingError(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise SystemExit(3)


class Closing(type):
    def __getattribute__(cls, name: str) -> Any:
        raise SystemExit(3)


class Naming(type):
    @property
    def __name__(cls) -> Any:
        raise KeyError("name")

    def __eq__(cls, compared_class: object) -> bool:
        raise SystemExit(3)

    def __hash__(cls) -> int:
        return 1


class UnreadableError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.items = Items([1])
        self.table = Table(a=1)


class Items(list):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        raise SystemExit(3)

    __len__ = __repr__ = __iter__


class Table(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise SystemExit(3)


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    where: str
    count: int = 3


class StrictError(Exception):
    __slots__ = ("where",)
    instance_count = 0

    def __init__(self, *, where: str) -> None:
        type(self).instance_count += 1
        super().__init__(f"in {where}")
        self.where = where


HOSTILE: list[type[Exception]] = [
    LazyError,
    StatusError,
    TextError,
    InterruptedTextError,
    ArgsError,
    DictError,
    ClassError,
    CauseError,
    EveryAttributeError,
    NoSettingError,
    UnreadableError,
]


@pytest.mark.parametrize("cls", HOSTILE, ids=lambda cls: cls.__qualname__)
def test_what_can_be_had_of_it_is_told(cls):
    try:
        raise cls("the text")
    except Exception as error:
        failure = exceptions.describe(error)

    assert (failure.error_type, failure.args) == (cls.__qualname__, ["the text"])
    assert "the text" in failure.message
    assert 'raise cls("the text")' in failure.traceback
    assert cls.__qualname__ in failure.traceback
    failure.to_json().decode()


@pytest.mark.parametrize("cls", HOSTILE, ids=lambda cls: cls.__qualname__)
def test_it_arrives_as_itself_or_as_a_remote_error(cls):
    arrived = sent(cls("the text"))

    strange = (ClassError, CauseError, EveryAttributeError)
    assert issubclass(type(arrived), cls) is (cls not in strange)
    assert isinstance(arrived, errors.RemoteError) is (cls in strange)
    assert "the text" in str(arrived)
    assert exceptions.attributes_of(arrived)["pod_name"] == "demo-0"
    assert "the text" in "".join(traceback.format_exception(arrived))


@pytest.mark.parametrize("metaclass", [Closing, Naming])
def test_the_metaclass_may_misbehave(metaclass):
    # Made here: what collects tests looks at all that a module has.
    cls = metaclass("StrangeError", (Exception,), {"__module__": "theirs"})

    failure = exceptions.describe(cls("the text"))

    assert (failure.error_type, failure.qualname) == ("StrangeError", "StrangeError")
    assert (failure.module, failure.message) == ("theirs", "the text")
    assert str(exceptions.rebuild(failure)) == "StrangeError: the text"


def test_one_inside_a_cause_or_an_argument_is_told():
    error = ValueError("outer", TextError("inner"))
    error.__cause__ = EveryAttributeError("cause")

    failure = exceptions.describe(error)

    assert failure.cause is not None
    assert (failure.cause["error_type"], failure.cause["message"]) == (
        "EveryAttributeError",
        "cause",
    )
    assert isinstance(sent(error), ValueError)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with 3.11")
def test_a_group_of_such_ones_arrives():
    group = builtins.ExceptionGroup
    many = [cls("the text") for cls in (LazyError, TextError, ClassError, FrozenError)]

    arrived = sent(group("all", [*many, StrictError(where="here")]))

    assert type(arrived) is group
    kinds = [type(exception).__name__ for exception in arrived.exceptions]
    assert kinds == ["LazyError", "TextError", "RemoteError", "FrozenError", "StrictError"]


def test_an_answer_of_a_web_server_arrives():
    url = "http://localhost/missing"
    arrived = sent(urllib.error.HTTPError(url, 404, "Not Found", Message(), io.BytesIO()))

    assert isinstance(arrived, urllib.error.HTTPError)
    assert (arrived.code, arrived.msg, arrived.pod_name) == (404, "Not Found", "demo-0")
    assert "HTTP Error 404" in arrived.remote_traceback
    assert str(arrived) == "HTTP Error 404: Not Found"
    assert "HTTP Error 404" in "".join(traceback.format_exception(arrived))
    assert isinstance(sent(arrived), urllib.error.HTTPError)


def test_a_frozen_dataclass_arrives_with_its_cause():
    arrived = sent(FrozenError("here"))

    assert arrived == FrozenError("here")
    assert isinstance(arrived.__cause__, errors.RemoteTraceback)
    assert "FrozenError" in arrived.remote_traceback
    assert arrived.pod_name == "demo-0"


def test_no_constructor_runs():
    error = StrictError(where="here")
    instances_before = StrictError.instance_count

    arrived = sent(error)

    assert (type(arrived), str(arrived), arrived.where) == (StrictError, "in here", "here")
    assert StrictError.instance_count == instances_before


def test_a_warning_and_the_end_of_an_iteration_arrive():
    with warnings.catch_warnings(), pytest.raises(DeprecationWarning) as caught:
        warnings.simplefilter("error")
        warnings.warn("old", DeprecationWarning, stacklevel=1)

    assert type(sent(caught.value)) is DeprecationWarning
    arrived = sent(StopIteration(5))
    assert (type(arrived), arrived.value) == (StopIteration, 5)


def test_a_huge_text_is_cut_and_has_its_ends():
    arrived = sent(ValueError("begin" + "\ud800" * 10_000_000 + "end"))

    assert type(arrived) is ValueError
    assert str(arrived).startswith("begin\\ud800")
    assert str(arrived).endswith("end")
    assert len(str(arrived)) < 300_000


@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_with_too_many_digits_is_no_matter(sign):
    number = sign * 10**5000
    error = ValueError("too many", number)
    error.number = number

    assert isinstance(sent(error), ValueError)


def test_a_value_that_contains_itself_many_times_is_left_out():
    value: list[Any] = [1]
    for _ in range(100):
        value = [value, value, {"again": value}]
    around: list[Any] = []
    around.append(around)
    error = ValueError("so many")
    error.value, error.around = value, around

    assert isinstance(sent(error), ValueError)


def test_circles_of_causes_and_contexts_end():
    first, second = ValueError("one"), KeyError("two")
    first.__context__, second.__context__ = second, first
    first.__cause__, second.__cause__ = second, first

    assert str(sent(first)) == "one"


def test_values_of_strange_classes_are_copied_into_plain_ones():
    class Text(str):
        def __str__(self) -> str:
            raise SystemExit(3)

        encode = __len__ = __str__  # type: ignore[assignment]

    class Number(int):
        def __int__(self) -> int:
            raise SystemExit(3)

        __repr__ = __pos__ = __int__  # type: ignore[assignment]

    copied = exceptions.plain([Text("a"), Number(3), Items([Table(a=True)])])

    assert copied == ["a", 3, [{"a": True}]]
    assert [type(copied_value) for copied_value in copied] == [str, int, list]


@pytest.mark.parametrize("interrupt", introspection.INTERRUPTS)
def test_an_interruption_is_not_taken_for_the_users(interrupt):
    def interrupted() -> None:
        raise interrupt("now")

    with pytest.raises(interrupt):
        introspection.attempt(interrupted, None)


class Unloadable:
    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return _raise, (self.error,)


def _raise(error: type[BaseException]) -> None:
    raise error


def test_a_pickle_that_ends_programs_is_refused():
    with pytest.raises(errors.SerializationError, match="SystemExit"):
        codecs.decode("pickle", [pickle.dumps(Unloadable(SystemExit))])
    with pytest.raises(KeyboardInterrupt):
        codecs.decode("pickle", [pickle.dumps(Unloadable(KeyboardInterrupt))])
