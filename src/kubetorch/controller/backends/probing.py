"""Whether pods of this machine can have paths of their own: tried in a process of its own."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile

from kubetorch.lib import deadlines, mounts

#: Seconds that the machine has to show whether it allows mount namespaces.
PROBE_TIMEOUT = 20.0


async def probe() -> str | None:
    """Why this machine allows no mount namespaces; `None` if it does."""
    folder = tempfile.mkdtemp(prefix="kubetorch-")
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", mounts.__name__, folder),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with deadlines.timeout(PROBE_TIMEOUT):
                said, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            return f"it did not answer within {PROBE_TIMEOUT:.0f} s"
        if process.returncode == 0:
            return None
        return said.decode(errors="replace").strip() or f"exit status {process.returncode}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
