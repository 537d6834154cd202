"""The Monarch hosts of a service, which its callable gets as the parameter `host_mesh`."""

from __future__ import annotations

import importlib
import inspect
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from kubetorch.errors import SpecError
from kubetorch.wire import introspection

#: Their addresses, in the order of the pods, separated by commas.
HOSTS = "KT_MONARCH_HOSTS"
_MESH = "host_mesh"
#: What a parameter was called while Monarch had process allocators.
_FORMER = "allocator"


class MonarchHosts:
    """Gives the hosts to the callable; on pods other than the first, `None`."""

    def __init__(self) -> None:
        self._mesh: Any = None
        self._attaching = threading.Lock()

    def give(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Put the hosts among the arguments, where the function takes them and was given none."""
        parameters = _parameters(function)
        if _MESH in parameters and _MESH not in kwargs and len(args) <= parameters.index(_MESH):
            kwargs[_MESH] = self._attached()

    def _attached(self) -> Any:  # noqa: ANN401  # Monarch's own
        """The hosts; whatever is done with them first waits for the connections."""
        with self._attaching:
            if self._mesh is None and os.environ["RANK"] == "0":
                self._mesh = _attach(os.environ[HOSTS].split(","))
            return self._mesh


def check(found: Callable[..., Any]) -> None:
    """Refuse a function, or a class with a method, that takes what Monarch has not any more."""
    functions = [found]
    if isinstance(found, type):
        names = (name for name in dir(found) if not name.startswith("_"))
        functions += filter(callable, (introspection.attribute(found, name) for name in names))
    for function in functions:
        if _FORMER in _parameters(function):
            raise SpecError(
                f"{introspection.attribute(function, '__qualname__')} has a parameter {_FORMER!r}, "
                "and Monarch has no process allocators any more",
                hint=f"a parameter {_MESH!r} gets the hosts, whose spawn_procs() starts processes "
                "on them",
            )


def _parameters(function: Callable[..., Any]) -> Sequence[str]:
    # Some callables in C have no signature, and the user's may raise anything.
    return introspection.attempt(lambda: list(inspect.signature(function).parameters), [])


def _attach(addresses: Sequence[str]) -> Any:  # noqa: ANN401  # Monarch's own
    actor = importlib.import_module("monarch.actor")
    # The hosts answer at the address of this pod, whose name they may not know.
    own = urlsplit(addresses[0])
    actor.enable_transport(own._replace(netloc=own.netloc.rpartition(":")[0] + ":0").geturl())
    return actor.attach_to_workers(ca="trust_all_connections", workers=list(addresses))
