"""Which errors make a call run again, and after which pauses.

Classes travel as dotted names: each end looks them up among the modules that it has loaded. The
worker compares what the user's code raises, agent and client compare errors of Kubetorch itself.

The standard library alone: workers use this, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kubetorch import errors
from kubetorch.wire import introspection
from kubetorch.wire.values import find_class

#: After these a call runs again if nobody names others: its worker, pod or connection was lost.
LOSSES = (errors.WorkerDiedError, errors.PodTerminatedError, errors.CallLostError)
#: After these it runs again only if they are named themselves, and not one of their bases.
FINAL = (
    errors.CallCancelledError,
    errors.CallRefusedError,
    errors.CallTimeoutError,
    errors.SerializationError,
)


def dotted_name(cls: type[BaseException]) -> str:
    """The name by which the other end finds a class."""
    return f"{introspection.module_of(cls)}.{introspection.qualname_of(cls)}"


def repeats(
    cls: type[BaseException], names: Sequence[str] | None, modules: Mapping[str, str]
) -> bool:
    """True if an exception of this class makes a call run again that names these classes.

    `modules` has the names of modules that are others here.
    """
    if names is None:
        return issubclass(cls, LOSSES)
    bases: tuple[type, ...] = FINAL if issubclass(cls, FINAL) else (BaseException,)
    return any(
        introspection.safely(issubclass, False, named, bases)
        and introspection.safely(issubclass, False, cls, named)
        for name in names
        for named in _find(name, modules)
    )


def _find(name: str, modules: Mapping[str, str]) -> Iterator[type]:
    """The classes of a dotted name: where its module ends, the name does not say."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module, qualname = ".".join(parts[:end]), ".".join(parts[end:])
        own = errors.EXCEPTION_REGISTRY.get(qualname) if module == "kubetorch" else None
        cls = own or find_class(module, qualname, modules)
        if cls is not None:
            yield cls


def pause(attempts: int, backoff: float, max_backoff: float) -> float:
    """Seconds between the attempt of this number, counted from 1, and the next one."""
    return float(min(backoff * 2.0 ** min(attempts - 1, 60), max_backoff))
