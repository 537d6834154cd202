"""What of a deployed callable a call may reach."""

from __future__ import annotations

import pytest

from kubetorch.errors import CallableNotFoundError
from kubetorch.pod.worker.target import Target


class Shop:
    limit = 3

    def __init__(self) -> None:
        self.function = lambda: "of the instance"

    def add(self) -> str:
        return "add"

    async def later(self) -> None: ...

    async def stream(self):
        yield 1

    @property
    def broken(self) -> int:
        raise AssertionError("a property must not run")

    def __getattr__(self, name: str):
        if name == "dynamic":
            return lambda: "dynamic"
        raise AttributeError(name)


class AsyncCallable:
    async def __call__(self) -> None: ...


def shop() -> Target:
    return Target("Shop", Shop(), is_instance=True)


@pytest.mark.parametrize(
    ("method", "value"),
    [("add", "add"), ("function", "of the instance"), ("dynamic", "dynamic")],
)
def test_public_callables_are_found(method: str, value: str) -> None:
    assert shop().find(method)() == value


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("broken", "property"),
        ("limit", "value of type int"),
        ("_private", "private"),
        ("__init__", "private"),
        ("missing", "no method 'missing'"),
        (None, "without __call__"),
    ],
)
def test_all_else_is_refused_and_said_why(method: str | None, words: str) -> None:
    with pytest.raises(CallableNotFoundError, match=words):
        shop().find(method)


def test_the_hint_names_what_was_meant() -> None:
    with pytest.raises(CallableNotFoundError) as caught:
        shop().find("ad")
    assert caught.value.hint == "did you mean 'add'?"
    with pytest.raises(CallableNotFoundError) as caught:
        shop().find("zzz")
    assert caught.value.hint == "it has add, later, stream"


def test_a_function_has_no_methods() -> None:
    target = Target("len", len, is_instance=False)
    assert target.find(None) is len
    with pytest.raises(CallableNotFoundError, match="is a function"):
        target.find("add")


def test_the_event_loop_runs_async_functions_only() -> None:
    target = shop()
    assert target.runs_on_loop("later")
    assert target.runs_on_loop("stream")
    assert not target.runs_on_loop("add")
    assert not target.runs_on_loop("missing")
    assert Target("AsyncCallable", AsyncCallable(), is_instance=True).runs_on_loop(None)
