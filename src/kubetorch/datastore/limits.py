"""How large a project may be, and what is said to whoever has a larger one."""

from __future__ import annotations

from kubetorch.errors import ProjectTooLargeError
from kubetorch.lib.records import record

_MIB = 1024 * 1024
_HINT = "list what the pods do not need in .ktignore"

#: Sizes in bytes and paths of files.
Sizes = list[tuple[int, str]]


@record
class Limits:
    """How large a project may be.

    Attributes:
        total_bytes: Above this nothing travels.
        files: The same for the number of files.
        warn_bytes: Above this a warning is given.
    """

    total_bytes: int = 512 * _MIB
    files: int = 100_000
    warn_bytes: int = 50 * _MIB


def too_large(root: str, sizes: Sizes, limits: Limits) -> ProjectTooLargeError:
    """The error for files that are too large together."""
    total = sum(size for size, _ in sizes)
    return ProjectTooLargeError(
        f"the project {root} has {_mib(total)} in {len(sizes)} files; "
        f"{_mib(limits.total_bytes)} are allowed. Its largest files:\n{_largest(sizes, 10)}",
        hint=_HINT,
    )


def too_many(root: str, sizes: Sizes, limits: Limits) -> ProjectTooLargeError:
    """The error for too many files, of which these were found before the walk ended."""
    counts: dict[str, int] = {}
    for _, path in sizes:
        top = path.partition("/")[0]
        counts[top] = counts.get(top, 0) + 1
    most = sorted(counts, key=lambda top: -counts[top])[:5]
    return ProjectTooLargeError(
        f"the project {root} has more than {limits.files} files, most of them in "
        f"{', '.join(most)}. The largest so far:\n{_largest(sizes, 10)}",
        hint=_HINT,
    )


def warning(root: str, sizes: Sizes) -> str:
    """The warning for files that are large, but allowed."""
    total = sum(size for size, _ in sizes)
    return (
        f"the project {root} has {_mib(total)}; {_HINT}. Its largest files:\n{_largest(sizes, 3)}"
    )


def _largest(sizes: Sizes, count: int) -> str:
    ordered = sorted(sizes, key=lambda item: (-item[0], item[1]))[:count]
    return "\n".join(f"  {_mib(size):>12}  {path}" for size, path in ordered)


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f} MiB"
