"""`@kt.compute`, `@kt.distribute`, `@kt.autoscale` and `@kt.async_`, in any order.

`@kt.compute` makes a handle of a function or class, as `kt.fn` and `kt.cls` do, which `kt deploy`
and `.deploy()` deploy. The others, where they stand below it, wait in a `Partial` for it. In a pod
that was started for the very function or class, the decorators leave it as it is.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from kubetorch.errors import SpecError
from kubetorch.sdk import inpod
from kubetorch.sdk.cls import Cls, cls
from kubetorch.sdk.compute import Compute
from kubetorch.sdk.fn import Fn, P, R, Y, fn
from kubetorch.specs import autoscaling, distribution
from kubetorch.wire import introspection

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kubetorch.sdk.batching import Batched, ItemT, ResultT
    from kubetorch.sdk.compute import ComputeArguments

#: Where programs switch all decorators off: `kt.globals.disable_decorators = True`.
_GLOBALS = "kubetorch.sdk.backend"


T = TypeVar("T")
AnyT = TypeVar("AnyT")
#: The change that one decorator makes to a compute.
Change = Callable[[Compute], object]
Handle = Fn[..., Any] | Cls[Any]


class Decorator(Protocol):
    @overload
    def __call__(self, decorated: type[T]) -> Cls[T]: ...  # type: ignore[overload-overlap]  # a class can be called, too
    @overload
    def __call__(self, decorated: Batched[ItemT, ResultT, Any]) -> Fn[[ItemT], ResultT]: ...
    @overload
    def __call__(self, decorated: Callable[P, Coroutine[Any, Any, R]]) -> Fn[P, R]: ...
    @overload
    def __call__(self, decorated: Callable[P, AsyncIterator[Y]]) -> Fn[P, Iterator[Y]]: ...
    @overload
    def __call__(self, decorated: Callable[P, R]) -> Fn[P, R]: ...


class Partial:
    """A function or class with decorators, but without the `@kt.compute` that they change."""

    _kt_partial_module = True

    def __init__(self, wrapped: Callable[..., Any]) -> None:
        self.__wrapped__ = wrapped
        self.changes: list[Change] = []
        self.is_async = False

    def __call__(self, /, *_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401  # the user's values
        """Refuse, since there is no `@kt.compute`."""
        name = getattr(self.__wrapped__, "__qualname__", self.__wrapped__)
        raise SpecError(
            f"{name} has decorators, and @kt.compute is not among them",
            hint="add @kt.compute(cpus=1) to declare its pods",
        )


def compute(
    get_if_exists: bool = False,
    reload_prefixes: str | Sequence[str] | None = None,
    *,
    name: str | None = None,
    options: Mapping[str, Any] | None = None,
    prefix_username: bool | None = None,
    **compute_kwargs: Unpack[ComputeArguments],
) -> Decorator:
    """Make a service of the function or class below, to be deployed by `kt deploy`.

    Nothing is deployed by this. Calls find the service by its name.

    Args:
        get_if_exists: Whether a deploy takes the service as it is, if there is one.
        reload_prefixes: Whose service it is, see `kt.fn`.
        name: Name of the service; that of the function or class if not given.
        options: Options of its calls, as `.options(...)` takes them.
        prefix_username: Whether the user name stands in front of the service's name, see `kt.fn`.
        compute_kwargs: What it runs on: the arguments of `kt.Compute`.

    Raises:
        SpecError: A value is impossible.
    """
    if not isinstance(get_if_exists, bool):
        raise TypeError(
            f"@kt.compute got {introspection.shown(get_if_exists)}; it takes arguments, as in "
            "@kt.compute(cpus=1)"
        )

    def decorate(decorated: Any) -> Any:  # noqa: ANN401  # a function, a class, or a partial one
        if _is_off(decorated):
            return decorated
        if isinstance(decorated, (Fn, Cls)):
            raise SpecError(f"{decorated.name} has @kt.compute twice, or is a handle already")
        partial = decorated if isinstance(decorated, Partial) else Partial(decorated)
        wrapped = partial.__wrapped__
        if isinstance(wrapped, type):
            handle: Handle = cls(wrapped, name, options=options, prefix_username=prefix_username)
        else:
            handle = fn(wrapped, name, options=options, prefix_username=prefix_username)
        handle.reload_prefixes = reload_prefixes
        declared = Compute(**compute_kwargs)
        for change in partial.changes:
            change(declared)
        handle.declare(declared, get_if_exists=get_if_exists)
        if partial.is_async:
            handle.async_ = True
        return handle

    return decorate


def distribute(*args: Any, **kwargs: Any) -> Callable[[AnyT], AnyT]:  # noqa: ANN401  # as below
    """Run each call of the function or class on all pods: see `kt.Compute.distribute`.

    Args:
        args: The arguments of `kt.Compute.distribute`.
        kwargs: As `args`.

    Raises:
        SpecError: A value is impossible, or it is autoscaled.
    """
    if len(args) == 1 and callable(args[0]):
        raise TypeError("@kt.distribute takes arguments; write @kt.distribute() above the function")
    # Impossible values are errors of the decorator's own line.
    named_arguments = dict(zip(distribution.ARGUMENTS, args, strict=False))
    distribution.parse({**named_arguments, **kwargs})
    return _changing("@kt.distribute", lambda declared: declared.distribute(*args, **kwargs))


def autoscale(**kwargs: Any) -> Callable[[AnyT], AnyT]:  # noqa: ANN401  # as below
    """Let the load decide on the number of pods: see `kt.Compute.autoscale`.

    Args:
        kwargs: The arguments of `kt.Compute.autoscale`.

    Raises:
        AutoScalingError: A value is impossible.
        SpecError: It is distributed.
    """
    autoscaling.parse(kwargs, launch_timeout=1)
    return _changing("@kt.autoscale", lambda declared: declared.autoscale(**kwargs))


def async_(decorated: AnyT) -> AnyT:
    """Have calls of the function or class return something to await."""
    if _is_off(decorated):
        return decorated
    if isinstance(decorated, (Fn, Cls)):
        decorated.async_ = True
        return decorated
    partial = _partial("@kt.async_", decorated)
    partial.is_async = True
    return partial  # type: ignore[return-value]  # until @kt.compute it stands for what it wraps


def _changing(decorator: str, change: Change) -> Callable[[AnyT], AnyT]:
    def decorate(decorated: Any) -> Any:  # noqa: ANN401  # a function, a class, or a handle
        if _is_off(decorated):
            return decorated
        if isinstance(decorated, (Fn, Cls)):
            if decorated.compute is None:
                raise SpecError(f"{decorated.name} has no compute for {decorator} to change")
            change(decorated.compute)
            return decorated
        partial = _partial(decorator, decorated)
        partial.changes.append(change)
        return partial

    return decorate


def _partial(decorator: str, decorated: object) -> Partial:
    if isinstance(decorated, Partial):
        return decorated
    if not callable(decorated):
        raise TypeError(
            f"{decorator} is for functions and classes; this is {introspection.shown(decorated)}"
        )
    return Partial(decorated)


def _is_off(decorated: object) -> bool:
    """True if a function or class stays as it is."""
    is_disabled = getattr(sys.modules.get(_GLOBALS), "disable_decorators", False)
    return bool(is_disabled) or inpod.is_deployed(decorated)
