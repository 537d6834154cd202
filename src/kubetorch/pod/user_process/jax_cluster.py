"""Lets `jax.distributed.initialize()` find its arguments by itself in a rank.

Without arguments JAX asks the first of its cluster classes that says it is present; JAX lists each
such class when it is defined. Kubetorch's class goes before those of JAX: JAX's class for
Kubernetes would ask the API server.

https://docs.jax.dev/en/latest/_autosummary/jax.distributed.initialize.html
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

#: Set in each rank of a service that is distributed as jax.
PROCESS = "JAX_PROCESS_ID"
_PUBLIC = "jax.distributed"


def install() -> None:
    """Add the class, at once or when user code imports JAX, whose import is not ours to make."""
    if _PUBLIC in sys.modules:
        _define()
    else:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """Notices the import of JAX, and finds no module."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname == _PUBLIC:
            _define()


def _define() -> None:
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
            return int(os.environ[PROCESS])

    classes.insert(0, classes.pop(classes.index(KubetorchCluster)))
