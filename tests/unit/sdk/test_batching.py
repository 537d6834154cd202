"""What `@kt.batched` takes, and what it refuses."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

import kubetorch as kt
from kubetorch.sdk import batching
from kubetorch.specs.batching import BatchSpec


def upper(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]


def test_a_decorated_function_stays_what_it_is_and_has_a_mark_that_wrappers_keep() -> None:
    decorated: Any = kt.batched(max_size=8, wait=0)(functools.wraps(upper)(lambda t: upper(t)))
    assert decorated(["a", "b"]) == ["A", "B"]
    wrapper = functools.wraps(decorated)(lambda texts: decorated(texts))
    assert batching.spec_of(wrapper) == BatchSpec(8, 0)
    assert batching.spec_of(upper) is None


def test_methods_and_handles_are_marked_in_any_order_of_decorators() -> None:
    class Model:
        @kt.batched(max_size=2)
        def bound(self, items: list[int]) -> list[int]:
            return items

        @kt.batched(max_size=3)
        @staticmethod
        def static(items: list[int]) -> list[int]:
            return items

    assert batching.spec_of(Model().bound) == BatchSpec(2, 0.02)
    assert batching.spec_of(Model.static) == BatchSpec(3, 0.02)
    handle = kt.batched(max_size=4)(kt.compute(cpus=1)(upper))
    assert isinstance(handle, kt.Fn)
    try:
        assert batching.spec_of(upper) == BatchSpec(4, 0.02)
    finally:
        del upper.__kubetorch_batched__  # type: ignore[attr-defined]


def a_generator(items: list[int]) -> Iterator[int]:
    yield from items


async def an_async_generator(items: list[int]) -> Any:
    yield items


def two(items: list[int], scale: int) -> list[int]:
    return [item * scale for item in items]


def nothing() -> list[int]:
    return []


@pytest.mark.parametrize("function", [a_generator, an_async_generator, two, nothing])
def test_functions_that_take_no_list_alone_are_refused(function: Any) -> None:
    with pytest.raises(kt.SpecError, match=function.__name__):
        kt.batched()(function)


@pytest.mark.parametrize("decorated", [dict, 3, "f"])
def test_what_is_no_function_is_refused(decorated: object) -> None:
    with pytest.raises(TypeError, match=r"@kt\.batched is for functions and methods"):
        kt.batched()(decorated)


def test_the_decorator_needs_its_parentheses() -> None:
    with pytest.raises(TypeError, match=r"write @kt\.batched\(\)"):
        kt.batched(two)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_size", [0, -1, 10_001, 2.0, True, "8"])
def test_an_impossible_size_is_refused(max_size: Any) -> None:
    with pytest.raises(kt.SpecError, match=r"max_size is .* from 1 to 10000"):
        kt.batched(max_size=max_size)


@pytest.mark.parametrize("wait", [-0.1, 61, float("nan"), float("inf"), "1", None, True])
def test_an_impossible_wait_is_refused(wait: Any) -> None:
    with pytest.raises(kt.SpecError, match=r"wait is .* from 0 to 60"):
        kt.batched(wait=wait)
