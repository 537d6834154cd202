"""Running the commands of steps: in the pod's environment, with their output told as it comes."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from kubetorch.errors import ImageStepError
from kubetorch.lib import commands
from kubetorch.lib.records import record
from kubetorch.pod.image import recipes
from kubetorch.specs.image import INSTALL_VARIABLE, Step

#: Lines of a step's output that its error shows.
SHOWN_LINES = 30
#: Runs commands.
SHELL = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"
#: A progress bar is of no use in a log.
QUIET = {"UV_NO_PROGRESS": "1", "NO_COLOR": "1", "PIP_PROGRESS_BAR": "off"}
#: Says whether a command that goes on in the background fails at once.
_BACKGROUND = "{command} &\njob=$!; sleep 0.5; kill -0 $job 2>/dev/null || wait $job"


class Progress(Protocol):
    """Told how far the steps are."""

    def on_step(self, message: str, *, warning: bool = False) -> None:
        """A step begins, or is not run."""

    def on_output(self, text: str) -> None:
        """A step wrote a line."""


@record
class Place:
    """Where commands run.

    Attributes:
        environ: Their variables.
        folder: Their working directory.
    """

    environ: Mapping[str, str]
    folder: str


def variables(environ: Mapping[str, str], *, venv: Path, downloads: Path) -> dict[str, str]:
    """The variables of programs that use an environment.

    Args:
        environ: What they are without it.
        venv: The environment.
        downloads: Where uv keeps what it downloaded.
    """
    path = environ.get("PATH", os.defpath)
    found = {
        **environ,
        "VIRTUAL_ENV": str(venv),
        "PATH": f"{venv / 'bin'}{os.pathsep}{path}",
        INSTALL_VARIABLE: "uv pip install",
    }
    found.setdefault("UV_CACHE_DIR", str(downloads))
    # It would install into the machine's own interpreter.
    found.pop("UV_SYSTEM_PYTHON", None)
    return found


def background(command: str) -> str:
    """A shell command; one that ends in `&` is watched for half a second."""
    stripped = command.rstrip()
    if re.search(r"(?<!&)&$", stripped):
        return _BACKGROUND.format(command=stripped[:-1])
    return command


async def shell(step: Step, command: str, place: Place, progress: Progress) -> None:
    """Run a shell command of a step.

    Raises:
        ImageStepError: It failed.
    """
    await program(step, [SHELL, "-c", command], place, progress)


async def program(step: Step, command: list[str], place: Place, progress: Progress) -> None:
    """Run a program for a step.

    Raises:
        ImageStepError: It failed.
    """
    last: deque[str] = deque(maxlen=SHOWN_LINES)

    def on_line(text: str) -> None:
        last.append(text)
        progress.on_output(text)

    status = await commands.run(
        command, {**QUIET, **place.environ}, folder=place.folder, on_line=on_line
    )
    if status != 0:
        raise failure(step, f"ended with exit code {status}", last, exit_code=status)


def failure(
    step: Step, what: str, lines: deque[str] | None = None, *, exit_code: int | None = None
) -> ImageStepError:
    """The error for a step that failed."""
    shown = "".join(f"\n  {line}" for line in lines or ())
    error = ImageStepError(
        f"the image's step {recipes.describe(step)!r} {what}{shown and ':'}{shown}",
        hint="put the step right and deploy again; the steps before it are not run again",
    )
    error.step = recipes.describe(step)
    error.exit_code = exit_code
    return error
