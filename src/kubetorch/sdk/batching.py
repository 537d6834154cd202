"""`@kt.batched`: calls of a function or method run together, as one call with a list."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

from kubetorch.errors import SpecError
from kubetorch.specs.batching import MARKER, BatchSpec
from kubetorch.wire import introspection

AnyT = TypeVar("AnyT")
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
ListT = TypeVar("ListT")

# Flags of a function's code, as in `inspect`, whose import costs 10 ms.
_GENERATOR, _ASYNC_GENERATOR = 0x20, 0x200


class Batched(Generic[ItemT, ResultT, ListT]):
    """For type checkers: a function of a list, whose handle takes an item and returns a result.

    At run time it is the function itself.
    """

    if TYPE_CHECKING:

        def __call__(self, items: list[ItemT], /) -> ListT: ...


class Decorator(Protocol):
    @overload
    def __call__(
        self, decorated: Callable[[list[ItemT]], Coroutine[Any, Any, list[ResultT]]]
    ) -> Batched[ItemT, ResultT, Coroutine[object, object, list[ResultT]]]: ...
    @overload
    def __call__(
        self, decorated: Callable[[list[ItemT]], list[ResultT]]
    ) -> Batched[ItemT, ResultT, list[ResultT]]: ...
    @overload
    def __call__(self, decorated: AnyT) -> AnyT: ...


def batched(max_size: int = 32, wait: float = 0.02) -> Decorator:
    """Let calls of the function or method below run together, as one call with a list.

    The function takes a list and returns a list with one result for each item, in their order. In
    this program it stays what it is. As a service it is called with single items, `f(item)`, and
    each caller gets the result of its item: calls that come at about the same time run as one, in
    one of the slots that `kt.Compute(concurrency=)` declares; without it, one batch at a time runs
    in each process. An exception in the place of a result is raised for that item alone; one that
    the function raises, for all items of the batch.

    Args:
        max_size: Calls that run together at most, 1 to 10,000.
        wait: Seconds that a call waits for others at most, 0 to 60; its time in the line counts.

    Raises:
        SpecError: A value is impossible, or the function is a generator or takes no list alone.
        TypeError: It is no function.
    """
    if callable(max_size):
        raise TypeError("@kt.batched takes arguments; write @kt.batched() above the function")
    spec = BatchSpec(max_size, wait)

    def decorate(decorated: Any) -> Any:  # noqa: ANN401  # a function, a method, or a handle
        function: object = decorated
        if introspection.is_ours(decorated) and hasattr(decorated, "__wrapped__"):
            function = decorated.__wrapped__
        function = introspection.attribute(function, "__func__", function)
        innermost = introspection.unwrapped(function)
        if not isinstance(innermost, FunctionType):
            raise TypeError(
                "@kt.batched is for functions and methods; this is "
                f"{introspection.shown(decorated)}"
            )
        _check(innermost)
        setattr(function, MARKER, spec)
        return decorated

    return decorate


def spec_of(function: object) -> BatchSpec | None:
    """How calls of a function run together; `None` for one that is not batched."""
    spec = introspection.attribute(function, MARKER)
    return spec if isinstance(spec, BatchSpec) else None


def _check(function: FunctionType) -> None:
    code, name = function.__code__, function.__qualname__
    if code.co_flags & (_GENERATOR | _ASYNC_GENERATOR):
        raise SpecError(
            f"{name} is a generator, which @kt.batched cannot split among its callers",
            hint="let it return a list with one result for each item",
        )
    parameters = code.co_varnames[: code.co_argcount]
    keywords = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    needed = code.co_argcount - len(function.__defaults__ or ())
    is_method = name.rpartition(".")[0].rpartition(".")[2] not in ("", "<locals>")
    unknown = set(keywords) - (function.__kwdefaults__ or {}).keys()
    if not parameters or needed > 1 + is_method or unknown:
        raise SpecError(
            f"{name}({', '.join((*parameters, *keywords))}) is to be batched, so it is called with "
            "one argument: a list",
            hint="put what belongs together into one item, such as a tuple or a dict",
        )
