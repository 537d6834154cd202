"""The environment of a pod: the frozen form of `kt.Image`, its steps and their text.

An image is a base and an ordered list of steps. Its text is a standard Dockerfile: build it with
the root folder as context, since sources of COPY are absolute. A live pod does not build an image:
it runs the steps that differ from the steps that it has run (`plan`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import field
from typing import Literal

from kubetorch.errors import SpecError
from kubetorch.lib.frozen_values import FrozenValue

#: The variable with the pod's install command; a user's `install_cmd` replaces it.
INSTALL_VARIABLE = "KT_PIP_INSTALL_CMD"
PYTHON_VARIABLE = "KT_PYTHON_PATH"
#: The install command of a build, in which no pod has chosen one.
BUILD_INSTALL_COMMAND = "python3 -m pip install"

FORCE = "# force"


class Step:
    """One step of an image: the base of the closed set `STEPS`."""

    force: bool

    def text(self, install_command: str | None) -> str:
        """The lines of the step in a Dockerfile."""
        raise NotImplementedError


class PipStep(Step, FrozenValue):
    """Install one requirement: a fragment of a shell command, so it may carry quotes and flags.

    Attributes:
        joins: True if the user listed it in one call with the requirement before it.
    """

    requirement: str
    force: bool = False
    joins: bool = field(default=False, compare=False)

    def text(self, install_command: str | None) -> str:
        return _forced(f"RUN {install_command or '$' + INSTALL_VARIABLE} {self.requirement}", self)


class RunStep(Step, FrozenValue):
    """Run a shell command; a command that ends in `&` goes on in the background."""

    command: str
    force: bool = False

    def text(self, install_command: str | None) -> str:
        if "\n" not in self.command:
            return _forced(f"RUN {self.command}", self)
        # In the shell form, a line break would end the instruction.
        line = f"RUN {json.dumps(['/bin/bash', '-c', self.command])}"
        return f"{FORCE}\n{line}" if self.force else line


class EnvStep(Step, FrozenValue):
    """Set a variable for later steps and the user's code; the pod expands `$NAME` in the value."""

    name: str
    value: str
    force: bool = False

    def text(self, install_command: str | None) -> str:
        """`ENV NAME value` if the value allows this older form, else `ENV NAME="value"`."""
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


class CopyStep(Step, FrozenValue):
    """Copy a local file or folder into the pod.

    Attributes:
        source: Absolute local path.
        dest: The destination: relative to the working directory, absolute, or `~/…`; for a folder
            the folder that it is copied into, unless `contents`.
        contents: True if the entries of the folder go to `dest` itself.
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
        """The path of the copy itself, as COPY needs it."""
        dest = self.dest.removeprefix("~/")
        if self.is_folder and not self.contents and not self.is_package:
            name = self.source.rstrip("/").rpartition("/")[2]
            return name if dest in ("", ".") else f"{dest.rstrip('/')}/{name}"
        return dest or "."

    def text(self, install_command: str | None) -> str:
        """The mark of a forced copy stands above it, since COPY may have no comment behind it."""
        paths = [self.source, self.target]
        line = " ".join(paths) if not any(" " in path for path in paths) else json.dumps(paths)
        return f"{FORCE}\nCOPY {line}" if self.force else f"COPY {line}"


class WorkdirStep(Step, FrozenValue):
    """Change the working directory of later steps and of the user's code."""

    path: str
    force: bool = False

    def text(self, install_command: str | None) -> str:
        return f"WORKDIR {self.path}"


class UserStep(Step, FrozenValue):
    """Change the user of later steps and of the user's code."""

    user: str
    force: bool = False

    def text(self, install_command: str | None) -> str:
        return f"USER {self.user}"


#: Every kind of step by the name of its first field, which identifies the kind on the wire.
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


class ImageSpec(FrozenValue):
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
        """The working directory of its last WORKDIR step; `None` without such a step."""
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


class Plan(FrozenValue):
    """The steps that a pod has to run for an image.

    Attributes:
        unchanged_count: The number of leading steps that the pod has run already.
        run: The steps to run, in order.
        reason: Why the first of them runs; `None` without steps to run.
    """

    unchanged_count: int
    run: tuple[Step, ...]
    reason: Reason | None = None


def plan(old_steps: Sequence[Step], new_steps: Sequence[Step]) -> Plan:
    """Plan to run all steps from the first difference on; the longest common prefix stays.

    A step with `force`, and all steps behind it, always run; without the last steps nothing runs.
    """
    unchanged_count = 0
    for old_step, new_step in zip(old_steps, new_steps, strict=False):
        if old_step != new_step or new_step.force:
            break
        unchanged_count += 1
    run = tuple(new_steps[unchanged_count:])
    if not run:
        return Plan(unchanged_count, run)
    reason: Reason = (
        "forced" if run[0].force else "new" if unchanged_count >= len(old_steps) else "changed"
    )
    return Plan(unchanged_count, run, reason)


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
    if not isinstance(reference, str) or not _REFERENCE.fullmatch(reference):
        raise SpecError(
            f"image_id is {reference!r}, which is no reference of a container image",
            hint='for example kt.Image(image_id="nvcr.io/nvidia/pytorch:24.08-py3")',
        )
    return reference


def check_variable(name: object, value: object) -> EnvStep:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SpecError(
            f"the environment variable {name!r} must be letters, digits and '_', and not begin "
            "with a digit"
        )
    if value is None or isinstance(value, (dict, list, set, tuple)):
        raise SpecError(f"the environment variable {name} has the value {value!r}; it must be text")
    return EnvStep(name, str(value))


_VERSION = r"[<>=!~]=?=?\s*[vV]?[\d$][\w.*+!${}\-]*"
_MARKER = r"(?:python|os|sys|platform|implementation|extra)\w*(?:(?!\s+-)[^`&|])*"
#: Quoted text, or a requirement: a shell would take its comparisons for redirections, and the `;`
#: before its marker for the end of the command.
_WORD = re.compile(
    r"(?P<quoted>'[^']*'|\"(?:\\.|[^\"\\])*\")|"
    r"(?<!\S)[A-Za-z0-9][\w.\-]*(?:\[[\w.,\- ]*\])?"
    rf"(?:\s*{_VERSION}(?:\s*,\s*{_VERSION})*)?(?:\s*;[\s(]*{_MARKER})?(?!\S)"
)


def quoted_requirement(text: str) -> str:
    """A fragment of a shell command in which requirements are quoted if they need it."""

    def marked(match: re.Match[str]) -> str:
        word = match[0]
        if match["quoted"] or not re.search("[<>;]", word):
            return word
        # In double quotes a shell expands variables, as it does without quotes.
        mark = '"' if re.search("['$]", word) else "'"
        return f"{mark}{word}{mark}"

    stripped_text = text.strip()
    is_script = re.search("[&|`;]", _WORD.sub("", stripped_text))
    return text if is_script else _WORD.sub(marked, stripped_text)
