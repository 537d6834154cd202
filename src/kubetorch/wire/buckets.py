"""Messages about buckets: what is pulled from them, or pushed to them, and how far it is."""

from __future__ import annotations

from typing import Any

import msgspec

from kubetorch.wire.data import KeyView, PutKey
from kubetorch.wire.secrets import Silent


class PullBucket(Silent, frozen=True, kw_only=True, omit_defaults=True):
    """Let the key of an address hold what is there now.

    Attributes:
        address: `s3://bucket/prefix` and others, see `kubetorch.datastore.addresses`.
        options: Credentials by variable; none for what everybody may read.
    """

    address: str
    options: dict[str, str] = msgspec.field(default_factory=dict)


class PushBucket(Silent, frozen=True, kw_only=True, omit_defaults=True):
    """Write what a manifest names to a bucket, then let the key of the address hold it.

    Attributes:
        put: The manifest, which was uploaded with its blobs; its key is that of the address.
    """

    address: str
    put: PutKey
    options: dict[str, str] = msgspec.field(default_factory=dict)


class BucketJob(Silent, frozen=True, kw_only=True, omit_defaults=True):
    """The work of a program that talks to a bucket, on its standard input.

    Attributes:
        folder: The store of blobs that gets, or has, the content.
        limit_bytes, owner, hint: The room of that store.
        manifest: To push; or what the key holds, of which objects that did not change are kept.
        is_push: Whether objects are written, not read.
        networks: The networks that may be reached though they are not public; `None`: the program
            runs where its user's code does, with the user's identity, and may reach all.
    """

    address: str
    folder: str
    options: dict[str, str] = msgspec.field(default_factory=dict)
    limit_bytes: int | None = None
    owner: str = ""
    hint: str = ""
    manifest: str = ""
    is_push: bool = False
    networks: tuple[str, ...] | None = ()


class BucketProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the answer; the last one has the key, or the failure.

    Attributes:
        size, files: All bytes and objects.
        done: Bytes that are where they belong.
        moved: Bytes that came from the bucket, or went there.
        manifest: Of the program's last line: what the key is to hold.
        failure: `kubetorch.wire.exceptions.Failure` as a dictionary.
    """

    size: int = 0
    files: int = 0
    done: int = 0
    moved: int = 0
    manifest: str = ""
    key: KeyView | None = None
    failure: dict[str, Any] | None = None
