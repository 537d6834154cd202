"""User code whose exceptions and values raise when they are looked at ends its calls, no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.local.worker_harness import agent, run

SHOP = """
import functools, urllib.error

class Lazy(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.inner = {}
    def __getattr__(self, name):
        return self.__dict__["inner"][name]

class Status(Exception):
    @property
    def status_code(self):
        raise SystemExit(3)

class Text(Exception):
    def __str__(self):
        raise KeyboardInterrupt

class Nameless(Exception):
    @property
    def __class__(self):
        raise SystemExit(3)

class Every(Exception):
    def __getattribute__(self, name):
        raise SystemExit(3)

class Digits(Exception):
    def __init__(self, text):
        super().__init__(text, 10**5000)

    def __str__(self):
        return self.args[0]

class Items(list):
    def __iter__(self):
        raise SystemExit(3)

class Picky:
    def __reduce__(self):
        raise SystemExit(3)

class Unloadable:
    def __reduce__(self):
        return exit, (3,)

KINDS = {kind.__name__: kind for kind in (Lazy, Status, Text, Nameless, Every, Digits)}

class Shop:
    def fail(self, kind):
        raise KINDS[kind]("the text")
    async def fail_async(self, kind):
        raise KINDS[kind]("the text")
    def fail_later(self, kind):
        yield 1
        raise KINDS[kind]("the text")
    async def fail_later_async(self, kind):
        yield 1
        raise KINDS[kind]("the text")
    def items(self):
        return Items([1])
    async def items_async(self):
        return Items([1])
    def yields_items(self):
        yield Items([1])
    def picky(self):
        return Picky()
    def stop(self):
        raise StopIteration(5)
    def web(self):
        raise urllib.error.HTTPError("http://localhost", 404, "Not Found", {}, None)
    def huge(self):
        raise ValueError("begin" + "\\ud800" * 10_000_000 + "end")
    def echo(self, value):
        return value
    def __getattr__(self, name):
        raise SystemExit(3)
"""

KINDS = ["Lazy", "Status", "Text", "Nameless", "Every", "Digits"]
METHODS = ["fail", "fail_async", "fail_later", "fail_later_async"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_that_cannot_be_looked_at_ends_its_call_alone(
    folder: Path, method: str
) -> None:
    async def main() -> None:
        async with agent(folder) as on:
            worker = await on.worker("Shop")
            # More often than a worker has threads that it might lose.
            for kind in KINDS * 3:
                failure = await on.failure(worker, kind, method=method)
                assert failure.error_type == kind
                assert "the text" in failure.message
                assert 'raise KINDS[kind]("the text")' in failure.traceback
                assert failure.pod_name == "pod-0"
            assert await on.call(worker, 3, method="echo") == 3
            assert worker.running == 0

    run(main())


def test_a_value_that_cannot_be_encoded_ends_its_call(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as on:
            worker = await on.worker("Shop")
            for method in ("items", "items_async", "yields_items"):
                assert (await on.failure(worker, method=method)).error_type == "SystemExit"
            failure = await on.failure(worker, method="picky", codec="pickle")
            assert failure.error_type == "SystemExit"
            assert await on.call(worker, 3, method="echo") == 3

    run(main())


def test_arguments_that_end_programs_when_they_are_decoded_end_their_call(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as on:
            worker = await on.worker("Shop")
            pickled = b"cbuiltins\nexit\n(I3\ntR."
            failure = await on.failure(worker, method="echo", codec="pickle", arguments=[pickled])
            assert failure.error_type == "SerializationError"
            assert "SystemExit: 3" in failure.message
            assert await on.call(worker, 3, method="echo") == 3

    run(main())


def test_an_instance_that_raises_when_it_is_asked_for_a_method_goes_on(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as on:
            worker = await on.worker("Shop")
            for _ in range(3):
                assert (await on.failure(worker, method="nothing")).error_type == "SystemExit"
            assert await on.call(worker, 3, method="echo") == 3

    run(main())


@pytest.mark.parametrize(
    ("method", "error_type", "text"),
    [
        ("stop", "StopIteration", "5"),
        ("web", "HTTPError", "HTTP Error 404: Not Found"),
        ("huge", "ValueError", "characters left out"),
    ],
)
def test_what_else_is_special_arrives(
    folder: Path, method: str, error_type: str, text: str
) -> None:
    async def main() -> None:
        async with agent(folder) as on:
            worker = await on.worker("Shop")
            failure = await on.failure(worker, method=method)
            assert failure.error_type == error_type
            assert text in failure.message
            assert len(failure.message) < 300_000

    run(main())
