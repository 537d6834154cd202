"""Virtual environments for the peers, made once and kept in a cache folder.

A folder is named by the digest of what is installed in it, so another version gets another folder.
It is built beside its final name and renamed, so a build that was interrupted is never taken for
a whole one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

# 900 s: the largest of them is 300 MB to download and unpack.
INSTALL_DEADLINE = 900.0


class UnavailableError(Exception):
    """A peer cannot be had on this machine; the message says why."""


class Environment:
    """A virtual environment.

    Args:
        name: A word for people who look into the cache folder.
        requirements: Arguments of `pip install`.
        stamp: Text that changes when what the requirements mean has changed.
    """

    def __init__(self, name: str, requirements: tuple[str, ...], stamp: str = "") -> None:
        self._name = name
        self._requirements = requirements
        self._stamp = stamp
        #: Why it cannot be had: what failed once is not tried again.
        self._reason = ""

    def python(self) -> Path:
        """Its interpreter; installs everything at the first use, once.

        Raises:
            UnavailableError: It cannot be installed here.
        """
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        described = "\n".join((sys.base_prefix, version, *self._requirements, self._stamp))
        digest = hashlib.blake2b(described.encode(), digest_size=6).hexdigest()
        folder = cache_folder() / f"{self._name}-{digest}"
        if self._reason:
            raise UnavailableError(self._reason)
        if not folder.exists():
            try:
                self._build(folder)
            except UnavailableError as error:
                self._reason = str(error)
                raise
        return folder / "bin" / "python"

    def _build(self, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = folder.with_name(f"{folder.name}.{os.getpid()}")
        print(f"installing {' '.join(self._requirements)} into {folder}", file=sys.stderr)
        try:
            _run([sys.executable, "-m", "venv", "--symlinks", str(building)])
            pip = [str(building / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
            _run([*pip, "install", "--quiet", *self._requirements])
            building.rename(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)


def cache_folder() -> Path:
    """Where the environments are kept: `$XDG_CACHE_HOME/kubetorch-benchmarks`."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "kubetorch-benchmarks"


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_DEADLINE)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"not installed within {INSTALL_DEADLINE:.0f} s") from None
    if done.returncode:
        raise UnavailableError(reason(f"{done.stdout}\n{done.stderr}"))


def reason(printed: str) -> str:
    """Why an installation failed: the last line that says so, else the last line."""
    lines = [line for line in printed.splitlines() if line.strip()] or ["it failed silently"]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines)[-1]
