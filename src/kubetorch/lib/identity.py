"""Which process is which: when it started, and what is in its environment.

A process id is used again; the id and the start time together are not. What a process inherited
in its environment tells where it belongs, even if its parents are gone.
"""

from __future__ import annotations

import sys
from pathlib import Path


def start_time(pid: int) -> str | None:
    """When a process started, as text to compare with; `None` if it is gone or a zombie."""
    if sys.platform != "linux":
        return _start_time_by_ps(pid)
    try:
        # The name, in parentheses, may have spaces and parentheses in it.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def processes_with(variable: str) -> dict[int, str]:
    """The value of an environment variable in each process of this user that started with it."""
    prefix = f"{variable}=".encode()
    found = {}
    for pid, environment in _environments():
        for item in environment:
            if item.startswith(prefix):
                found[pid] = item[len(prefix) :].decode(errors="replace")
                break
    return found


def _environments() -> list[tuple[int, list[bytes]]]:
    if sys.platform != "linux":
        return _environments_by_ps()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                found.append((int(folder.name), environment))
            except OSError:  # another user's, or gone
                continue
    return found


def _environments_by_ps() -> list[tuple[int, list[bytes]]]:
    # Arguments and environment on one line: what is looked for has no spaces in it.
    found = []
    for line in _output("ps", "-E", "-x", "-ww", "-o", "pid=,command=").splitlines():
        pid, _, rest = line.strip().partition(" ")
        if pid.isdigit():
            found.append((int(pid), rest.encode().split(b" ")))
    return found


def _start_time_by_ps(pid: int) -> str | None:
    state, _, started = _output("ps", "-o", "stat=,lstart=", "-p", str(pid)).strip().partition(" ")
    return None if not started or state.startswith("Z") else started.strip()


def _output(*command: str) -> str:
    import subprocess  # noqa: PLC0415  # costs 8 ms, and Linux never needs it

    run = subprocess.run(command, capture_output=True, check=False, timeout=10)
    return run.stdout.decode(errors="replace")
