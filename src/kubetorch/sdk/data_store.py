"""The data store, of which this release has the names: `kt.put`, `kt.get`, `kt.ls`, `kt.rm`."""

from __future__ import annotations

from typing import Any, NoReturn

from kubetorch.errors import DataStoreError
from kubetorch.wire import introspection


class BroadcastWindow:
    """The participants of a transfer to many pods: not in this release.

    Raises:
        DataStoreError: Always.
    """

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401  # as of then
        raise _absent("BroadcastWindow")


def put(key: str | list[str], src: Any = None, **_options: Any) -> NoReturn:  # noqa: ANN401  # as above
    """Store files or tensors under a key: not in this release.

    Raises:
        DataStoreError: Always.
    """
    raise _absent("put")


def get(key: str | list[str], dest: Any = None, **_options: Any) -> NoReturn:  # noqa: ANN401  # as above
    """Get what is stored under a key: not in this release.

    Raises:
        DataStoreError: Always.
    """
    keys = key if isinstance(key, list) else [key]
    if not all(
        isinstance(single_key, str) for single_key in keys
    ):  # as `ray.get` takes what `.remote()` gave
        raise TypeError(
            f"kt.get takes keys of the data store, not {introspection.shown(key)}\n"
            "hint: handle.get() waits for a spawned call, [each.get() for each in handles] for "
            "several"
        )
    raise _absent("get")


def ls(key: str = "", **_options: Any) -> NoReturn:  # noqa: ANN401  # as above
    """List the keys below one: not in this release.

    Raises:
        DataStoreError: Always.
    """
    raise _absent("ls")


def rm(key: str | list[str], **_options: Any) -> NoReturn:  # noqa: ANN401  # as above
    """Delete what is stored under a key: not in this release.

    Raises:
        DataStoreError: Always.
    """
    raise _absent("rm")


def _absent(name: str) -> DataStoreError:
    return DataStoreError(
        f"kt.{name} belongs to the data store, which this release does not have",
        hint="kt.Volume keeps files for pods; kt.Image().copy(...), compute.rsync(...) send them",
    )
