"""The pod's own view of the file system: made when a step first needs it, gone with the agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

from kubetorch.errors import ResourceNotAvailableError
from kubetorch.lib import deadlines, processes, spawning, views
from kubetorch.lib.commands import Output
from kubetorch.lib.views import View

#: Seconds that a view may take to be made.
TIMEOUT = 10.0


class PodView:
    """Holds the view.

    What the pod writes in it outlives the process that holds it: the next one takes it up.

    Args:
        view: What it consists of.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._pid: int | None = None
        self._keep = -1
        self._making = asyncio.Lock()

    async def command(self, folder: str) -> tuple[str, ...]:
        """What runs the program that follows in the view.

        Args:
            folder: The working directory there.

        Raises:
            ResourceNotAvailableError: The machine does not allow it.
        """
        async with self._making:
            if self._pid is None:
                await self._make()
        assert self._pid is not None
        return views.join_command(self._pid, folder)

    def close(self) -> None:
        """Let it go; processes in it keep it until they end."""
        if self._keep >= 0:
            os.close(self._keep)
            self._keep = -1

    async def _make(self) -> None:
        if sys.platform != "linux":
            raise _refusal("it needs namespaces of mounts, which only Linux has")
        theirs, keep = os.pipe()
        output, their_output = os.pipe()
        os.set_inheritable(keep, False)
        said: asyncio.Queue[str] = asyncio.Queue()
        reader = Output(output, said.put_nowait)
        try:
            pid = spawning.spawn(
                (sys.executable, *views.hold_command(self._view)),
                os.environ,
                stdin=theirs,
                output=their_output,
                errors=their_output,
            )
        except OSError as error:
            os.close(keep)
            reader.close()
            raise _refusal(str(error)) from error
        finally:
            os.close(theirs)
            os.close(their_output)
        try:
            async with deadlines.timeout(TIMEOUT):
                answer = await said.get()
        except TimeoutError:
            answer = f"it took more than {TIMEOUT:.0f} s"
        finally:
            reader.close()
        if answer != views.READY:
            os.close(keep)
            with contextlib.suppress(OSError):
                os.kill(pid, 9)
            processes.reap(pid)
            raise _refusal(answer)
        self._pid, self._keep = pid, keep
        processes.ExitWatch(pid, self._ended)

    def _ended(self) -> None:
        """It is gone: the next step makes another one."""
        if self._pid is not None:
            processes.exit_status(self._pid)
        self._pid = None
        self.close()


def _refusal(reason: str) -> ResourceNotAvailableError:
    return ResourceNotAvailableError(
        "the image has steps that may write anywhere (run_bash, or a copy to an absolute path), "
        f"and this machine allows no view of its files that would be the pod's own: {reason}",
        hint="use pip_install, set_env_vars and copies to relative paths, or run it on a cluster",
    )
