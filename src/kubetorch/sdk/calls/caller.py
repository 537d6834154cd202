"""`Caller`: one callable of one service, as something that can be called.

caller(...)                       the value, or an iterator over the values of a generator;
                                  of a broadcast a list of them, in pod order
caller(..., async_=True)          the same, awaited
caller.map(xs), .starmap(xs)      many calls, each on one pod: of a `def` one in each process
caller.spawn(...)                 a call that goes on without this program
caller.options(timeout=10)        a caller with other options
"""

from __future__ import annotations

import operator
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from kubetorch.sdk.calls import blocking, broadcast, handles
from kubetorch.sdk.calls import map as maps
from kubetorch.sdk.calls.attempts import Done, Invocation, RankValues, Target
from kubetorch.sdk.calls.call import Call, RankAsyncIterator, RemoteAsyncIterator, Rounds
from kubetorch.sdk.calls.handles import CallHandle
from kubetorch.sdk.calls.options import CallOptions, unknown_map_keyword
from kubetorch.sdk.calls.remote import Configured, Handle
from kubetorch.sdk.calls.route import Route
from kubetorch.specs import hints
from kubetorch.wire import introspection

__all__ = ["Caller", "Target"]


class Caller:
    """Calls a callable."""

    __slots__ = ("_of", "_options", "_route", "_target")

    def __init__(
        self,
        target: Target,
        route: Route,
        options: CallOptions | None = None,
        of: tuple[Handle, str | None] | None = None,
    ) -> None:
        self._target = target
        self._route = route
        self._options = options or CallOptions()
        #: The handle and the method, by which another process finds this caller.
        self._of = of

    def __reduce__(self) -> tuple[Any, ...]:
        if self._of is None:
            raise TypeError(f"the connection to {self._target.name} belongs to this process alone")
        return Configured, (*self._of, replace(self._options, on_progress=None))

    def options(self, **changes: Any) -> Caller:  # noqa: ANN401  # values of several types
        """A caller with other options, see `CallOptions`.

        Raises:
            TypeError: There is no option of that name.
            SpecError: An option has an impossible value.
        """
        return Caller(self._target, self._route, self._options.with_changes(changes), self._of)

    if not TYPE_CHECKING:  # as `RemoteCallable` has it

        def __getattr__(self, name: str) -> NoReturn:
            raise hints.no_attribute("callable", self, name)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the user's own values
        """Call it.

        Raises:
            KubetorchError: The call could not be made, or its pod or worker was lost.
            Exception: What the user's code raised there, as its own class.
        """
        target = self._target
        options, kwargs = self._options.take_from(kwargs, target.declared)
        if options.async_:
            return self._await(options, args, kwargs)
        blocking.warn_in_loop(f"{target.name}(...)", f"await {target.name}(..., async_=True)")
        done = blocking.run(Invocation(target, self._route, options, args, kwargs))
        # Raised here, so that a traceback has one frame of this package.
        if done.error is not None:
            raise done.error
        return done.value

    def _await(self, options: CallOptions, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401  # something to await
        invocation = Invocation(self._target, self._route, options, args, kwargs)
        is_generator = self._target.kind != "function"
        if invocation.broadcast is not None:
            if is_generator:
                return broadcast.iterate_async(invocation)
            return _values_of(invocation)
        call = Call(invocation)
        if is_generator and not self._target.is_distributed:
            return RemoteAsyncIterator(call)
        return _value_of(call)

    # ------------------------------------------------------------------------------ many calls

    def map(
        self,
        *iterables: Iterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        ordered: bool = True,
        window: int | None = None,
        return_exceptions: bool = False,
        **unknown: object,
    ) -> Iterator[Any]:
        """Call it for each item, as the built-in `map` does, in all processes at the same time.

        Of a service of several pods one gets each item; a distributed one runs it on all ranks.
        Nothing starts before the first result is asked for. Inputs are taken as calls start, so
        they may be endless. Leaving the iteration early cancels the calls that run.

        Args:
            iterables: The first arguments, the second ones, ….
            kwargs: Keywords that are the same for all calls.
            ordered: Results come in the order of the inputs; else as they are ready.
            window: Calls that run, or have a result that waits to be taken, side by side in a
                process where the service does not declare its `concurrency`. Without it, and
                without a `concurrency`, a `def` runs one item at a time in each process, an
                `async def` 64.
            return_exceptions: Yield what a call raises instead of raising it.
            **unknown: Keywords that a map does not have: refused, with a hint at the right place.

        Raises:
            SpecError: `window` is impossible, or a map has no such keyword.
        """
        options = self._map_options(ordered, window, return_exceptions, unknown, *iterables)
        return maps.results(self._invocations(zip(*iterables, strict=False), kwargs), options)

    def starmap(
        self,
        iterable: Iterable[Iterable[Any]],
        *,
        kwargs: Mapping[str, Any] | None = None,
        ordered: bool = True,
        window: int | None = None,
        return_exceptions: bool = False,
        **unknown: object,
    ) -> Iterator[Any]:
        """As `map`, with items that are the positional arguments of one call each."""
        options = self._map_options(ordered, window, return_exceptions, unknown, iterable)
        return maps.results(self._invocations(iterable, kwargs), options)

    def map_async(
        self,
        *iterables: Iterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        ordered: bool = True,
        window: int | None = None,
        return_exceptions: bool = False,
        **unknown: object,
    ) -> AsyncIterator[Any]:
        """As `map`, for `async for`."""
        options = self._map_options(ordered, window, return_exceptions, unknown, *iterables)
        items = zip(*iterables, strict=False)
        return maps.results_for_loop(self._invocations(items, kwargs), options)

    def starmap_async(
        self,
        iterable: Iterable[Iterable[Any]],
        *,
        kwargs: Mapping[str, Any] | None = None,
        ordered: bool = True,
        window: int | None = None,
        return_exceptions: bool = False,
        **unknown: object,
    ) -> AsyncIterator[Any]:
        """As `starmap`, for `async for`."""
        options = self._map_options(ordered, window, return_exceptions, unknown, iterable)
        return maps.results_for_loop(self._invocations(iterable, kwargs), options)

    def _map_options(
        self,
        ordered: bool,
        window: int | None,
        return_exceptions: bool,
        unknown: Mapping[str, object],
        *inputs: Iterable[Any],
    ) -> maps.MapOptions:
        for name in unknown:
            raise unknown_map_keyword(self._target.name, name)
        # Only for the bar: the `__len__` of a data set may raise anything.
        lengths = (introspection.attempt(operator.length_hint, -1, items, -1) for items in inputs)
        shortest = min(lengths, default=-1)
        if window is None and self._target.is_distributed:
            window = 1  # an item runs in all processes
        return maps.MapOptions(
            ordered,
            window,
            return_exceptions,
            label=self._target.name,
            count=None if shortest < 0 else shortest,
        )

    def _invocations(
        self, iterable: Iterable[Iterable[Any]], given_kwargs: Mapping[str, Any] | None
    ) -> Iterator[maps.Make]:
        named = {} if given_kwargs is None else given_kwargs
        options, kwargs = self._options.take_from(named, self._target.declared)
        for index, args in enumerate(iterable):
            of_item, positional = options.of_item(index), tuple(args)
            yield lambda of_item=of_item, positional=positional: Invocation(  # type: ignore[misc]  # bound now
                self._target, self._route, of_item, positional, kwargs
            )

    # --------------------------------------------------------------------------- spawned calls

    def spawn(self, /, *args: Any, **kwargs: Any) -> CallHandle:  # noqa: ANN401  # the user's own
        """Start a call that goes on without this program, and whose result is kept.

        Raises:
            SerializationError: The arguments cannot travel.
            SpecError: An option is impossible.
            KubetorchError: No pod can be reached.
        """
        options, kwargs = self._options.take_from(kwargs, self._target.declared)
        invocation = Invocation(self._target, self._route, options, args, kwargs, is_detached=True)
        return handles.spawn(invocation)


async def _value_of(call: Call) -> Any:  # noqa: ANN401  # the user's own value
    step = await call.next_async()
    if isinstance(step, Done):
        if step.error is not None:
            raise step.error
        if not step.is_streamed:
            return step.value
    if isinstance(step.value, RankValues):
        rounds = Rounds(call, step)
        return [RankAsyncIterator(rounds, rank) for rank in rounds.ranks]
    return RemoteAsyncIterator(call, step)


async def _values_of(invocation: Invocation) -> Any:  # noqa: ANN401  # the user's own values
    done = await broadcast.call_async(invocation)
    if done.error is not None:
        raise done.error
    return done.value
