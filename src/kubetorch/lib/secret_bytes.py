"""Values that nothing shows by accident: no repr, no traceback with locals, no pickle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NoReturn


class SecretBytes(Mapping[str, bytes]):
    """Named bytes: their representation shows the names, and only indexing gives a value."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, bytes]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> bytes:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<hidden values of {', '.join(self._values) or 'nothing'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("hidden values are not pickled, and so not sent anywhere by accident")

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self._values.values()))
