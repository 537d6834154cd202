"""The environment of a pod: the frozen form of `kt.Image`, its steps and their text.

An image is a base and an ordered list of steps. Its text is a standard Dockerfile: build it with
the root folder as context, since sources of COPY are absolute. A live pod does not build: it runs
those steps that differ from the ones that it has run (`plan`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kubetorch.errors import SpecError

#: Variable that holds the pod's install command; a user's `install_cmd` replaces it.
INSTALL_VARIABLE = "KT_PIP_INSTALL_CMD"
PYTHON_VARIABLE = "KT_PYTHON_PATH"
#: What a build uses where no pod has chosen an install command.
BUILD_INSTALL_COMMAND = "python3 -m pip install"

FORCE = "# force"


class Step:
    """One step of an image: the base of the closed set `STEPS`."""

    force: bool

    def text(self, install_command: str | None) -> str:
        """The lines of the step in a Dockerfile."""
        raise NotImplementedError


@dataclass(frozen=True)
class PipStep(Step):
    """Install one requirement: a fragment of a shell command, so it may carry quotes and flags.

    Attributes:
        joins: It was given together with the one before it.
    """

    requirement: str
    force: bool = False
    joins: bool = field(default=False, compare=False)

    def text(self, install_command: str | None) -> str:
        return _forced(f"RUN {install_command or '$' + INSTALL_VARIABLE} {self.requirement}", self)


@dataclass(frozen=True)
class RunStep(Step):
    """Run a shell command; one that ends in `&` goes on in the background."""

    command: str
    force: bool = False

    def text(self, install_command: str | None) -> str:
        if "\n" not in self.command:
            return _forced(f"RUN {self.command}", self)
        # In the shell form, a line break would end the instruction.
        line = f"RUN {json.dumps(['/bin/bash', '-c', self.command])}"
        return f"{FORCE}\n{line}" if self.force else line


@dataclass(frozen=True)
class EnvStep(Step):
    """Set a variable for what follows; `$NAME` in the value is expanded on the pod."""

    name: str
    value: str
    force: bool = False

    def text(self, install_command: str | None) -> str:
        """The older form where the value allows it, else quoted."""
        if "\n" in self.value:
            raise SpecError(
                f"the environment variable {self.name} is {self.value!r}; a Dockerfile cannot have "
                "a line break in a value",
                hint=f"kt.Compute(env_vars={{{self.name!r}: ...}}) sets it beside the image",
            )
        plain = re.fullmatch(r"[^\s\"'\\#]([^\n\"'\\#]*[^\s\"'\\#])?", self.value)
        if plain:
            return f"ENV {self.name} {self.value}"
        escaped = self.value.replace("\\", "\\\\").replace('"', '\\"')
        return f'ENV {self.name}="{escaped}"'


@dataclass(frozen=True)
class CopyStep(Step):
    """Copy a local file or folder into the pod.

    Attributes:
        source: Absolute local path.
        dest: Where it goes: relative to the working directory, absolute, or `~/…`; for a folder
            the folder that it is put into, unless `contents`.
        contents: What is in the folder goes to `dest` itself.
        filter_options: `--include` and `--exclude` patterns.
        force: Copy even if nothing changed.
        is_folder: Whether the source is a folder.
        is_package: The source is a Python package to be importable in the pod.
        digest: Digest of the source's tree, filled in by a deploy: an edit is a difference.
    """

    source: str
    dest: str
    contents: bool = False
    filter_options: str | None = None
    force: bool = False
    is_folder: bool = False
    is_package: bool = False
    digest: str | None = None

    @property
    def target(self) -> str:
        """Path of the copied file or folder itself, as COPY wants it."""
        dest = self.dest.removeprefix("~/")
        if self.is_folder and not self.contents and not self.is_package:
            name = self.source.rstrip("/").rpartition("/")[2]
            return name if dest in ("", ".") else f"{dest.rstrip('/')}/{name}"
        return dest or "."

    def text(self, install_command: str | None) -> str:
        """The mark of a forced copy stands above, since COPY takes no comment."""
        paths = [self.source, self.target]
        line = " ".join(paths) if not any(" " in path for path in paths) else json.dumps(paths)
        return f"{FORCE}\nCOPY {line}" if self.force else f"COPY {line}"


@dataclass(frozen=True)
class WorkdirStep(Step):
    """Change the folder that what follows runs in."""

    path: str
    force: bool = False

    def text(self, install_command: str | None) -> str:
        return f"WORKDIR {self.path}"


@dataclass(frozen=True)
class UserStep(Step):
    """Change the user that what follows runs as."""

    user: str
    force: bool = False

    def text(self, install_command: str | None) -> str:
        return f"USER {self.user}"


#: Every kind of step by the name of its first field, which tells them apart when they travel.
STEPS: dict[str, type[Step]] = {
    "requirement": PipStep,
    "command": RunStep,
    "name": EnvStep,
    "source": CopyStep,
    "path": WorkdirStep,
    "user": UserStep,
}


def _forced(line: str, step: PipStep | RunStep) -> str:
    return f"{line} {FORCE}" if step.force else line


Command = tuple[str, ...] | str | None


@dataclass(frozen=True)
class ImageSpec:
    """A base image and the steps on top of it.

    Attributes:
        name: A name for people.
        image_id: Reference of the base image; `None` is the default one.
        python_path: Interpreter, or its folder, to use in the container.
        install_cmd: Command that installs a requirement, instead of the pod's own.
        steps: In order.
        entrypoint, cmd: From a Dockerfile; used only by `kt apply`.
    """

    name: str | None = None
    image_id: str | None = None
    python_path: str | None = None
    install_cmd: str | None = None
    steps: tuple[Step, ...] = ()
    entrypoint: Command = None
    cmd: Command = None

    @property
    def workdir(self) -> str | None:
        """The folder that its last steps, and a container of it, run in, if a step says so."""
        folders = [step.path for step in self.steps if isinstance(step, WorkdirStep)]
        return folders[-1] if folders else None

    @property
    def command(self) -> Command:
        """The command of the image's containers: ENTRYPOINT and CMD, joined as in Docker."""
        entrypoint, cmd = self.entrypoint, self.cmd
        if entrypoint is None or isinstance(entrypoint, str):  # a shell has no use for arguments
            return cmd if entrypoint is None else entrypoint
        return (*entrypoint, *(("/bin/sh", "-c", cmd) if isinstance(cmd, str) else cmd or ()))

    def contents(self, *, default_image: str) -> str:
        lines = [f"FROM {self.image_id or default_image}"]
        if any(isinstance(step, PipStep) for step in self.steps) and not self.install_cmd:
            lines.append(f'ARG {INSTALL_VARIABLE}="{BUILD_INSTALL_COMMAND}"')
        if self.python_path:
            lines.append(f"ENV {PYTHON_VARIABLE} {self.python_path}")
        lines += [step.text(self.install_cmd) for step in self.steps]
        for keyword, command in (("ENTRYPOINT", self.entrypoint), ("CMD", self.cmd)):
            if command is not None:
                shown = command if isinstance(command, str) else json.dumps(list(command))
                lines.append(f"{keyword} {shown}")
        return "\n".join(lines) + "\n"


def is_reference(name: str) -> bool:
    """True if a name of an image is the reference of a container image."""
    return "/" in name or ":" in name


# ----------------------------------------------------------------------------- differential runs

Reason = Literal["new", "changed", "forced"]


@dataclass(frozen=True)
class Plan:
    """The steps between those that a pod has run and those that a spec wants.

    Attributes:
        kept: How many leading steps are as they were.
        run: The steps to run, in order.
        reason: Why the first of them runs; `None` when there are none.
    """

    kept: int
    run: tuple[Step, ...]
    reason: Reason | None = None


def plan(ran: Sequence[Step], wanted: Sequence[Step]) -> Plan:
    """The longest common prefix is kept, everything from the first difference on runs.

    A step with `force` and what follows it always runs; taking steps away at the end runs nothing.
    """
    kept = 0
    for old, new in zip(ran, wanted, strict=False):
        if old != new or new.force:
            break
        kept += 1
    run = tuple(wanted[kept:])
    if not run:
        return Plan(kept, run)
    reason: Reason = "forced" if run[0].force else "new" if kept >= len(ran) else "changed"
    return Plan(kept, run, reason)


# ------------------------------------------------------------------------------------ validation

_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
# https://github.com/distribution/reference: domain, path components, tag, digest.
_REFERENCE = re.compile(
    r"^(?:(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)"
    r"(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*(?::\d+)?/)?"
    r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"
    r"(?::[\w][\w.-]{0,127})?(?:@[A-Za-z][A-Za-z0-9]*:[0-9a-fA-F]{32,})?$"
)


def check_reference(reference: object) -> str:
    """`reference`, if a container runtime would take it."""
    if not isinstance(reference, str) or not _REFERENCE.match(reference):
        raise SpecError(
            f"image_id is {reference!r}, which is no reference of a container image",
            hint='for example kt.Image(image_id="nvcr.io/nvidia/pytorch:24.08-py3")',
        )
    return reference


def check_variable(name: object, value: object) -> EnvStep:
    if not isinstance(name, str) or not _NAME.match(name):
        raise SpecError(
            f"the environment variable {name!r} must be letters, digits and '_', and not begin "
            "with a digit"
        )
    if value is None or isinstance(value, (dict, list, set, tuple)):
        raise SpecError(f"the environment variable {name} has the value {value!r}; it must be text")
    return EnvStep(name, str(value))


_VERSION = r"[<>=!~]=?=?\s*[vV]?[\d$][\w.*+!${}\-]*"
_MARKER = r"(?:python|os|sys|platform|implementation|extra)\w*(?:(?!\s+-)[^`&|])*"
#: What is quoted already, or a requirement, whose comparisons a shell would take for redirections
#: and the `;` before its marker for the end of the command.
_WORD = re.compile(
    r"(?P<quoted>'[^']*'|\"(?:\\.|[^\"\\])*\")|"
    r"(?<!\S)[A-Za-z0-9][\w.\-]*(?:\[[\w.,\- ]*\])?"
    rf"(?:\s*{_VERSION}(?:\s*,\s*{_VERSION})*)?(?:\s*;[\s(]*{_MARKER})?(?!\S)"
)


def quoted_requirement(text: str) -> str:
    """A fragment of a shell command, with those requirements quoted that need it."""

    def marked(match: re.Match[str]) -> str:
        word = match[0]
        if match["quoted"] or not re.search("[<>;]", word):
            return word
        # In double quotes a variable is expanded, as it is without any.
        mark = '"' if re.search("['$]", word) else "'"
        return f"{mark}{word}{mark}"

    plain = text.strip()
    is_script = re.search("[&|`;]", _WORD.sub("", plain))
    return text if is_script else _WORD.sub(marked, plain)
