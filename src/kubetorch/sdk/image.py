"""`kt.Image`: the environment of a service's pods, declared step by step."""

from __future__ import annotations

import posixpath
import re
import shlex
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kubetorch.config.settings import config
from kubetorch.errors import SpecError
from kubetorch.lib import modules
from kubetorch.sdk import inpod, parameters
from kubetorch.specs import dockerfile, hints
from kubetorch.specs import image as specs
from kubetorch.specs.dockerfile import Instruction
from kubetorch.specs.image import ImageSpec, quoted_requirement

if TYPE_CHECKING:
    from typing_extensions import Self


class _ImageType(type):
    """Answers for names that `kt.Image` does not have, such as `kt.Image.from_registry`."""

    if not TYPE_CHECKING:  # to a type checker, `__getattr__` says that any name is right

        def __getattr__(cls, name: str) -> NoReturn:
            raise hints.no_attribute("kt.Image", cls, name)


class Image(metaclass=_ImageType):
    """A base image and steps on top of it. Methods add a step and return the image itself.

    A change of the steps is live: pods run what differs from what they have run, without a restart.
    Another base image replaces the pods.

    Args:
        name: A name for people. One with `/` or `:` in it is taken for `image_id`.
        image_id: Reference of the container image; by default Kubetorch's own.
        python_path: Interpreter in the container, or its folder.
        install_cmd: Command that `pip_install` uses, such as `uv pip install --system`.

    Raises:
        SpecError: A value cannot be what it is given for.

    Example:
        >>> image = Image(image_id="python:3.12-slim").pip_install(["numpy"])
    """

    def __init__(
        self,
        name: str | None = None,
        image_id: str | None = None,
        python_path: str | None = None,
        install_cmd: str | None = None,
    ) -> None:
        _check_text("name", name)
        _check_text("image_id", image_id)
        _check_text("python_path", python_path)
        _check_text("install_cmd", install_cmd)
        if name is not None and image_id is None and specs.is_reference(name):
            name, image_id = None, name
        if image_id is not None:
            specs.check_reference(image_id)
        self._spec = ImageSpec(name, image_id, python_path, install_cmd)

    @classmethod
    def from_spec(cls, spec: ImageSpec) -> Self:
        """The image that a spec describes."""
        image = cls.__new__(cls)
        image._spec = spec
        return image

    def to_spec(self) -> ImageSpec:
        """The frozen form of what was declared so far."""
        return self._spec

    if not TYPE_CHECKING:  # as the class itself has it

        def __getattr__(self, name: str) -> NoReturn:
            raise hints.no_attribute("kt.Image", self, name)

    # -------------------------------------------------------------------------------- the base

    @property
    def name(self) -> str | None:
        """The name for people."""
        return self._spec.name

    @name.setter
    def name(self, value: str | None) -> None:
        _check_text("name", value)
        self._spec = replace(self._spec, name=value)

    @property
    def image_id(self) -> str | None:
        """Reference of the container image; `None` is the default one."""
        return self._spec.image_id

    @image_id.setter
    def image_id(self, value: str | None) -> None:
        checked = None if value is None else specs.check_reference(value)
        self._spec = replace(self._spec, image_id=checked)

    @property
    def python_path(self) -> str | None:
        """Interpreter in the container, or its folder."""
        return self._spec.python_path

    @python_path.setter
    def python_path(self, value: str | None) -> None:
        _check_text("python_path", value)
        self._spec = replace(self._spec, python_path=value)

    @property
    def install_cmd(self) -> str | None:
        """Command that installs a requirement."""
        return self._spec.install_cmd

    @property
    def contents(self) -> str:
        """The whole as a Dockerfile; build it with the root folder as context."""
        return self._spec.contents(default_image=config.default_image)

    @property
    def dockerfile_command(self) -> tuple[str, ...] | str | None:
        """ENTRYPOINT and CMD of the Dockerfile that this came from, joined as Docker joins them."""
        return self._spec.command

    def from_docker(self, image_id: str) -> Self:
        """Use this container image as the base.

        Raises:
            SpecError: There is one already.
        """
        if self._spec.image_id is not None:
            raise SpecError(
                f"the image has the base {self._spec.image_id!r} already; {image_id!r} cannot "
                "replace it",
                hint="make another kt.Image()",
            )
        self._spec = replace(self._spec, image_id=specs.check_reference(image_id))
        return self

    # ------------------------------------------------------------------------------- the steps

    def _add(self, *steps: specs.Step) -> Self:
        self._spec = replace(self._spec, steps=(*self._spec.steps, *steps))
        return self

    def pip_install(self, reqs: str | Iterable[str], force: bool = False) -> Self:
        """Install requirements, in order; those without flags are resolved together.

        Args:
            reqs: Each is a fragment of a shell command, so it may carry quotes and flags:
                `"'numpy > 2.0'"`, `"torch>=2 --index-url https://…"`. Comparisons with a version,
                and markers, need no quotes.
            force: Run it, and what follows, on every deploy.

        Raises:
            SpecError: A requirement is no text, or empty.
        """
        items = parameters.texts("reqs", reqs)
        for item in items:
            if "\n" in item.strip():
                raise SpecError(
                    f"reqs has {item!r} in it, which is more than one line",
                    hint="give several requirements as a list",
                )
        return self._add(
            *(
                specs.PipStep(quoted_requirement(item), force=force, joins=number > 0)
                for number, item in enumerate(items)
            )
        )

    def run_bash(self, command: str | Iterable[str], force: bool = False) -> Self:
        """Run shell commands, in order; one that ends in `&` goes on in the background.

        Args:
            command: A command, or several.
            force: Run it, and what follows, on every deploy.

        Raises:
            SpecError: A command is no text, or empty.
        """
        items = parameters.texts("command", command)
        return self._add(*(specs.RunStep(item, force=force) for item in items))

    def set_env_vars(self, env_vars: Mapping[str, object]) -> Self:
        """Set environment variables, in order.

        Args:
            env_vars: Names and values; `$NAME` in a value is expanded on the pod, and so are
                `${NAME:-word}` and `${NAME:+word}`; names that were set before can be used. An
                unknown one stays as it is.

        Raises:
            SpecError: A name cannot be one of a variable, or a value is no text.
        """
        if not isinstance(env_vars, Mapping):
            raise SpecError(f"env_vars is {env_vars!r}; it must be a dict of names and values")
        return self._add(*(specs.check_variable(k, v) for k, v in env_vars.items()))

    def copy(
        self,
        source: str,
        dest: str | None = None,
        contents: bool = False,
        filter_options: str | None = None,
        force: bool = False,
    ) -> Self:
        """Copy a local file or folder into the pods.

        Args:
            source: Local path.
            dest: Folder that it is put into (for a folder) or path (for a file) in the pod:
                absolute, relative to the working directory, or `~/…`, which is the same; by default
                a folder or file of the source's own name in the working directory. A path that
                ends in the folder's own name is the copy itself: `copy("./configs",
                "/app/configs")` makes `/app/configs/model.yaml`.
            contents: Copy what is in the folder, not the folder itself.
            filter_options: `--include=PATTERN` and `--exclude=PATTERN`, separated by spaces.
            force: Copy on every deploy.

        Raises:
            SpecError: There is no such file or folder.
        """
        if _is_elsewhere(source):
            return self
        path = _existing(source)
        is_folder = path.is_dir()
        if contents and not is_folder:
            raise SpecError(f"contents=True copies a folder's contents; {source!r} is a file")
        target = dest if dest else ("." if is_folder else path.name)
        contents = contents or (is_folder and posixpath.basename(target.rstrip("/")) == path.name)
        return self._add(
            specs.CopyStep(
                str(path),
                target,
                contents=contents,
                filter_options=filter_options,
                force=force,
                is_folder=is_folder,
            )
        )

    def rsync(
        self,
        source: str,
        dest: str | None = None,
        contents: bool = False,
        filter_options: str | None = None,
        force: bool = False,
    ) -> Self:
        """Deprecated: `copy` does this."""
        warnings.warn("Image.rsync is deprecated; use copy", DeprecationWarning, stacklevel=2)
        return self.copy(source, dest, contents, filter_options, force)

    def sync_package(self, package: str, force: bool = False) -> Self:
        """Copy a Python package of this machine into the pods, importable there.

        Args:
            package: A path, or the name of an installed package whose source is a folder.
            force: Copy on every deploy.

        Raises:
            SpecError: There is no such folder or package.
        """
        if _is_elsewhere(package):
            return self
        path = _package_folder(package)
        step = specs.CopyStep(str(path), path.name, force=force, is_folder=True, is_package=True)
        return self._add(step)

    # ------------------------------------------------------------------------------ Dockerfiles

    @classmethod
    def from_dockerfile(
        cls,
        path: str | Path | None = None,
        name: str | None = None,
        *,
        dockerfile_path: str | Path | None = None,
    ) -> Self:
        """The image that a Dockerfile describes; paths in it are relative to its folder.

        Args:
            path: The Dockerfile.
            name: A name for people.
            dockerfile_path: The same as `path`.

        Raises:
            FileNotFoundError: There is no such file.
            SpecError: An instruction cannot be followed by a live image; file and line are named.
        """
        if path is None:
            path = dockerfile_path
        if path is None:
            raise TypeError("from_dockerfile() needs the path of a Dockerfile")
        if _is_elsewhere(path):
            return cls(name)
        path = Path(path)
        instructions = _last_stage(dockerfile.parse(path.read_text(), path=str(path)), path)
        return cls.from_spec(_DockerfileReader(path.absolute(), instructions).read(name))

    # ----------------------------------------------------------------------------- value semantics

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and self._spec == other._spec

    def __hash__(self) -> int:
        return hash(self._spec)

    def __repr__(self) -> str:
        given = {
            "name": self.name,
            "image_id": self.image_id,
            "python_path": self.python_path,
            "install_cmd": self.install_cmd,
        }
        calls: list[list[specs.Step]] = []
        for step in self._spec.steps:
            if isinstance(step, specs.PipStep) and step.joins and calls:
                calls[-1].append(step)
            else:
                calls.append([step])
        return parameters.expression("Image", given) + "".join(_call(*steps) for steps in calls)


def _call(step: specs.Step, *joining: specs.Step) -> str:
    """The method call that adds `step`."""
    forced = ", force=True" if step.force else ""
    if isinstance(step, specs.PipStep):
        pips = (step, *(one for one in joining if isinstance(one, specs.PipStep)))
        return f".pip_install({[one.requirement for one in pips]!r}{forced})"
    if isinstance(step, specs.RunStep):
        return f".run_bash({step.command!r}{forced})"
    if isinstance(step, specs.EnvStep):
        return f".set_env_vars({{{step.name!r}: {step.value!r}}})"
    if isinstance(step, specs.CopyStep):
        if step.is_package:
            return f".sync_package({step.source!r}{forced})"
        whole = ", contents=True" if step.contents else ""
        filters = f", filter_options={step.filter_options!r}" if step.filter_options else ""
        return f".copy({step.source!r}, {step.dest!r}{whole}{filters}{forced})"
    return f"  # {step.text(None)}"


def _check_text(parameter: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise SpecError(f"{parameter} is {value!r}; it must be text")


def _is_elsewhere(path: object) -> bool:
    """True if a module that a pod imports names a file of the machine that it was deployed from."""
    is_path = isinstance(path, (str, Path)) and bool(str(path))
    return is_path and inpod.is_worker() and not Path(str(path)).expanduser().exists()


def _existing(source: object) -> Path:
    if not isinstance(source, (str, Path)) or not str(source):
        raise SpecError(f"source is {source!r}; it must be a local path")
    path = Path(source).expanduser().absolute()
    if not path.exists():
        raise SpecError(f"source is {str(source)!r}; there is no file or folder {str(path)!r}")
    return path


def _package_folder(package: object) -> Path:
    if not isinstance(package, str) or not package:
        raise SpecError(f"package is {package!r}; it must be a path or the name of a package")
    if "/" in package or "~" in package:
        path = _existing(package)
        if not path.is_dir():
            raise SpecError(f"package is {package!r}; that is a file, not a folder")
        return path
    spec = modules.find_spec(package)
    locations = [] if spec is None else modules.folders_of(spec)
    if not locations:
        raise SpecError(
            f"package is {package!r}; no installed package of that name has a folder of source",
            hint="give its path, or install it with `pip install -e`",
        )
    return Path(locations[0]).absolute()


# ---------------------------------------------------------------------------------- Dockerfiles


def _last_stage(instructions: list[Instruction], path: Path) -> list[Instruction]:
    """The instructions after the last FROM, with the ARGs before the first FROM."""
    starts = [i for i, item in enumerate(instructions) if item.keyword == "FROM"]
    if not starts:
        raise SpecError(f"{path} has no FROM")
    for item in instructions[: starts[0]]:
        if item.keyword not in ("ARG", "#"):
            raise SpecError(f"{path}, line {item.line}: {item.keyword} stands before FROM")
    return instructions[: starts[0]] + instructions[starts[-1] :]


#: What does what these instructions are for.
_INSTEAD = {
    "EXPOSE": "kt.app(..., port=) and kt apply --port say where an app listens",
    "HEALTHCHECK": "kt.app(..., health_check=) and kt apply --health-check say when an app serves",
    "LABEL": "kt.Compute(labels=) labels the pods",
    "VOLUME": "kt.Compute(volumes=) keeps files beyond a pod",
}
_OF_COPY = {"chmod", "chown", "from", "link"}
_ELSEWHERE = re.compile(r"(?:https?|ftp|ssh|git)://|git@")
#: Options of a shell that can be set in one that runs.
_SETTABLE = re.compile(r"(?:-[eux]+|-[eux]*o [a-z]+)(?: (?:-[eux]+|-[eux]*o [a-z]+))*")


@dataclass
class _DockerfileReader:
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
    #: What runs the shell form of commands, if an instruction says so.
    shell: tuple[str, ...] = ()

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
            parameters.warn(f"{where}: {instruction.keyword} --{name} has no effect, since {why}")

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
            expanded = dockerfile.expand(value, self._build_only(), keep_unknown_defaults=True)
            self.variables[name] = dockerfile.expand(value, self._known())
            if name == specs.PYTHON_VARIABLE:
                self.python_path = self.variables[name]
            else:
                self.steps.append(specs.check_variable(name, expanded))

    def _run(self, instruction: Instruction) -> None:
        options, text = dockerfile.flags(instruction.text)
        self._warn_of(options, instruction, "there is no build: it runs in the pod, as the pod is")
        parsed = dockerfile.command(Instruction("RUN", text, instruction.line), path=str(self.path))
        command = _script(parsed) if isinstance(parsed, str) else shlex.join(parsed)
        force = command.endswith(specs.FORCE)
        command = command.removesuffix(specs.FORCE).rstrip()
        if self.shell and isinstance(parsed, str):
            command = _in_shell(self.shell, command)
        # ARG is a variable of the build's commands only, so it is set for this one.
        arguments = self._build_only().items()
        prefix = "".join(f"export {name}={shlex.quote(value)}; " for name, value in arguments)
        self.steps.append(specs.RunStep(prefix + command, force=force))

    def _shell(self, instruction: Instruction) -> None:
        shell = dockerfile.command(instruction, path=str(self.path))
        if isinstance(shell, str):
            raise SpecError(
                f"{self._where(instruction)}: SHELL {shell} must be a list of strings",
                hint='for example SHELL ["/bin/bash", "-o", "pipefail", "-c"]',
            )
        self.shell = shell

    def _has_no_effect(self, instruction: Instruction) -> None:
        parameters.warn(
            f"{self._where(instruction)}: {instruction.keyword} has no effect; "
            f"{_INSTEAD[instruction.keyword]}"
        )

    _expose = _label = _healthcheck = _volume = _has_no_effect

    def _copy(self, instruction: Instruction) -> None:
        options, text = dockerfile.flags(instruction.text)
        self._warn_of(
            options.keys() - _OF_COPY, instruction, "a live pod gets the files as they are"
        )
        if "from" in options:
            raise SpecError(
                f"{self._where(instruction)}: COPY --from={options['from']} takes files from "
                "another build stage, which a live image does not have",
                hint="build that image and name it: kt.Image(image_id=...)",
            )
        exec_form = text.startswith("[")
        inner = replace(instruction, text=text)
        parts = (
            list(dockerfile.command(inner, path=str(self.path)))
            if exec_form
            else dockerfile.words(text)
        )
        if len(parts) < 2:
            raise SpecError(
                f"{self._where(instruction)}: {instruction.keyword} needs a source and a "
                "destination"
            )
        *sources, dest = (dockerfile.expand(part, self._known()) for part in parts)
        found = [path for source in sources for path in self._sources(source, instruction)]
        if len(found) > 1 and not dest.endswith("/"):
            raise SpecError(
                f"{self._where(instruction)}: the destination of several sources must end in '/', "
                f"not {dest!r}"
            )
        for path in found:
            if instruction.keyword == "ADD" and _is_archive(path):
                self._add_archive(path, dest, options)
            else:
                self._add_copy(path, dest, options)

    _add = _copy

    def _sources(self, source: str, instruction: Instruction) -> list[Path]:
        if instruction.keyword == "ADD" and _ELSEWHERE.match(source):
            raise SpecError(
                f"{self._where(instruction)}: ADD {source} is no local file",
                hint=f"RUN curl -fsSL -o FILE {source}, or git clone, has the pods get it",
            )
        root = self.path.parent
        relative = source.lstrip("/")
        paths = (
            sorted(root.glob(relative)) if any(c in relative for c in "*?[") else [root / relative]
        )
        present = [path for path in paths if path.exists()]
        if not present:
            raise SpecError(
                f"{self._where(instruction)}: {instruction.keyword} {source}: there is no "
                f"{root / relative}"
            )
        return [path.absolute() for path in present]

    def _add_copy(self, path: Path, dest: str, options: dict[str, str]) -> None:
        target = self._target(dest)
        is_folder = path.is_dir()
        if not is_folder and (dest.endswith("/") or dest in (".", "..")):
            target = f"{target.rstrip('/')}/{path.name}"
        # COPY of a folder copies what is in it.
        step = specs.CopyStep(str(path), target, contents=is_folder, is_folder=is_folder)
        self.steps.append(step)
        self._change_mode(step.target, options)

    def _add_archive(self, path: Path, dest: str, options: dict[str, str]) -> None:
        """Copy an archive and unpack it where it lies, as ADD does with local ones."""
        folder = self._target(dest).rstrip("/") or "/"
        step = specs.CopyStep(str(path), f"{folder.rstrip('/')}/{path.name}")
        archive = shlex.quote(step.target)
        unpack = f"tar -xf {archive} -C {shlex.quote(folder)} && rm {archive}"
        self.steps += (step, specs.RunStep(unpack))
        self._change_mode(folder, options)

    def _target(self, dest: str) -> str:
        return dest if dest.startswith("/") or not self.workdir else f"{self.workdir}/{dest}"

    def _change_mode(self, target: str, options: dict[str, str]) -> None:
        for name in ("chown", "chmod"):
            if name in options:
                words = (name, "-R", options[name], target)
                self.steps.append(specs.RunStep(shlex.join(words)))

    def _workdir(self, instruction: Instruction) -> None:
        path = dockerfile.expand(instruction.text, self._known())
        base = "" if path.startswith("/") else f"{self.workdir}/" if self.workdir else ""
        self.workdir = f"{base}{path}".rstrip("/") or "/"
        self.steps.append(specs.WorkdirStep(self.workdir))

    def _user(self, instruction: Instruction) -> None:
        self.steps.append(specs.UserStep(dockerfile.expand(instruction.text, self._known())))

    def _entrypoint(self, instruction: Instruction) -> None:
        self.entrypoint = self._command(instruction)

    def _cmd(self, instruction: Instruction) -> None:
        self.cmd = self._command(instruction)

    def _command(self, instruction: Instruction) -> specs.Command:
        found = dockerfile.command(instruction, path=str(self.path))
        return (*self.shell, found) if self.shell and isinstance(found, str) else found


def _script(command: str) -> str:
    """The script of a shell: the content of a here-document that stands alone (`RUN <<EOF`)."""
    document = re.fullmatch(r"<<(-?)([\"']?)([^\s<\"']+)\2\n(.*)\n\t*\3", command, re.DOTALL)
    if document is None:
        return command
    is_indented, text = bool(document[1]), document[4]
    return re.sub(r"^\t+", "", text, flags=re.MULTILINE) if is_indented else text


def _in_shell(shell: tuple[str, ...], command: str) -> str:
    """A command as the shell of SHELL would run it, for the one that runs steps."""
    program, *options = shell
    flags = " ".join(options[:-1])
    is_same = program.rpartition("/")[2] in ("bash", "sh") and options[-1:] == ["-c"]
    if is_same and not flags:
        return command
    if is_same and _SETTABLE.fullmatch(flags):
        return f"set {flags}; {command}"
    return shlex.join([*shell, command])


def _is_archive(path: Path) -> bool:
    import tarfile  # noqa: PLC0415  # 4 ms, for ADD alone

    return path.is_file() and tarfile.is_tarfile(path)
