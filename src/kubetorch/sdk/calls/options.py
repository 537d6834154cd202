"""How one call is made: what `.options(...)` takes, and the bare keywords of a call.

`stream_logs`, `serialization` and `async_` may stand among the arguments of a call, unless the
user's signature has a parameter of that name. Keywords that programs know from distributed services
and from the debugger are refused, with the same exception; off (`None` or `False`) they ask for
nothing, and are left out. Everything else goes to the user's callable: a bare `timeout` is the
user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from types import FunctionType
from typing import Any

from kubetorch.errors import SpecError
from kubetorch.lib.records import record
from kubetorch.wire import waits
from kubetorch.wire.codecs import CODECS

#: Options that may stand among the arguments of a call.
BARE = frozenset({"stream_logs", "serialization", "async_"})
#: Keywords that mean something only together with what this release does not have.
REFUSED = {
    "workers": "distributed services",
    "restart_procs": "distributed services",
    "debug": "the debugger",
    "pdb": "the debugger",
    "stream_metrics": "metrics",
}
#: All keywords that mean something other than an argument, unless the signature declares them.
RESERVED = BARE.union(REFUSED)

#: Told how far a call has come: what is done, of how much, and what is happening.
OnProgress = Callable[[float, float | None, str | None], object]


@record
class CallOptions:
    """How a call is made; `None` leaves it to the handle, and then to `kt.config`.

    Attributes:
        stream_logs: Whether the lines that the call prints are shown.
        serialization: How arguments and result travel: `json`, `pickle` or `none`.
        async_: Whether the call returns an awaitable.
        timeout: Seconds after which the call is interrupted and fails with `CallTimeoutError`.
        retries: How often the call is made again when its worker, its pod or the connection was
            lost. All attempts carry one idempotency key, so none runs that another one replaces.
            Spawned calls have none.
        idempotency_key: A second call with the same key gets the outcome of the first. With `.map`
            each item has one of its own: this one and the item's number, such as `k/0`.
        request_id: Identity of the request that the call belongs to, for logs.
        on_progress: Told of each `kt.progress(...)` of the call: current, total, message.
    """

    stream_logs: bool | None = None
    serialization: str | None = None
    async_: bool | None = None
    timeout: float | None = None
    retries: int = 0
    idempotency_key: str | None = None
    request_id: str | None = None
    on_progress: OnProgress | None = None

    def __post_init__(self) -> None:
        if self.stream_logs is not None:
            boolean("stream_logs", self.stream_logs)
        if self.serialization is not None:
            serialization(self.serialization)
        if self.async_ is not None:
            boolean("async_", self.async_)
        if self.timeout is not None:
            _positive("timeout", self.timeout)
        _whole("retries", self.retries)
        for name in ("idempotency_key", "request_id"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise SpecError(f"{name} is {value!r}; it must be text that is not empty")
        _callable("on_progress", self.on_progress)

    def check_spawned(self) -> None:
        """Refuse what has no effect on a call that goes on without its caller.

        Raises:
            SpecError: There is such an option.
        """
        if self.retries:
            raise SpecError(
                f"retries={self.retries} has no effect on a spawned call: nobody may be there to "
                "make it again",
                hint="spawn it again when its handle raises, or retry in the function itself",
            )

    def of_item(self, index: int) -> CallOptions:
        """These options, for one of many calls that are made together."""
        if self.idempotency_key is None:
            return self
        return replace(self, idempotency_key=f"{self.idempotency_key}/{index}")

    def with_changes(self, changes: Mapping[str, Any]) -> CallOptions:
        """These options, with those of a caller.

        Raises:
            TypeError: There is no option of that name.
            SpecError: An option has an impossible value.
        """
        for name in changes:
            if name not in _NAMES and name not in REFUSED:
                raise TypeError(f"there is no call option {name!r}; {_nearest(name)}")
        _refuse(changes)
        return replace(self, **{name: changes[name] for name in changes if name in _NAMES})

    def take_from(
        self, kwargs: Mapping[str, Any], declared: frozenset[str]
    ) -> tuple[CallOptions, dict[str, Any]]:
        """Options and the user's own keywords, out of the keywords of a call.

        Args:
            kwargs: Keywords of the call.
            declared: Parameters that the user's signature has.

        Raises:
            SpecError: An option has an impossible value, or belongs to another release.
        """
        if RESERVED.isdisjoint(kwargs):
            return self, kwargs if isinstance(kwargs, dict) else dict(kwargs)
        bare = {name: kwargs[name] for name in RESERVED if name in kwargs and name not in declared}
        if not bare:
            return self, dict(kwargs)
        own = {name: value for name, value in kwargs.items() if name not in bare}
        return self.with_changes(bare), own


def _nearest(name: str) -> str:
    import difflib  # noqa: PLC0415  # 2 ms that only a mistake needs

    near = difflib.get_close_matches(name, _NAMES, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(_NAMES))}"


def _refuse(given: Mapping[str, object]) -> None:
    for name, what in REFUSED.items():
        value = given.get(name)
        if value is not None and value is not False:
            raise SpecError(
                f"{name}= belongs to {what}, which this release does not have",
                hint=f"a function that has a parameter {name!r} of its own gets it",
            )


_NAMES = frozenset(item.name for item in fields(CallOptions))


def boolean(name: str, value: object) -> bool:
    """A setting that is true or false.

    Raises:
        SpecError: It is something else.
    """
    if not isinstance(value, bool):
        raise SpecError(f"{name} is {value!r}; it must be True or False")
    return value


def serialization(value: object) -> str:
    """The name of a codec.

    Raises:
        SpecError: There is no such codec.
    """
    if not isinstance(value, str) or value not in CODECS:
        raise SpecError(f"serialization is {value!r}; there are {', '.join(CODECS)}")
    return value


def _positive(name: str, value: object) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= waits.LONGEST_TIMEOUT:  # type: ignore[operator]  # one
        raise SpecError(
            f"{name} is {value!r}; it must be a number of seconds above 0, and at most "
            f"{waits.LONGEST_TIMEOUT:.0f}"
        )


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SpecError(f"{name} is {value!r}; it must be a whole number, 0 or more")


def _callable(name: str, value: object) -> None:
    if not (value is None or callable(value)):
        raise SpecError(f"{name} is {value!r}; it must be callable")


def declared_parameters(function: object) -> frozenset[str]:
    """Those of the reserved keywords that a function declares as parameters of its own."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return frozenset()
    code = function.__code__
    return RESERVED.intersection(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
