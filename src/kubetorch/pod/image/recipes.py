"""What can be told of an image's steps without running any. Pure.

Requirements that lead a list of steps make the same environment wherever they are installed, so it
is made once and shared (`shared_steps`). A command may do anything to the pod that it runs in:
with the first one an environment becomes the pod's own.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Mapping

from kubetorch.datastore.blobs import digest_of
from kubetorch.specs.image import (
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
#: What a shell would make something of.
_QUOTED = re.compile(r"'[^']*'|\"[^\"$`\\\\]*\"")
_SHELL = re.compile(r"[$`;|&<>()\n]")
#: Options whose value is a local path.
_PATH_OPTIONS = frozenset(
    {
        *("-c", "--constraint", "--constraints", "-e", "--editable", "-f", "--find-links"),
        *("--override", "--overrides", "--prefix", "--python", "-r", "--requirement"),
        *("--requirements", "--root", "-t", "--target"),
    }
)
#: What stands before a command and is none.
_PREFIXES = frozenset(
    {"sudo", "env", "exec", "nohup", "time", "command", "then", "do", "else", "!"}
)


def needs_environment(step: Step) -> bool:
    """Whether a step runs with an environment to install into."""
    return isinstance(step, (PipStep, RunStep))


def needs_view(step: Step, image: ImageSpec) -> bool:
    """Whether a step may write at any path, so that the pod needs a view of its own."""
    if isinstance(step, RunStep) or (isinstance(step, PipStep) and image.install_cmd):
        return True
    if isinstance(step, CopyStep):
        return _is_outside(step.target)
    return isinstance(step, WorkdirStep) and _is_outside(step.path)


def _is_outside(path: str) -> bool:
    """Whether a path leads out of the working directory."""
    return posixpath.normpath(path).split("/")[0] in ("", "..")


def shared_steps(image: ImageSpec) -> int:
    """How many leading steps make the same environment in every pod."""
    for number, step in enumerate(image.steps):
        if isinstance(step, RunStep) or step.force:
            return number
        if isinstance(step, PipStep) and (image.install_cmd or not _is_plain(step.requirement)):
            return number
    return len(image.steps)


def _is_plain(requirement: str) -> bool:
    """Whether a requirement means the same in every pod."""
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


def digest(above: str, requirement: str, variables: Mapping[str, str]) -> str:
    """Identity of the environment `above` with one more requirement.

    Args:
        above: Identity of what it is installed into.
        requirement: As a `PipStep` has it.
        variables: What the installer finds in its environment.
    """
    relevant = {name: value for name, value in variables.items() if name.startswith(_INSTALLER)}
    # Where it keeps its downloads makes no difference.
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
