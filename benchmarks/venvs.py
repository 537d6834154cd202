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
import venv
from dataclasses import dataclass
from pathlib import Path

# 900 s: the largest of them is 300 MB to download and unpack.
INSTALL_DEADLINE = 900.0


class UnavailableError(Exception):
    """A peer cannot be had on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What a virtual environment holds.

    Attributes:
        name: A word for people who look into the cache folder.
        requirements: Arguments of `pip install`.
        stamp: Text that changes when what the requirements mean has changed.
    """

    name: str
    requirements: tuple[str, ...]
    stamp: str = ""

    def python(self) -> Path:
        """Its interpreter; installs everything at the first use.

        Raises:
            UnavailableError: It cannot be installed here.
        """
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        described = "\n".join((sys.base_prefix, version, *self.requirements, self.stamp))
        digest = hashlib.blake2b(described.encode(), digest_size=6).hexdigest()
        folder = cache_folder() / f"{self.name}-{digest}"
        if not folder.exists():
            self._build(folder)
        return folder / "bin" / "python"

    def _build(self, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = folder.with_name(f"{folder.name}.{os.getpid()}")
        print(f"installing {' '.join(self.requirements)} into {folder}", file=sys.stderr)
        try:
            venv.create(building, with_pip=True, symlinks=True)
            python = str(building / "bin" / "python")
            _install([python, "-m", "pip", "install", "--quiet", *self.requirements])
            building.rename(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)


def cache_folder() -> Path:
    """Where the environments are kept: `$XDG_CACHE_HOME/kubetorch-benchmarks`."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "kubetorch-benchmarks"


def _install(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_DEADLINE)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"not installed within {INSTALL_DEADLINE:.0f} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["pip failed"]
        raise UnavailableError(lines[-1])
