"""How many files and connections this process may have open."""

from __future__ import annotations

import contextlib
import resource

#: What a server with many clients asks for.
MANY = 65536


def limit() -> int:
    """Files and connections that the process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MANY if soft == resource.RLIM_INFINITY else soft


def raise_limit(wanted: int = MANY) -> None:
    """Allow the process so many, or as many as it may allow itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS has a lower limit that it does not tell.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
