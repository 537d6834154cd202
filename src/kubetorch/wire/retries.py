"""The errors after which a call runs again, and the pauses before that.

Classes travel as dotted names: each end looks them up among the modules that it has loaded. The
worker compares exceptions of the user's code; agent and client compare errors of Kubetorch.

The module imports only the standard library: workers use it, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kubetorch import errors
from kubetorch.wire import introspection
from kubetorch.wire.values import find_class

#: After these errors, which are losses of worker, pod or connection, a call without named classes
#: runs again.
LOSSES = (errors.WorkerDiedError, errors.PodTerminatedError, errors.CallLostError)
#: After these errors a call runs again only if it names the very class, and not a base of it.
FINAL = (
    errors.CallCancelledError,
    errors.CallRefusedError,
    errors.CallTimeoutError,
    errors.SerializationError,
)


def dotted_name(cls: type[BaseException]) -> str:
    """The dotted name by which the other end finds a class."""
    return f"{introspection.module_of(cls)}.{introspection.qualname_of(cls)}"


def repeats(
    cls: type[BaseException], names: Sequence[str] | None, modules: Mapping[str, str]
) -> bool:
    """True if a call that names these classes runs again after an exception of this class.

    `modules` maps the other end's names of modules to names in this process.
    """
    if names is None:
        return issubclass(cls, LOSSES)
    bases: tuple[type, ...] = FINAL if issubclass(cls, FINAL) else (BaseException,)
    return any(
        introspection.safely(issubclass, False, named, bases)
        and introspection.safely(issubclass, False, cls, named)
        for name in names
        for named in _find_classes(name, modules)
    )


def _find_classes(name: str, modules: Mapping[str, str]) -> Iterator[type]:
    """The classes of a dotted name, for each dot at which its module may end."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module, qualname = ".".join(parts[:end]), ".".join(parts[end:])
        own_class = errors.EXCEPTION_REGISTRY.get(qualname) if module == "kubetorch" else None
        cls = own_class or find_class(module, qualname, modules)
        if cls is not None:
            yield cls


def pause(attempts: int, backoff: float, max_backoff: float) -> float:
    """Seconds between the attempt of this number, counted from 1, and the next one."""
    return float(min(backoff * 2.0 ** min(attempts - 1, 60), max_backoff))
