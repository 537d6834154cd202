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

#: The addresses of the hosts, in the order of the pods, separated by commas.
HOSTS = "KT_MONARCH_HOSTS"
_MESH = "host_mesh"
#: The name of the parameter while Monarch had process allocators.
_FORMER_PARAMETER = "allocator"


class MonarchHosts:
    """Gives the hosts to the callable; on pods other than the first, `None`."""

    def __init__(self) -> None:
        self._mesh: Any = None
        self._attaching = threading.Lock()

    def give(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Add the hosts to the arguments, if the function takes them and the caller passes none."""
        parameters = _parameters(function)
        if _MESH in parameters and _MESH not in kwargs and len(args) <= parameters.index(_MESH):
            kwargs[_MESH] = self._host_mesh()

    def _host_mesh(self) -> Any:  # noqa: ANN401  # Monarch's own
        """The hosts; their first use waits for the connections."""
        with self._attaching:
            if self._mesh is None and os.environ["RANK"] == "0":
                self._mesh = _attach(os.environ[HOSTS].split(","))
            return self._mesh


def check(user_callable: Callable[..., Any]) -> None:
    """Refuse a function, or a class with a method, that takes a process allocator."""
    functions = [user_callable]
    if isinstance(user_callable, type):
        names = (name for name in dir(user_callable) if not name.startswith("_"))
        functions += filter(
            callable, (introspection.attribute(user_callable, name) for name in names)
        )
    for function in functions:
        if _FORMER_PARAMETER in _parameters(function):
            raise SpecError(
                f"{introspection.attribute(function, '__qualname__')} has a parameter "
                f"{_FORMER_PARAMETER!r}, and Monarch has no process allocators any more",
                hint=f"a parameter {_MESH!r} gets the hosts, whose spawn_procs() starts processes "
                "on them",
            )


def _parameters(function: Callable[..., Any]) -> Sequence[str]:
    # Some callables in C have no signature, and the user's may raise anything.
    return introspection.attempt(lambda: list(inspect.signature(function).parameters), [])


def _attach(addresses: Sequence[str]) -> Any:  # noqa: ANN401  # Monarch's own
    actor = importlib.import_module("monarch.actor")
    # The hosts answer to the address of this pod, since they may not know its name.
    first_host = urlsplit(addresses[0])
    actor.enable_transport(
        first_host._replace(netloc=first_host.netloc.rpartition(":")[0] + ":0").geturl()
    )
    return actor.attach_to_workers(ca="trust_all_connections", workers=list(addresses))
