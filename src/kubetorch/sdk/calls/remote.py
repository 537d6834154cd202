"""`RemoteCallable`: a function or method of a service, with the signature of the user's own.

The verbs are properties that give the methods of `kubetorch.sdk.calls.caller.Caller`; the protocols
here say to type checkers what those take and return.
"""

# A caller's own values pass through here.
# ruff: noqa: ANN401

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeVar,
    overload,
)

from kubetorch.specs import hints

if TYPE_CHECKING:
    from kubetorch.sdk.calls.handles import CallHandle
    from kubetorch.sdk.calls.options import CallOptions

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Y = TypeVar("Y")

Serialization = Literal["json", "pickle", "none"]
#: Classes of exceptions, or their dotted names.
RetryOn = type[BaseException] | str | Iterable[type[BaseException] | str]


class Map(Protocol[R_co]):
    """See `map` and `map_async` of `kubetorch.sdk.calls.caller.Caller`."""

    def __call__(
        self,
        *iterables: Iterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        ordered: bool = True,
        window: int | None = ...,
        return_exceptions: bool = False,
    ) -> R_co:
        """Call it for each item."""


class StarMap(Protocol[R_co]):
    """See `starmap` and `starmap_async` of `kubetorch.sdk.calls.caller.Caller`."""

    def __call__(
        self,
        iterable: Iterable[Iterable[Any]],
        *,
        kwargs: Mapping[str, Any] | None = None,
        ordered: bool = True,
        window: int | None = ...,
        return_exceptions: bool = False,
    ) -> R_co:
        """Call it for each tuple of arguments."""


class Spawn(Protocol[P]):
    """See `kubetorch.sdk.calls.caller.Caller.spawn`."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> CallHandle:
        """Start a call that goes on without this program."""


class Options(Protocol[P, R]):
    """See `kubetorch.sdk.calls.options.CallOptions` for what each means."""

    def __call__(  # noqa: PLR0913  # the documented options
        self,
        *,
        stream_logs: bool | None = ...,
        serialization: Serialization | None = ...,
        async_: bool | None = ...,
        timeout: float | None = ...,
        retries: int = ...,
        retry_on: RetryOn | None = ...,
        backoff: float = ...,
        max_backoff: float = ...,
        idempotency_key: str | None = ...,
        request_id: str | None = ...,
        on_progress: Callable[[float, float | None, str | None], object] | None = ...,
    ) -> RemoteCallable[P, R]:
        """The same with other options."""


class Verbs(Protocol):
    """The verbs of a `kubetorch.sdk.calls.caller.Caller`, which is imported by the first call."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any: ...
    def options(self, **changes: Any) -> Verbs: ...
    @property
    def map(self) -> Map[Iterator[Any]]: ...
    @property
    def starmap(self) -> StarMap[Iterator[Any]]: ...
    @property
    def map_async(self) -> Map[AsyncIterator[Any]]: ...
    @property
    def starmap_async(self) -> StarMap[AsyncIterator[Any]]: ...
    @property
    def spawn(self) -> Spawn[...]: ...


class Handle(Protocol):
    """The handle of a service, as far as its callers are concerned."""

    @property
    def _callers(self) -> Mapping[str | None, Verbs]: ...

    def _make_caller(self, method: str | None) -> Verbs:
        """The caller of a method, or of the callable itself, which looks the service up."""


class RemoteCallable(ABC, Generic[P, R]):
    """A function or method of a service."""

    @abstractmethod
    def _caller(self) -> Verbs:
        """The caller of this function or method."""

    # To a type checker, `__getattr__` says that any name is right.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            # Names of our own are not there yet while a pickle is read.
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise hints.no_attribute("callable", self, name, self._called)

    @property
    def _called(self) -> str:
        """Name of this in hints."""
        return "f"

    @overload
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(
        self: RemoteCallable[..., Iterator[Y]], /, *args: Any, async_: Literal[True], **kwargs: Any
    ) -> AsyncIterator[Y]: ...
    @overload
    def __call__(
        self, /, *args: Any, async_: Literal[True], **kwargs: Any
    ) -> Coroutine[Any, Any, R]: ...
    @overload
    def __call__(self, /, *args: Any, stream_logs: bool, **kwargs: Any) -> R: ...
    @overload
    def __call__(self, /, *args: Any, serialization: Serialization, **kwargs: Any) -> R: ...
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call it; see `kubetorch.sdk.calls.caller.Caller`."""
        return self._caller()(*args, **kwargs)

    @property
    def options(self) -> Options[P, R]:
        """Options of calls: `remote.options(timeout=10, retries=2)(...)`."""
        return self._caller().options  # type: ignore[return-value]  # a Caller has these methods

    @property
    def map(self) -> Map[Iterator[R]]:
        """Calls for all items of iterables: `for result in remote.map(items)`."""
        return self._caller().map

    @property
    def starmap(self) -> StarMap[Iterator[R]]:
        """Calls for all tuples of arguments: `for result in remote.starmap(pairs)`."""
        return self._caller().starmap

    @property
    def map_async(self) -> Map[AsyncIterator[R]]:
        """As `map`, for `async for`."""
        return self._caller().map_async

    @property
    def starmap_async(self) -> StarMap[AsyncIterator[R]]:
        """As `starmap`, for `async for`."""
        return self._caller().starmap_async

    @property
    def spawn(self) -> Spawn[P]:
        """Start a call that goes on without this program: `handle = remote.spawn(...)`."""
        return self._caller().spawn  # type: ignore[return-value]  # it takes what P says


class Configured(RemoteCallable[..., Any]):
    """The result of `.options(...)`, in a process that received it as a pickle."""

    def __init__(self, module: Handle, method: str | None, options: CallOptions) -> None:
        self._module = module
        self._method = method
        self._options = options

    def _caller(self) -> Verbs:
        module, method = self._module, self._method
        caller = module._callers.get(method) or module._make_caller(method)
        changes = {
            option.name: getattr(self._options, option.name) for option in fields(self._options)
        }
        return caller.options(**changes)
