"""What JAX and Monarch get in a rank: the arguments of their clusters, the hosts of a service."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from kubetorch.errors import SpecError
from kubetorch.wire import introspection

#: Set in each rank of a service that is distributed as jax.
JAX_PROCESS = "JAX_PROCESS_ID"
_JAX = "jax.distributed"
#: The addresses of the hosts, in the order of the pods, separated by commas.
MONARCH_HOSTS = "KT_MONARCH_HOSTS"
_MESH = "host_mesh"
#: The name of the parameter while Monarch had process allocators.
_FORMER_PARAMETER = "allocator"


class MonarchHosts:
    """Gives the hosts to the callable, as the parameter `host_mesh`.

    On pods other than the first they are `None`.
    """

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
                self._mesh = _attach(os.environ[MONARCH_HOSTS].split(","))
            return self._mesh


def check_allocators(user_callable: Callable[..., Any]) -> None:
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


def install_jax_cluster() -> None:
    """Let `jax.distributed.initialize()` find its arguments by itself.

    Without arguments JAX asks the first of its cluster classes that says it is present; JAX lists
    each such class when it is defined. Kubetorch's class goes before those of JAX: JAX's class for
    Kubernetes would ask the API server. The class is added at once, or when user code imports JAX,
    whose import is not ours to make.

    https://docs.jax.dev/en/latest/_autosummary/jax.distributed.initialize.html
    """
    if _JAX in sys.modules:
        _define_jax_cluster()
    else:
        sys.meta_path.insert(0, _JaxFinder)


class _JaxFinder:
    """Notices the import of JAX, and finds no module."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname == _JAX:
            _define_jax_cluster()


def _define_jax_cluster() -> None:
    try:
        base: Any = importlib.import_module("jax._src.clusters").ClusterEnv
        classes: list[Any] = base._cluster_types
    except (ImportError, AttributeError):  # another version, which says itself what it lacks
        return

    class KubetorchCluster(base):  # type: ignore[misc]  # a class of JAX, which may not be here
        name = "kubetorch"

        @classmethod
        def is_env_present(cls) -> bool:
            return True

        @classmethod
        def get_coordinator_address(cls, *_: object, **__: object) -> str:
            return os.environ["JAX_COORDINATOR_ADDRESS"]

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ["JAX_NUM_PROCESSES"])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ[JAX_PROCESS])

    classes.insert(0, classes.pop(classes.index(KubetorchCluster)))
