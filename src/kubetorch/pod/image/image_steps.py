"""The steps of an image: what can be known of a step before it runs, and running its commands.

Requirements that lead a list of steps make the same environment wherever they are installed, so the
environment is made once and shared (`shared_steps`). A command may do anything to the pod that it
runs in: from the first command on, the environment is the pod's own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import posixpath
import re
import shlex
import shutil
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kubetorch.datastore import slots, trees
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.datastore.trees import materialise
from kubetorch.errors import ImageStepError
from kubetorch.lib import process_watch
from kubetorch.lib.process_watch import OnLine
from kubetorch.pod.transfers import Transfers
from kubetorch.pod.tuning import LIMITS
from kubetorch.specs.image import (
    INSTALL_VARIABLE,
    CopyStep,
    EnvStep,
    ImageSpec,
    PipStep,
    RunStep,
    Step,
    UserStep,
    WorkdirStep,
)

#: Programs that change the machine's own packages.
PACKAGE_MANAGERS = frozenset(
    {
        *("apk", "apt", "apt-get", "aptitude", "brew", "dnf", "dpkg", "microdnf", "pacman"),
        *("rpm", "snap", "yum", "zypper"),
    }
)
#: Variables that change what an installer does.
_INSTALLER = ("PIP_", "UV_")
#: Variables that say where an installer installs. The user alone says where packages come from
#: (indexes, links, files of settings), and which are chosen.
_LOCATIONS = frozenset(
    {
        *("PIP_PREFIX", "PIP_PYTHON", "PIP_REQUIRE_VIRTUALENV", "PIP_ROOT", "PIP_SRC"),
        *("PIP_TARGET", "PIP_USER", "PYTHONUSERBASE", "UV_PREFIX", "UV_PROJECT"),
        *("UV_PROJECT_ENVIRONMENT", "UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_TARGET"),
        *("UV_WORKING_DIR", "UV_WORKING_DIRECTORY", "VIRTUAL_ENV"),
    }
)
#: Quoted text, and characters that mean something to a shell.
_QUOTED = re.compile(r"'[^']*'|\"[^\"$`\\\\]*\"")
_SHELL = re.compile(r"[$`;|&<>()\n]")
#: Where a flag or a comment begins, outside of quotes.
_FLAG = re.compile(r"(^|\s)[-#]")
#: Options whose value is a local path.
_PATH_OPTIONS = frozenset(
    {
        *("-c", "--constraint", "--constraints", "-e", "--editable", "-f", "--find-links"),
        *("--override", "--overrides", "--prefix", "--python", "-r", "--requirement"),
        *("--requirements", "--root", "-t", "--target"),
    }
)
#: Words that may stand before a command.
_PREFIXES = frozenset(
    {"sudo", "env", "exec", "nohup", "time", "command", "then", "do", "else", "!"}
)
#: The shell that runs commands.
SHELL = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"
#: Variables that switch off progress bars and colours, which are of no use in a log.
QUIET = {"UV_NO_PROGRESS": "1", "NO_COLOR": "1", "PIP_PROGRESS_BAR": "off"}
#: Waits half a second whether a command that goes on in the background fails at once.
_WATCHED = "{command} &\njob=$!; sleep 0.5; kill -0 $job 2>/dev/null || wait $job"
#: Removes byte code: Python would take a same-size edit within one second for no edit.
_REMOVE_BYTE_CODE = (
    "find . -type d -exec sh -c 'for folder; do rm -rf \"$0/$folder/__pycache__\"; done' "
    "{target} {{}} +"
)


def needs_environment(step: Step) -> bool:
    return isinstance(step, (PipStep, RunStep))


def needs_own_paths(step: Step, image: ImageSpec) -> bool:
    """True if a step may write at any path, so that the pod needs a view of its own."""
    if isinstance(step, RunStep) or (isinstance(step, PipStep) and image.install_cmd):
        return True
    if isinstance(step, CopyStep):
        return _is_outside(step.target)
    return isinstance(step, WorkdirStep) and _is_outside(step.path)


def _is_outside(path: str) -> bool:
    """True if a path leads out of the working directory."""
    return posixpath.normpath(path).split("/")[0] in ("", "..")


def shared_steps(image: ImageSpec) -> int:
    """The number of leading steps that make the same environment in every pod."""
    for number, step in enumerate(image.steps):
        if isinstance(step, RunStep) or step.force:
            return number
        if isinstance(step, PipStep) and (image.install_cmd or not _is_plain(step.requirement)):
            return number
    return len(image.steps)


def _is_plain(requirement: str) -> bool:
    """True if a requirement means the same in every pod."""
    if _SHELL.search(_QUOTED.sub("", requirement)):
        return False
    try:
        words = shlex.split(requirement)
    except ValueError:
        return False
    return not any(_is_local(word) for word in words)


def _is_local(word: str) -> bool:
    option, _, value = word.partition("=")
    if option in _PATH_OPTIONS:
        return True
    path = value if option.startswith("-") and value else word
    is_url = "://" in path and not path.startswith("file:")
    return not is_url and ("/" in path or path.startswith((".", "~", "file:")))


def installation(steps: Sequence[Step], number: int, end: int) -> PipStep | None:
    """The requirements that one command installs at this step; `None` if a later step has them.

    Requirements without flags that were given together are resolved together. The command of a
    requirement names those before it too, so it cannot undo what they ask for.
    """
    step, following = steps[number], steps[number + 1 : end][:1]
    assert isinstance(step, PipStep)
    if not _has_no_flags(step):
        return step
    if any(
        isinstance(next_step, PipStep) and next_step.joins and _has_no_flags(next_step)
        for next_step in following
    ):
        return None
    together = [step.requirement]
    while isinstance(step, PipStep) and step.joins and number:
        number -= 1
        step = steps[number]
        if isinstance(step, PipStep) and _has_no_flags(step):
            together.insert(0, step.requirement)
    return PipStep(" ".join(together))


def _has_no_flags(step: PipStep) -> bool:
    unquoted = _QUOTED.sub("", step.requirement)
    return not (_SHELL.search(unquoted) or _FLAG.search(unquoted))


def digest(above: str, requirement: str, variables: Mapping[str, str]) -> str:
    """Identity of the environment `above` with one more requirement."""
    relevant = {
        name: value
        for name, value in variables.items()
        if name.startswith(_INSTALLER) and name not in _LOCATIONS
    }
    # The folder of an installer's downloads makes no difference.
    relevant.pop("UV_CACHE_DIR", None)
    return digest_of(json.dumps([above, requirement, sorted(relevant.items())]).encode())


def package_manager(command: str) -> str | None:
    """The system's package manager that a shell command calls; `None` if it calls none."""
    for part in re.split(r"&&|\|\||[;|&\n(){}]", command):
        for word in part.split():
            name = word.rpartition("/")[2]
            if name in PACKAGE_MANAGERS:
                return name
            if name not in _PREFIXES and "=" not in word and not word.startswith("-"):
                break
    return None


def describe(step: Step) -> str:
    """A step on one line, for people."""
    if isinstance(step, EnvStep):
        return f"ENV {step.name}"  # its value may be a secret
    if isinstance(step, UserStep):
        return f"USER {step.user}"
    text = step.text("pip install").replace("\n", " ")
    return text if len(text) <= 200 else f"{text[:200]}…"


def venv_variables(environ: Mapping[str, str], *, venv: Path, downloads: Path) -> dict[str, str]:
    """The variables of programs that use an environment."""
    path = environ.get("PATH", os.defpath)
    venv_environ = {
        **environ,
        "VIRTUAL_ENV": str(venv),
        "PATH": f"{venv / 'bin'}{os.pathsep}{path}",
        INSTALL_VARIABLE: "uv pip install",
    }
    venv_environ.setdefault("UV_CACHE_DIR", str(downloads))
    return venv_environ


def without_locations(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables without those that say where something is installed."""
    return {name: value for name, value in environ.items() if name not in _LOCATIONS}


def installer_variables(environ: Mapping[str, str], *, python: str) -> dict[str, str]:
    """The variables of a command, whose installers install into the interpreter's environment."""
    installer_environ = without_locations(environ)
    for name in environ:
        if name.startswith("CONDA_"):
            del installer_environ[name]
    venv = environ.get("VIRTUAL_ENV")
    if venv and python.startswith(f"{venv}/"):
        installer_environ["VIRTUAL_ENV"] = venv
    prefix = Path(python).resolve().parents[1]
    if (prefix / "conda-meta").is_dir():
        installer_environ["CONDA_PREFIX"] = str(prefix)
    # uv obeys UV_PYTHON even with `--system`; pip's own settings may switch PIP_USER on.
    return {**installer_environ, "UV_PYTHON": python, "PIP_USER": "0"}


def watched(command: str) -> str:
    """A shell command; one that ends in `&` is watched for half a second."""
    stripped = command.rstrip()
    if re.search(r"(?<!&)&$", stripped):
        return _WATCHED.format(command=stripped[:-1])
    return command


async def run(
    step: Step,
    command: str | Sequence[str],
    environ: Mapping[str, str],
    folder: str,
    on_line: OnLine,
) -> None:
    """Run a command of the shell, or a program, for a step."""
    last_lines: deque[str] = deque(maxlen=LIMITS.step_error_lines)

    def on_output_line(text: str) -> None:
        last_lines.append(text)
        on_line(text)

    program = [SHELL, "-c", command] if isinstance(command, str) else command
    status = await process_watch.run(
        program, {**QUIET, **environ}, folder=folder, on_line=on_output_line
    )
    if status != 0:
        raise failure(step, f"ended with exit code {status}", last_lines, exit_code=status)


def failure(
    step: Step, problem: str, lines: Iterable[str] = (), *, exit_code: int | None = None
) -> ImageStepError:
    output = "".join(f"\n  {line}" for line in lines)
    error = ImageStepError(
        f"the image's step {describe(step)!r} {problem}{output and ':'}{output}",
        hint="correct the step and deploy again; the steps before it do not run again",
    )
    if os.geteuid() and any("permission denied" in line.lower() for line in lines):
        error.hint = (
            f"the pod runs as user {os.geteuid()}, not as root: choose a path that this user can "
            "write to, such as one in the working directory, or have it in the image"
        )
    error.step = describe(step)
    error.exit_code = exit_code
    return error


class Copier:
    """Copies files and folders, several at once too."""

    def __init__(self, folder: Path, working_dir: str, store: BlobStore, blobs: Transfers) -> None:
        self._folder = folder
        self._working_dir = working_dir
        self._store = store
        self._blobs = blobs
        self._numbers = itertools.count()
        shutil.rmtree(folder, ignore_errors=True)

    def target(self, step: CopyStep) -> str:
        """Absolute path of the copy."""
        return posixpath.normpath(posixpath.join(self._working_dir, step.target))

    async def run(self, step: CopyStep, environ: Mapping[str, str], on_line: OnLine) -> None:
        if step.digest is None:
            raise failure(step, "names no files: it was not sent by a deploy")
        await self._blobs.fetch([step.digest])
        content = await asyncio.to_thread(self._store.read, step.digest)
        tree = await asyncio.to_thread(trees.decode, content)
        await self._blobs.fetch(tree.digests())
        source = self._folder / str(next(self._numbers))
        try:
            source.mkdir(parents=True)
            await asyncio.to_thread(materialise, str(source), tree, self._store.stream, {}, [])
            self._uncover(step, source)
            await run(step, self._command(step, source), environ, "/", on_line)
        finally:
            await asyncio.to_thread(shutil.rmtree, source, ignore_errors=True)

    def _uncover(self, step: CopyStep, source: Path) -> None:
        """Let files that are copied into the working directory replace the project's links."""
        folder, target = Path(self._working_dir), Path(self.target(step))
        if target.is_relative_to(folder):
            inner = target.relative_to(folder).parts
            names = inner[:1] or tuple(path.name for path in source.iterdir())
            slots.uncover(folder, self._folder.parent / "code", names)

    def entries(self, step: CopyStep) -> tuple[str, ...]:
        """The entries of `sys.path` for a copied package."""
        folder = Path(self.target(step))
        if (folder / "__init__.py").exists():
            return (str(folder.parent),)
        source = folder / "src"
        return (str(source), str(folder)) if source.is_dir() else (str(folder),)

    def _command(self, step: CopyStep, source: Path) -> str:
        target = shlex.quote(self.target(step))
        if step.is_folder:
            folder = shlex.quote(str(source))
            copy = f"mkdir -p {target} && cp -RPp {folder}/. {target}/"
            return f"{copy} && cd {folder} && {_REMOVE_BYTE_CODE.format(target=target)}"
        (file,) = source.iterdir()
        if step.target.endswith("/"):
            return f"mkdir -p {target} && cp -p {shlex.quote(str(file))} {target}/"
        above = shlex.quote(posixpath.dirname(self.target(step)))
        return f"mkdir -p {above} && cp -p {shlex.quote(str(file))} {target}"
