"""What a key is: a path in its namespace."""

from __future__ import annotations

import re

from kubetorch.datastore.tuning import LIMITS
from kubetorch.errors import DataStoreError

#: Control characters, and those that end a line: a key is a part of lines of logs.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def canonical(key: str) -> str:
    """A key as a path below its namespace: `/a/../b//c/` is `b/c`, and `../x` is `x`.

    Empty for the root of the namespace.

    Raises:
        DataStoreError: The key cannot be a path.
    """
    names: list[str] = []
    for name in key.split("/"):
        if name == "..":
            del names[-1:]
        elif name not in ("", "."):
            names.append(name)
    path = "/".join(names)
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        raise DataStoreError(f"the key {key[:200]!r} is no valid Unicode text") from None
    if _CONTROL.search(key):
        raise DataStoreError(f"the key {key[:200]!r} has a control character")
    name_bytes = max((len(name.encode()) for name in names), default=0)
    if len(encoded) > LIMITS.key_bytes or name_bytes > LIMITS.key_name_bytes:
        raise DataStoreError(
            f"the key {key[:80]!r}… has {len(encoded):,} bytes, and a name of {name_bytes:,}",
            hint=f"{LIMITS.key_bytes:,} bytes are allowed, and {LIMITS.key_name_bytes} "
            "between two '/'",
        )
    return path


def check(key: str) -> str:
    """As `canonical`; the root of the namespace is refused."""
    path = canonical(key)
    if not path:
        raise DataStoreError(
            f"the key {key[:200]!r} is empty", hint='a key is a path, such as "models/base"'
        )
    return path
