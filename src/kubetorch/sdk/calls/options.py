"""The options of one call: the arguments of `.options(...)`, and the bare keywords of a call.

`stream_logs`, `serialization`, `async_`, of distributed services `workers` and `restart_procs`,
and `debug` may stand among the arguments of a call, unless the user's signature has a parameter of
that name. Every other keyword goes to the user's callable: a bare `timeout` is the user's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import FunctionType
from typing import Any

from kubetorch.errors import SpecError, did_you_mean
from kubetorch.sdk import parameters
from kubetorch.sdk.debugger import breakpoints
from kubetorch.sdk.tuning import LIMITS
from kubetorch.specs.metrics import MetricsConfig
from kubetorch.wire import introspection, retries
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.codecs import CODECS

#: Options that may stand among the arguments of a call.
BARE = frozenset({"stream_logs", "serialization", "async_", "workers", "restart_procs", "debug"})
#: An earlier name of `debug`, which also takes a port.
PDB = "pdb"
#: Accepted without effect: it would show the pods' use of resources.
METRICS = "stream_metrics"
#: All keywords that are no arguments, unless the signature declares them.
RESERVED = BARE.union((PDB, METRICS))

#: `"any"`, the least busy pod of any service; of a distributed one `"ready"`, a part of addresses,
#: or a list of node ranks, addresses and names of pods.
Workers = str | Sequence[int | str]
#: Called with the progress of a call: the current amount, the total, and a message.
OnProgress = Callable[[float, float | None, str | None], object]


@dataclass(frozen=True)
class CallOptions:
    """The options of a call; `None` leaves each to the handle, and then to `kt.config`."""

    stream_logs: bool | None = None
    serialization: str | None = None
    async_: bool | None = None
    workers: Workers | None = None
    restart_procs: bool | None = None
    timeout: float | None = None
    queue_timeout: float | None = None
    retries: int = 0
    #: Classes of exceptions, or one, or their dotted names; dotted names once it is made.
    retry_on: object = None
    backoff: float = wire_tuning.TIMING.retry_backoff_seconds
    max_backoff: float = wire_tuning.TIMING.retry_longest_backoff_seconds
    idempotency_key: str | None = None
    request_id: str | None = None
    on_progress: OnProgress | None = None
    #: True, or the settings; the settings once it is made.
    debug: object = None
    post_mortem: bool | None = None

    def __post_init__(self) -> None:
        if self.stream_logs is not None:
            boolean("stream_logs", self.stream_logs)
        if self.serialization is not None:
            serialization(self.serialization)
        if self.async_ is not None:
            boolean("async_", self.async_)
        if self.restart_procs is not None:
            boolean("restart_procs", self.restart_procs)
        if self.timeout is not None:
            _positive("timeout", self.timeout)
        if self.queue_timeout is not None:
            _positive("queue_timeout", self.queue_timeout)
        if self.debug is not None:
            object.__setattr__(self, "debug", breakpoints.config_of(self.debug))
        if self.post_mortem is not None:
            boolean("post_mortem", self.post_mortem)
        self._check_retries()
        for name in ("idempotency_key", "request_id"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise SpecError(f"{name} is {value!r}; it must be text that is not empty")
        progress: object = self.on_progress
        if progress is not None and not callable(progress):
            raise SpecError(f"on_progress is {progress!r}; it must be callable")

    def _check_retries(self) -> None:
        count: object = self.retries
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise SpecError(f"retries is {count!r}; it must be a whole number, 0 or more")
        for name in ("backoff", "max_backoff"):
            _seconds(name, getattr(self, name), "of 0 or more", least=0.0)
        if self.retry_on is not None:
            object.__setattr__(self, "retry_on", _dotted_names(self.retry_on))

    @property
    def retry_names(self) -> tuple[str, ...] | None:
        """Dotted names of the errors after which a call runs again; `None` is lost workers."""
        return self.retry_on  # type: ignore[return-value]  # as it was made

    @property
    def is_for_any(self) -> bool:
        """True if the call goes to the least busy pod."""
        return isinstance(self.workers, str) and self.workers == "any"

    @property
    def wire_workers(self) -> str | tuple[int | str, ...] | None:
        """`workers` as it travels."""
        if self.workers is None or isinstance(self.workers, str):
            return self.workers
        return tuple(self.workers)

    def check_ranks(self, service: str, *, is_distributed: bool) -> None:
        """Refuse impossible nodes, and options that only distributed services have."""
        if is_distributed:
            if self.workers is not None:
                _check_workers(self.workers)
            return
        workers = None if self.is_for_any else self.workers
        for name, value in (("workers", workers), ("restart_procs", self.restart_procs)):
            if value is not None and value is not False:
                raise SpecError(
                    f"{name}= belongs to distributed services, and {service} is none",
                    hint="kt.Compute(...).distribute(workers=N) makes it one, and of any service "
                    'workers="any" is the least busy pod; a function that has a parameter '
                    f"{name!r} of its own gets it",
                )

    def of_item(self, index: int) -> CallOptions:
        """These options, for one of many calls that are made together."""
        if self.idempotency_key is None:
            return self
        return replace(self, idempotency_key=f"{self.idempotency_key}/{index}")

    def with_changes(self, changes: Mapping[str, Any]) -> CallOptions:
        for name in changes:
            if name not in _NAMES and name not in (PDB, METRICS):
                meant = did_you_mean(name, _NAMES, likeness=0.6)
                options = f"the options are {', '.join(sorted(_NAMES))}"
                raise TypeError(f"there is no call option {name!r}\nhint: {meant or options}")
        _warn_of_metrics(changes.get(METRICS))
        option_changes = {name: changes[name] for name in changes if name in _NAMES}
        if changes.get(PDB) not in (None, False) and option_changes.get("debug") is None:
            option_changes["debug"] = _debug_of_pdb(changes[PDB])
        return replace(self, **option_changes)

    def take_from(
        self, kwargs: Mapping[str, Any], declared: frozenset[str]
    ) -> tuple[CallOptions, dict[str, Any]]:
        """Options and the user's own keywords, out of the keywords of a call."""
        if RESERVED.isdisjoint(kwargs):
            return self, kwargs if isinstance(kwargs, dict) else dict(kwargs)
        option_kwargs = {
            name: kwargs[name] for name in RESERVED if name in kwargs and name not in declared
        }
        if not option_kwargs:
            return self, dict(kwargs)
        user_kwargs = {name: value for name, value in kwargs.items() if name not in option_kwargs}
        return self.with_changes(option_kwargs), user_kwargs


def _debug_of_pdb(value: object) -> object:
    """The `debug=` that a `pdb=` of earlier releases stands for."""
    parameters.warn("pdb= is an earlier name of debug=", DeprecationWarning)
    return True if value is True else breakpoints.DebugConfig(port=value)  # type: ignore[arg-type]  # it is checked there


def _warn_of_metrics(value: object) -> None:
    if value is None or value is False:
        return
    if value is not True and not isinstance(value, MetricsConfig):
        raise SpecError(
            f"stream_metrics is {value!r}; it must be True, False or a kt.MetricsConfig"
        )
    parameters.warn("stream_metrics= has no effect yet: this release streams no metrics of pods")


_NAMES = frozenset(item.name for item in fields(CallOptions))


def unknown_map_keyword(callable_name: str, keyword: str) -> SpecError:
    """The error for a keyword that a map does not have."""
    if keyword in {field.name for field in fields(CallOptions)}:
        hint = f"it is an option of calls: {callable_name}.options({keyword}=...).map(...)"
    else:
        hint = f'keywords that are the same for all calls: kwargs={{"{keyword}": ...}}'
    return SpecError(f"a map of {callable_name} has no keyword {keyword!r}", hint=hint)


def _check_workers(workers: object) -> None:
    named = [workers] if isinstance(workers, str) else workers
    wrong: object = workers
    if isinstance(named, (list, tuple, set, frozenset, range)) and named:
        wrong_nodes = [node for node in named if not _names_node(node)]
        if not wrong_nodes:
            return
        wrong = wrong_nodes[0]
    raise SpecError(
        f"Invalid worker specification: {wrong!r} in workers={workers!r}",
        hint='workers= takes "any", "ready", a part of addresses, or a list of node ranks (0 is '
        "the first pod), addresses and names of pods",
    )


def _names_node(item: object) -> bool:
    if isinstance(item, str):
        return bool(item.strip())
    return isinstance(item, int) and not isinstance(item, bool) and item >= 0


def boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise SpecError(f"{name} is {value!r}; it must be True or False")
    return value


def serialization(value: object) -> str:
    if not isinstance(value, str) or value not in CODECS:
        raise SpecError(f"serialization is {value!r}; the serializations are {', '.join(CODECS)}")
    return value


def _positive(name: str, value: object) -> None:
    _seconds(name, value, "above 0,", least=math.ulp(0.0))


def _seconds(name: str, value: object, words: str, *, least: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= wire_tuning.TIMING.longest_call_seconds:  # type: ignore[operator]  # one
        raise SpecError(
            f"{name} is {value!r}; it must be a number of seconds {words} and at most "
            f"{wire_tuning.TIMING.longest_call_seconds:.0f}"
        )


def _dotted_names(retry_on: object) -> tuple[str, ...]:
    """The dotted names of classes of exceptions, which may be given as names, too."""
    named = retry_on if isinstance(retry_on, (tuple, list, set, frozenset)) else (retry_on,)
    names: list[str] = []
    if not named:
        raise SpecError("retry_on names no class", hint="retries=0 makes no call again")
    for cls in named:
        if isinstance(cls, type) and issubclass(cls, BaseException):
            names.append(retries.dotted_name(cls))
        elif isinstance(cls, str) and "." in cls and all(cls.split(".")):
            names.append(cls)
        else:
            raise SpecError(
                f"retry_on has {introspection.shown(cls)}; it takes classes of exceptions",
                hint='retry_on=(ConnectionError,), or dotted names as in "builtins.TimeoutError"',
            )
    if sum(map(len, names)) > LIMITS.retry_on_characters:
        raise SpecError(f"retry_on names {len(names)} classes, which are too many")
    return tuple(names)


def declared_parameters(function: object) -> frozenset[str]:
    """The reserved keywords that a function declares as parameters of its own."""
    function = introspection.unwrapped(function)
    function = introspection.attribute(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return frozenset()
    code = function.__code__
    return RESERVED.intersection(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
