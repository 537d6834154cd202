"""Keys of the data store at paths of pods: the frozen form of `kt.Compute(data=)`."""

from __future__ import annotations

from typing import Literal, get_args

from kubetorch.lib.frozen_values import FrozenValue

#: `ro`: files and folders without write bits; `rw`: a copy that the pod may change.
DataMode = Literal["ro", "rw"]
MODES: tuple[DataMode, ...] = get_args(DataMode)


class DataMount(FrozenValue):
    """What a key of the data store holds, at a path of each pod.

    Attributes:
        path: Absolute path in the pods.
        key: The key, or a path in the folder of a key or above keys; or the address that is pulled
            into a key.
        version: The version that the key had at the deploy, for people.
        digest: Identity of what the key held at the deploy: another one is another generation.
    """

    path: str
    key: str
    mode: DataMode = "ro"
    version: str = ""
    digest: str = ""

    @property
    def is_read_only(self) -> bool:
        return self.mode == "ro"

    def __str__(self) -> str:
        version = self.version and f"version {self.version}, "
        access = "read-only" if self.is_read_only else "writable"
        return f"{self.key} at {self.path} ({version}{access})"
