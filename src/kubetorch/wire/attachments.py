"""What a pod is shown at absolute paths: the local backend writes it, the pod's agent reads it."""

from __future__ import annotations

import msgspec


class FolderAt(msgspec.Struct, frozen=True, omit_defaults=True):
    """A folder of the machine at a path of the pod.

    Attributes:
        source: The folder.
        target: Absolute path in the pod.
        read_only: Whether the pod can only read it.
    """

    source: str
    target: str
    read_only: bool = False


class FilesAt(msgspec.Struct, frozen=True, omit_defaults=True):
    """The values of a secret as files of a folder.

    Attributes:
        secret: The file that the secret is kept in, a `kubetorch.wire.secrets.SecretFile`.
        target: Absolute path in the pod.
        items: Pairs of key and file name; all keys if there are none.
    """

    secret: str
    target: str
    items: tuple[tuple[str, str], ...] = ()


class Attachments(msgspec.Struct, frozen=True, omit_defaults=True):
    """All of it."""

    folders: tuple[FolderAt, ...] = ()
    files: tuple[FilesAt, ...] = ()
