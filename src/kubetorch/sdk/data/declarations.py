"""What `kt.Compute(data=)` takes: keys of the data store and addresses, by paths of pods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kubetorch.datastore import addresses, keys
from kubetorch.errors import DataStoreError, SpecError, did_you_mean
from kubetorch.specs.data import MODES, DataMode, DataMount
from kubetorch.specs.volume import check_mount_path
from kubetorch.wire import introspection

#: A hint of errors about them.
EXAMPLE = 'for example kt.Compute(data={"/models": "models/base"})'


@dataclass(frozen=True)
class Data:
    """A key of the data store that pods have at a path, for `kt.Compute(data=)`.

    Args:
        key: The key, or a path in the folder of a key or above keys; or an address such as
            `"s3://bucket/folder"`, which each deploy pulls with the secrets of the compute.
        mode: `"ro"`: files and folders have no write bits; `"rw"`: each pod may change its copy,
            which changes nothing in the data store.

    Raises:
        SpecError: There can be no such key, or there is no such mode.

    Example:
        >>> kt.Compute(data={"/data": kt.Data("datasets/x", mode="rw")})
    """

    key: str
    mode: DataMode = "ro"

    def __post_init__(self) -> None:
        if not isinstance(self.key, str):
            raise SpecError(
                f"key is {introspection.shown(self.key)}; it must be a key of the data store",
                hint='for example kt.Data("datasets/x", mode="rw")',
            )
        _check_key(self.key)
        if self.mode not in MODES:
            raise SpecError(
                f'mode is {self.mode!r}; it can be "ro" or "rw"',
                hint=did_you_mean(str(self.mode), MODES, likeness=0.5),
            )

    def __repr__(self) -> str:
        mode = "" if self.mode == "ro" else f", mode={self.mode!r}"
        return f"Data({self.key!r}{mode})"


def _check_key(key: str) -> str:
    """A key in its canonical form, or an address."""
    try:
        return str(addresses.parse(key)) if addresses.is_address(key) else keys.check(key)
    except DataStoreError as error:
        raise SpecError(f"data is {key!r}: {error.message}", hint=error.hint) from error


def parse(value: object) -> tuple[DataMount, ...]:
    """The mounts that a user declares, in the order of their paths."""
    if not isinstance(value, Mapping):
        raise SpecError(
            f"data is {introspection.shown(value)}; it must be a dictionary of keys by path",
            hint=EXAMPLE,
        )
    mounts: dict[str, DataMount] = {}
    for user_path, content in value.items():
        path = check_mount_path(user_path, parameter="the path of data")
        if path in mounts:
            raise SpecError(f"data has the path {path!r} twice", hint="a path has one key")
        if not isinstance(content, (str, Data)):
            raise SpecError(
                f"data[{user_path!r}] is {introspection.shown(content)}; it must be a key of the "
                "data store, or kt.Data(key, mode=...)",
                hint=EXAMPLE,
            )
        declared_data = Data(content) if isinstance(content, str) else content
        mounts[path] = DataMount(path, _check_key(declared_data.key), declared_data.mode)
    paths = sorted(mounts)
    for path in paths:
        inside = next((other for other in paths if other.startswith(f"{path}/")), None)
        if inside is not None:
            raise SpecError(
                f"data has {path!r} and {inside!r}, which lies in it",
                hint="a key whose folder has the other one's files is one path",
            )
    return tuple(mounts[path] for path in paths)


def declared(mounts: Iterable[DataMount]) -> dict[str, str | Data]:
    """Mounts as users declare them."""
    return {
        mount.path: mount.key if mount.is_read_only else Data(mount.key, mount.mode)
        for mount in mounts
    }
