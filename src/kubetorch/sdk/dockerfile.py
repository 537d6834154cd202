"""A Dockerfile as the spec of an image that live pods can follow."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kubetorch.errors import SpecError
from kubetorch.sdk import advice
from kubetorch.specs import dockerfile
from kubetorch.specs import image as specs
from kubetorch.specs.dockerfile import Instruction


def load(path: Path, *, name: str | None) -> specs.ImageSpec:
    """The image that the Dockerfile at `path` describes.

    Raises:
        FileNotFoundError: There is no such file.
        SpecError: It says what a live image cannot follow; file and line are named.
    """
    text = path.read_text()
    reader = _Reader(path.absolute(), _last_stage(dockerfile.parse(text, path=str(path)), path))
    return reader.read(name)


def _last_stage(instructions: list[Instruction], path: Path) -> list[Instruction]:
    """What stands after the last FROM, with the ARGs before the first one."""
    starts = [i for i, item in enumerate(instructions) if item.keyword == "FROM"]
    if not starts:
        raise SpecError(f"{path} has no FROM")
    for item in instructions[: starts[0]]:
        if item.keyword not in ("ARG", "#"):
            raise SpecError(f"{path}, line {item.line}: {item.keyword} stands before FROM")
    return instructions[: starts[0]] + instructions[starts[-1] :]


@dataclass
class _Reader:
    path: Path
    instructions: list[Instruction]
    #: Of the ARGs those before FROM, and those of the stage.
    defaults: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    steps: list[specs.Step] = field(default_factory=list)
    image_id: str | None = None
    python_path: str | None = None
    entrypoint: specs.Command = None
    cmd: specs.Command = None
    workdir: str = ""

    def read(self, name: str | None) -> specs.ImageSpec:
        for instruction in self.instructions:
            if instruction.keyword != "#":
                getattr(self, f"_{instruction.keyword.lower()}")(instruction)
        return specs.ImageSpec(
            name=name,
            image_id=self.image_id,
            python_path=self.python_path,
            steps=tuple(self.steps),
            entrypoint=self.entrypoint,
            cmd=self.cmd,
        )

    def _where(self, instruction: Instruction) -> str:
        return f"{self.path}, line {instruction.line}"

    def _known(self) -> dict[str, str]:
        return {**self.arguments, **self.variables}

    def _build_only(self) -> dict[str, str]:
        """The ARGs that no ENV is put before."""
        return {k: v for k, v in self.arguments.items() if k not in self.variables}

    def _from(self, instruction: Instruction) -> None:
        options, rest = dockerfile.flags(instruction.text)
        self._warn_of(options, instruction, "nodes decide what platform pods have")
        reference = dockerfile.expand(rest.split()[0], self._known())
        self.image_id = specs.check_reference(reference)
        self.defaults, self.arguments = self.arguments, {}

    def _warn_of(self, options: Iterable[str], instruction: Instruction, why: str) -> None:
        for name in options:
            where = self._where(instruction)
            advice.warn(f"{where}: {instruction.keyword} --{name} has no effect, since {why}")

    def _arg(self, instruction: Instruction) -> None:
        for word in dockerfile.words(instruction.text):
            name, equals, value = word.partition("=")
            if equals:
                self.arguments[name] = dockerfile.expand(value, self._known())
            elif name in self.defaults:
                self.arguments[name] = self.defaults[name]
            elif name not in self.arguments:
                raise SpecError(
                    f"{self._where(instruction)}: ARG {name} has no default, and there is no "
                    "build to give it a value",
                    hint=f"write ARG {name}=value",
                )

    def _env(self, instruction: Instruction) -> None:
        for name, value in dockerfile.assignments(instruction, path=str(self.path)):
            # The rest is expanded on the pod, which knows the variables of the base too.
            expanded = dockerfile.expand(value, self._build_only(), later=True)
            self.variables[name] = dockerfile.expand(value, self._known())
            if name == specs.PYTHON_VARIABLE:
                self.python_path = self.variables[name]
            else:
                self.steps.append(specs.check_variable(name, expanded))

    def _run(self, instruction: Instruction) -> None:
        options, text = dockerfile.flags(instruction.text)
        self._warn_of(options, instruction, "there is no build: it runs in the pod, as the pod is")
        parsed = dockerfile.command(Instruction("RUN", text, instruction.line), path=str(self.path))
        command = _script(parsed) if isinstance(parsed, str) else " ".join(map(_quote, parsed))
        force = command.endswith(specs.FORCE)
        command = command.removesuffix(specs.FORCE).rstrip()
        # ARG is a variable of the build's commands only, so it is set for this one.
        arguments = self._build_only().items()
        prefix = "".join(f"export {name}={_quote(value)}; " for name, value in arguments)
        self.steps.append(specs.RunStep(prefix + command, force=force))

    def _copy(self, instruction: Instruction) -> None:
        options, text = dockerfile.flags(instruction.text)
        if "from" in options:
            raise SpecError(
                f"{self._where(instruction)}: COPY --from={options['from']} takes files from "
                "another build stage, which a live image does not have",
                hint="build that image and name it: kt.Image(image_id=...)",
            )
        exec_form = text.startswith("[")
        parts = (
            list(
                dockerfile.command(Instruction("COPY", text, instruction.line), path=str(self.path))
            )
            if exec_form
            else dockerfile.words(text)
        )
        if len(parts) < 2:
            raise SpecError(f"{self._where(instruction)}: COPY needs a source and a destination")
        *sources, dest = (dockerfile.expand(part, self._known()) for part in parts)
        found = [path for source in sources for path in self._sources(source, instruction)]
        if len(found) > 1 and not dest.endswith("/"):
            raise SpecError(
                f"{self._where(instruction)}: the destination of several sources must end in '/', "
                f"not {dest!r}"
            )
        for path in found:
            self._add_copy(path, dest, options)

    def _sources(self, source: str, instruction: Instruction) -> list[Path]:
        root = self.path.parent
        relative = source.lstrip("/")
        paths = (
            sorted(root.glob(relative)) if any(c in relative for c in "*?[") else [root / relative]
        )
        present = [path for path in paths if path.exists()]
        if not present:
            raise SpecError(
                f"{self._where(instruction)}: COPY {source}: there is no {root / relative}"
            )
        return [path.absolute() for path in present]

    def _add_copy(self, path: Path, dest: str, options: dict[str, str]) -> None:
        target = dest if dest.startswith("/") or not self.workdir else f"{self.workdir}/{dest}"
        is_folder = path.is_dir()
        if not is_folder and (dest.endswith("/") or dest in (".", "..")):
            target = f"{target.rstrip('/')}/{path.name}"
        # COPY of a folder copies what is in it.
        step = specs.CopyStep(str(path), target, contents=is_folder, is_folder=is_folder)
        self.steps.append(step)
        where = _quote(step.target)
        if "chown" in options:
            self.steps.append(specs.RunStep(f"chown -R {_quote(options['chown'])} {where}"))
        if "chmod" in options:
            self.steps.append(specs.RunStep(f"chmod -R {_quote(options['chmod'])} {where}"))

    def _workdir(self, instruction: Instruction) -> None:
        path = dockerfile.expand(instruction.text, self._known())
        base = "" if path.startswith("/") else f"{self.workdir}/" if self.workdir else ""
        self.workdir = f"{base}{path}".rstrip("/") or "/"
        self.steps.append(specs.WorkdirStep(self.workdir))

    def _user(self, instruction: Instruction) -> None:
        self.steps.append(specs.UserStep(dockerfile.expand(instruction.text, self._known())))

    def _entrypoint(self, instruction: Instruction) -> None:
        self.entrypoint = dockerfile.command(instruction, path=str(self.path))

    def _cmd(self, instruction: Instruction) -> None:
        self.cmd = dockerfile.command(instruction, path=str(self.path))


def _quote(text: str) -> str:
    import shlex  # noqa: PLC0415  # only Dockerfiles need it

    return shlex.quote(text)


def _script(command: str) -> str:
    """What a shell is to run: of a here-document alone (`RUN <<EOF`), what is in it."""
    document = re.fullmatch(r"<<(-?)([\"']?)([^\s<\"']+)\2\n(.*)\n\t*\3", command, re.DOTALL)
    if document is None:
        return command
    is_indented, text = bool(document[1]), document[4]
    return re.sub(r"^\t+", "", text, flags=re.MULTILINE) if is_indented else text
