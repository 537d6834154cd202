"""The source of a callable: the object, if this program has it, and where a pod imports it from.

/home/me/shop/                 the project: it has a marker, and travels
/home/me/shop/src/             the root: the entry of `sys.path`
/home/me/shop/src/ml/train.py  the module `ml.train`

`describe_runtime` adds the interpreter that this program runs in, which pods of the local backend
use too. Pods of a cluster have their own, so nothing of this machine is part of what is deployed
there: the same code from two machines is one generation.
"""

from __future__ import annotations

import contextlib
import json
import os
import site
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, cast

from kubetorch.config import environment
from kubetorch.config.settings import config
from kubetorch.datastore import ignore_rules
from kubetorch.errors import RemoteTraceback, SpecError
from kubetorch.lib import modules
from kubetorch.lib.frozen_values import FrozenValue
from kubetorch.sdk import batching, inpod
from kubetorch.sdk.calls import options
from kubetorch.specs.callable import OVERRIDABLE_METHODS, BatchedMethod, CallableKind, CallableRef
from kubetorch.specs.workload import Origin, RuntimeSpec
from kubetorch.wire import exceptions, introspection

#: Files and folders that mark the top folder of a project.
MARKERS = (".git", "setup.py", "setup.cfg", "pyproject.toml", "requirements.txt")

_INSTALLED = ("site-packages", "dist-packages")


class ProjectRef(FrozenValue):
    """The files that are sent to pods, and the module of the callable in them."""

    import_path: str
    folder: Path | None = None
    only: str | None = None
    name: str | None = None
    root: str = ""
    source_file: str | None = None
    remote_dir: str | None = None


def locate(
    file: str | None,
    module: str | None,
    *,
    sync_dir: str | Path | bool | None = None,
    remote_dir: str | None = None,
    remote_import_path: str | None = None,
) -> ProjectRef:
    if sync_dir and remote_dir:
        raise SpecError(
            f"sync_dir={str(sync_dir)!r} and remote_dir={remote_dir!r} exclude each other",
            hint="sync_dir sends code, remote_dir says where the container has it already",
        )
    if remote_import_path and not remote_dir:
        raise SpecError(f"remote_import_path={remote_import_path!r} needs a remote_dir")
    if file is None:
        if module in (None, "__main__"):
            raise SpecError("the callable has no source file, so it cannot be sent to a pod")
        assert module is not None
        return ProjectRef(remote_import_path or module, remote_dir=remote_dir)
    # Links stay as they are: one in a project may lead out of it, and is followed as it is named.
    path = Path(os.path.abspath(file))  # noqa: PTH100  # Path.resolve() would follow links
    root, import_path = pointers(path, module)
    if (
        remote_dir
        or sync_dir is False
        or (not isinstance(sync_dir, (str, Path)) and is_installed(path))
    ):
        return ProjectRef(remote_import_path or import_path, remote_dir=remote_dir or None)
    archive = archive_of(path)
    if archive is not None:
        raise SpecError(
            f"{path.name} lies in the archive {archive}, which pods cannot import a callable from",
            hint="deploy a function of a file of the project that calls it, or unpack the archive",
        )
    if isinstance(sync_dir, (str, Path)):
        return _in_folder(path, root, import_path, sync_dir)
    folder = find_project(root)
    if folder is None:
        only = path.relative_to(root).as_posix()
        return ProjectRef(import_path, folder=root, only=only, name=_name(root), source_file=only)
    return _whole_project(folder, path, root, import_path)


def archive_of(path: Path) -> Path | None:
    """The archive that a file lies in, such as one of `python -m zipapp`."""
    return next((parent for parent in path.parents if parent.is_file()), None)


def _missing_file(file: str) -> SpecError:
    return SpecError(
        f"{file}, which this program has loaded, has been moved or deleted since",
        hint="start the program again where its files lie now",
    )


def working_directory() -> Path:
    """The working directory of this program.

    Raises:
        SpecError: It was deleted.
    """
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise SpecError(
            "the working directory of this program has been deleted",
            hint="start the program in a folder that exists, or os.chdir(...) to one first",
        ) from None


def find_project(start: Path) -> Path | None:
    """The nearest folder, from `start` up, that has a marker; not the home folder, nor `/`."""
    home, deployed = Path.home(), project_of_pod()
    for folder in (start, *start.parents):
        if folder in (home, home.resolve(), folder.parent):
            return None
        if folder == deployed or any((folder / marker).exists() for marker in MARKERS):
            return folder
    return None


def origin_of_pod() -> Origin | None:
    """In a pod the origin of its code; elsewhere `None`."""
    origin_text = environment.origin()
    if origin_text is None:
        return None
    origin_fields = json.loads(origin_text)
    return Origin(
        origin_fields["project"],
        origin_fields["name"],
        origin_fields["callable"],
        origin_fields.get("machine", ""),
    )


def project_of_pod() -> Path | None:
    """In a pod the folder of its project, whose marker may not have travelled."""
    origin, deployed = origin_of_pod(), environment.deployed_file()
    if origin is None or deployed is None:
        return None
    # The file lies in what was sent as it does in the project.
    inner = PurePosixPath(origin.file)
    if not deployed.endswith(f"/{inner}"):
        return None
    return Path(deployed).parents[len(inner.parts) - 1]


def pointers(path: Path, module: str | None) -> tuple[Path, str]:
    """The entry of `sys.path` that a module was imported from, and its dotted name from there."""
    if module not in (None, "__main__"):
        assert module is not None
        parts = module.split(".")
        inner = path.parent if path.name == "__init__.py" else path.with_suffix("")
        if tuple(inner.parts[-len(parts) :]) == tuple(parts):
            return inner.parents[len(parts) - 1], module
    return path.parent, path.stem


def _in_folder(path: Path, root: Path, import_path: str, sync_dir: str | Path) -> ProjectRef:
    folder = Path(os.path.abspath(Path(sync_dir).expanduser()))  # noqa: PTH100  # as for the file
    if not folder.is_dir():
        raise SpecError(f"sync_dir={str(sync_dir)!r} is no folder")
    if not path.is_relative_to(folder):  # one of the two may have been given through a link
        real = folder.resolve()
        path, root, folder = (
            (path.resolve(), root.resolve(), real)
            if path.resolve().is_relative_to(real)
            else (path, root, folder)
        )
    if not path.is_relative_to(folder):
        raise SpecError(
            f"sync_dir={str(sync_dir)!r} does not have {path}, the file of the callable",
            hint=f"give a folder above it, such as sync_dir={str(path.parent)!r}",
        )
    if root.is_relative_to(folder):
        return _whole_project(folder, path, root, import_path)
    inner = path.relative_to(folder).with_suffix("")
    parts = inner.parts[:-1] if inner.name == "__init__" else inner.parts
    if not parts:
        raise SpecError(
            f"sync_dir={str(sync_dir)!r} is the package {import_path} itself, which could not be "
            "imported from there",
            hint=f"sync_dir={str(folder.parent)!r}",
        )
    return _whole_project(folder, path, folder, ".".join(parts))


def _whole_project(folder: Path, path: Path, root: Path, import_path: str) -> ProjectRef:
    inner = root.relative_to(folder).as_posix()
    return ProjectRef(
        import_path,
        folder=folder,
        name=_name(folder),
        root="" if inner == "." else inner,
        source_file=path.relative_to(folder).as_posix(),
    )


def _name(folder: Path) -> str:
    return folder.name or "project"


def is_installed(path: Path) -> bool:
    """True for a file of Python or of an installed distribution."""
    standard = Path(os.__file__).parent
    return any(part in _INSTALLED for part in path.parts) or path.is_relative_to(standard)


def explain_missing(error: BaseException, project: ProjectRef | None = None) -> None:
    """Add a reason or a hint to an error from a pod in which a module or a file is missing."""
    if isinstance(error, FileNotFoundError) and type(error.filename) is str and project is not None:
        reason = _reason_of_file(error.filename, project)
        if reason is not None:
            exceptions.add_note(error, reason)
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return
    reason = None if project is None else reason_of(error.name, project)
    folder = None if project is None or project.folder is None else project.folder / project.root
    is_own = folder is not None and _file_of(error.name, folder) is not None
    package = None if is_own else _package_of(error.name)
    if package is not None:
        image = f'kt.Image().pip_install(["{package}"])'
        reason = f"hint: kt.Compute(image={image}) installs it in the pods"
    remote = error.__cause__
    first, *rest = error.msg.splitlines() or [""]
    if isinstance(remote, RemoteTraceback):  # what it says of its own stands in the message
        remote.text = remote.text.replace(error.msg, first)
    if reason is not None:
        lines = (line for line in rest if not reason.startswith("hint: ") or "hint: " not in line)
        error.msg = "\n".join([first, *lines, reason])
        error.args = (error.msg,)


def _package_of(module: str) -> str | None:
    """The package that has to be installed for a module; `None` for modules of the user's own."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return None
    spec = modules.find_spec(top)
    if spec is None:
        return top if top == module else None
    origin = modules.origin_of(spec)
    origins = modules.folders_of(spec) if origin is None else [origin]
    if not any(is_installed(Path(origin)) for origin in origins):
        return None
    from importlib import metadata  # noqa: PLC0415  # 30 ms, for this mistake alone

    packages = metadata.packages_distributions().get(top) or [top]
    return packages[0] if len(set(packages)) == 1 else None


def reason_of(module: str, project: ProjectRef) -> str | None:
    """The reason why a module is not in a pod; `None` if this machine does not show one."""
    if project.folder is None:
        if project.remote_dir is not None:
            return f"no code was sent: with remote_dir={project.remote_dir!r} it must lie there"
        return "no code was sent: its own modules must be installed in the pods"
    root = project.folder / project.root
    local_file = _file_of(module, root)
    file = modules.file_of(sys.modules.get(module))
    is_elsewhere = file is not None and not is_installed(Path(file))
    if project.only is not None:
        if local_file is None and file is not None and is_elsewhere:
            return _explain_outside(Path(file), root)
        return _explain_single_file(project, local_file)
    if local_file is not None:
        return _explain_not_sent(PurePosixPath(project.root, local_file), project.folder) or (
            f"{local_file} is here, and was not there when the project was sent: deploy again"
        )
    if file is None or not is_elsewhere or Path(file).is_relative_to(project.folder):
        return None
    return _explain_outside(Path(file), project.folder)


def _explain_single_file(project: ProjectRef, local_file: Path | None) -> str:
    """The reason why a file beside the only file that was sent was not sent."""
    assert project.folder is not None
    root = project.folder / project.root
    omission = "" if local_file is None else f", and not {local_file}"
    markers = f"{', '.join(MARKERS[:-1])} or {MARKERS[-1]}"
    advice = f"make one of them there, or give sync_dir={str(root)!r}"
    if root.resolve() == Path.home().resolve():
        advice = "move the files into a folder of their own that has one of them"
    return (
        f"only {project.only} was sent{omission}: neither {root} nor a folder above it is a "
        f"project, which has {markers}; {advice}"
    )


def _explain_outside(file: Path, folder: Path) -> str:
    above = Path(os.path.commonpath([file.parent, folder]))
    advice = "move it into the project"
    if above not in (Path.home(), Path(above.anchor)):
        advice += f", or give sync_dir={str(above)!r}, which sends both"
    return f"{file} lies outside of the project {folder}, which was sent; {advice}"


def _reason_of_file(name: str, project: ProjectRef) -> str | None:
    """The reason why a pod lacks a file; `None` if this machine does not show one."""
    folder, local_path = project.folder, Path(os.path.abspath(name))  # noqa: PTH100  # links stay
    if folder is None:
        return None
    inner = PurePosixPath(name)
    if inner.is_absolute():  # a pod has the project in a folder of its own
        inner = PurePosixPath(name.rpartition(f"/{project.name}/")[2])
    if not inner.is_absolute() and os.path.lexists(folder / inner):
        if project.only is not None:
            return _explain_single_file(project, Path(inner))
        not_sent = _explain_not_sent(inner, folder)
        if not_sent is not None:
            return not_sent
    if not local_path.exists():
        is_in_project = not inner.is_absolute() and not os.path.lexists(folder / inner)
        return _explain_nowhere(inner, folder) if is_in_project or inner.is_absolute() else None
    if not local_path.is_relative_to(folder):
        return _explain_outside(local_path, folder)
    return (
        f"{local_path} is here; the working directory of pods is the top of the project, where it "
        f"is {local_path.relative_to(folder)}"
    )


def _explain_nowhere(path: PurePosixPath, folder: Path) -> str:
    location = "on this machine" if path.is_absolute() else f"in the project {folder}"
    return f"{path} is not {location} either"


def _explain_not_sent(path: PurePosixPath, folder: Path) -> str | None:
    """The reason why a file of the project was not sent; `None` if it was sent."""
    filter_text = environment.rsync_filters()
    filters = None if filter_text is None else ignore_rules.parse_filters(filter_text)
    rules = ignore_rules.IgnoreRules(str(folder), filters)
    above = ""
    for part in path.parts:
        inner = f"{above}/{part}" if above else part
        entry = folder / inner
        reason = rules.why_ignored(above, part, is_folder=entry.is_dir() and not entry.is_symlink())
        if reason is not None:
            shown = f"{inner}/" if entry.is_dir() else inner
            return (
                f"{path} is in {folder}, and was not sent: {reason} leaves {shown} out\n"
                f"hint: a line !{shown} in .ktignore sends it; a kt.Volume is for what is large"
            )
        if entry.is_symlink() and not rules.is_followed(above, part):
            target = os.path.realpath(entry)
            if not os.path.exists(target):  # noqa: PTH110  # a text, as the other
                return f"{inner} is a link to {target}, which is not there: links to nowhere stay"
            if not Path(target).is_relative_to(folder.resolve()):
                return (
                    f"{inner} is a link to {target}, out of the project, and was not sent\n"
                    f"hint: a line !follow {inner} in .ktignore sends what it leads to"
                )
        above = inner
    return None


def _file_of(module: str, root: Path) -> Path | None:
    """The file or folder that a module would be imported from, if it is on this machine."""
    path = root.joinpath(*module.split("."))
    source = path.with_name(f"{path.name}.py")
    if source.is_file():
        return source.relative_to(root)
    return path.relative_to(root) if path.is_dir() else None


# -------------------------------------------------------------------------------------- git


def checked_out_branch(folder: Path) -> str | None:
    """The branch of the git repository that `folder` lies in; none on a detached head."""
    for parent in (folder, *folder.parents):
        entry = parent / ".git"
        if entry.exists():
            return _branch_of(entry)
    return None


def git_folder(entry: Path) -> Path:
    """The folder that a `.git` is, or names, as in a work tree or a submodule."""
    if not entry.is_file():
        return entry
    target = entry.read_text(encoding="utf-8").partition("gitdir:")[2].strip()
    return entry.parent / target


def _branch_of(entry: Path) -> str | None:
    try:
        head = (git_folder(entry) / "HEAD").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    prefix = "ref: refs/heads/"
    return head[len(prefix) :] if head.startswith(prefix) else None


def describe_runtime(
    project: Path | None, preload: Iterable[str], *, is_local: bool
) -> RuntimeSpec:
    """The interpreter and settings of this process that the pods need."""
    if not is_local:
        return RuntimeSpec(preload=tuple(preload))
    interpreter_folders = [
        os.path.dirname(os.__file__),  # noqa: PTH120
        *site.getsitepackages(),
        site.getusersitepackages(),
    ]
    return RuntimeSpec(
        python=sys.executable or None,
        version=".".join(map(str, sys.version_info[:3])),
        path=foreign_entries(
            _further_path(),
            interpreter_folders if project is None else [*interpreter_folders, str(project)],
        ),
        preload=tuple(preload),
        site=_site(),
        package_managers=config.package_managers,
        pretends_gpus=environment.pretends_gpus(),
        environ=tuple(sorted(environment.of_machine(environment.for_programs()).items())),
        umask=_umask(),
    )


def _further_path() -> list[str]:
    """The entries of `sys.path` without the folder of the program, which Python puts first."""
    program = sys.modules.get("__main__")
    file, spec = modules.file_of(program), getattr(program, "__spec__", None)
    entries = list(sys.path)
    if file is None:
        return entries
    folder, _ = pointers(Path(os.path.realpath(file)), None if spec is None else spec.name)
    first = next((index for index, entry in enumerate(entries) if _is_folder(entry, folder)), None)
    if first is not None:
        del entries[first]
    return entries


def _is_folder(entry: str, folder: Path) -> bool:
    return bool(entry) and os.path.realpath(entry) == str(folder)


def _umask() -> int:
    """The file mode creation mask of this program."""
    with contextlib.suppress(OSError):  # elsewhere only setting another mask returns the mask
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.partition(":")[2], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _site() -> tuple[str, ...]:
    """The folders that packages of this interpreter are installed in."""
    user_folders = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return tuple(path for path in (*user_folders, *site.getsitepackages()) if os.path.isdir(path))  # noqa: PTH112


def entries_below(entries: Sequence[str], folder: Path) -> tuple[str, ...]:
    """The folders and archives among `entries` that lie below `folder`, relative to it.

    Those of a virtual environment in the folder are the interpreter's.
    """
    above = f"{os.path.realpath(folder)}{os.sep}"
    real = dict.fromkeys(os.path.realpath(entry) for entry in _texts(entries))
    below = [path for path in real if path.startswith(above) and os.path.exists(path)]  # noqa: PTH110
    interpreter_folders = {os.path.realpath(path) for path in site.getsitepackages()}
    return tuple(path[len(above) :] for path in below if path not in interpreter_folders)


def _texts(entries: Iterable[object]) -> list[str]:
    """The entries of `sys.path` that Python looks at: a `Path`, say, is none."""
    return [entry for entry in entries if isinstance(entry, str) and entry]


def foreign_entries(entries: Sequence[str], folders: Iterable[str]) -> tuple[str, ...]:
    """The folders and archives among `entries` that lie in none of the folders `own`."""
    real_folders = [os.path.realpath(folder) for folder in folders]
    existing = (os.path.realpath(entry) for entry in _texts(entries) if os.path.exists(entry))  # noqa: PTH110
    return tuple(
        path
        for path in dict.fromkeys(existing)
        if not any(path == folder or path.startswith(folder + os.sep) for folder in real_folders)
    )


#: Folder to import from, dotted module, qualified name.
Pointers = tuple[str, str, str]


CallableT = TypeVar("CallableT")


class Placement(FrozenValue):
    """The user's parameters for the files that are sent to pods; see `locate`."""

    sync_dir: str | Path | bool | None = None
    remote_dir: str | None = None
    remote_import_path: str | None = None

    def __post_init__(self) -> None:
        sync_dir: object = self.sync_dir
        if sync_dir == "" or not isinstance(sync_dir, (str, Path, bool, type(None))):
            raise SpecError(
                f"sync_dir is {sync_dir!r}; it must be the path of a folder, True or False"
            )
        for name in ("remote_dir", "remote_import_path"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise SpecError(f"{name} is {value!r}; it must be text")

    def with_changes(self, changes: Placement) -> Placement:
        """This placement, with the fields of `changes` that are set."""
        changed_fields = {name: value for name, value in vars(changes).items() if value is not None}
        return replace(self, **changed_fields)


def _members(definition: type) -> dict[str, object]:
    """The attributes of a class and its bases, by name."""
    members: dict[str, object] = {}
    for base in reversed(definition.__mro__):
        members.update(vars(base))
    return members


class Source:
    """A callable of this program, and the files that are sent to pods with it."""

    def __init__(
        self,
        kind: CallableKind,
        callable_object: Callable[..., Any] | None,
        placement: Placement,
        pointers: Pointers | None = None,
    ) -> None:
        self.kind = kind
        self.callable_object = callable_object
        self.placement = placement
        self._pointers = None if pointers is None else _checked(pointers)
        self._location: ProjectRef | None = None
        self.qualname = self._pointers[2] if self._pointers else _qualname(callable_object)
        # A module that a pod imports may name folders of the machine that it was deployed from.
        if not inpod.is_worker():
            self.locate()

    def with_placement(self, changes: Placement) -> Source:
        """The same callable with another placement of its files."""
        placement = self.placement.with_changes(changes)
        return Source(self.kind, self.callable_object, placement, self._pointers)

    def frozen(self) -> Source:
        """The same callable without files to send, for a compute with `freeze`."""
        sync_dir = self.placement.sync_dir
        if sync_dir:
            raise SpecError(
                f"sync_dir={str(sync_dir)!r} and freeze=True exclude each other",
                hint="a frozen service runs what its image has; remote_dir says where",
            )
        return self.with_placement(Placement(sync_dir=False))

    def locate(self) -> ProjectRef:
        if self._location is None:
            file, module = self.file()
            self._location = locate(file, module, **vars(self.placement))
        return self._location

    def ref(self) -> CallableRef:
        project = self.locate()
        return CallableRef(
            kind=self.kind,
            name=self.qualname,
            module=project.import_path,
            qualname=self.qualname,
            project=project.name,
            root=project.root,
            roots=self._further_roots(project),
            remote_dir=project.remote_dir,
            source_file=project.source_file,
            is_script=self.is_script,
            own_options=self._own_options(),
            batched=self._batched(),
            own_methods=self._own_methods(),
        )

    def _batched(self) -> tuple[BatchedMethod, ...]:
        """The batched methods, for handles that do not have the callable."""
        definition = self.callable_object
        members = {"": definition}
        if isinstance(definition, type):
            members = {name: introspection.attribute(definition, name) for name in dir(definition)}
        specs = ((name, batching.spec_of(member)) for name, member in members.items())
        return tuple(BatchedMethod(name, spec.max_size) for name, spec in specs if spec is not None)

    def _own_options(self) -> tuple[str, ...]:
        """Parameters with names of options of calls, for handles that do not have the callable."""
        definition = self.callable_object
        if not isinstance(definition, type):
            return tuple(sorted(options.declared_parameters(definition)))
        members = _members(definition)
        return tuple(
            f"{method}.{name}"
            for method, member in sorted(members.items())
            if method == "__call__" or not method.startswith("_")
            if callable(member) or isinstance(member, classmethod)
            for name in sorted(options.declared_parameters(member))
        )

    def _own_methods(self) -> tuple[str, ...]:
        """Methods with names of methods of handles, for handles that do not have the class."""
        definition = self.callable_object
        if not isinstance(definition, type):
            return ()
        members = _members(definition)
        methods = (name for name in OVERRIDABLE_METHODS if name in members)
        return tuple(name for name in methods if callable(getattr(definition, name)))

    def _further_roots(self, project: ProjectRef) -> tuple[str, ...]:
        is_program = environment.deployed_apps() or not inpod.is_worker()
        if project.folder is None or project.only is not None or not is_program:
            return ()
        entries = entries_below(sys.path, project.folder)
        return tuple(path for path in entries if path != project.root)

    @property
    def is_script(self) -> bool:
        """True if its module is `__main__` here."""
        return self._module_name() == "__main__"

    @property
    def is_interactive(self) -> bool:
        """True for a callable of an interpreter or a notebook, which no file has yet."""
        return self.is_script and self._main_file() is None

    def file(self) -> tuple[str | None, str | None]:
        if self._pointers is not None:
            root, module, _ = self._pointers
            return str(Path(root, *module.split(".")).with_suffix(".py")), module
        if self.is_interactive:
            return str(self.interactive_file()), None
        name = self._module_name()
        if name == "__main__":
            return self._script(), self._main_name()
        file = modules.file_of(sys.modules.get(name or ""))
        if file is not None and not os.path.exists(file) and archive_of(Path(file)) is None:  # noqa: PTH110
            raise _missing_file(file)
        return file, name

    def _module_name(self) -> str | None:
        name = introspection.attribute(self.callable_object, "__module__")
        return name if type(name) is str else None

    def _script(self) -> str | None:
        """The file of the program: where a link leads, as Python imports from there.

        `python -m` does not follow it, and a `sync_dir` may have either of the two.
        """
        file = self._main_file()
        if file is None or self._main_name() or isinstance(self.placement.sync_dir, (str, Path)):
            return file
        # Folders that are links stay: their names are those of the user.
        while os.path.islink(file):  # noqa: PTH114  # Path.resolve() would follow those, too
            file = os.path.join(os.path.dirname(file), os.readlink(file))  # noqa: PTH115, PTH118, PTH120
        return file

    def _main(self) -> Mapping[str, Any]:
        """The names of the program, which `runpy` may run beside the one that was started."""
        callable_object = self.callable_object
        for member in (
            callable_object,
            *(vars(callable_object).values() if isinstance(callable_object, type) else ()),
        ):
            function = introspection.attribute(member, "__wrapped__", member)
            names = introspection.attribute(function, "__globals__")
            if type(names) is dict and names.get("__name__") == "__main__":
                return names
        return vars(sys.modules["__main__"])

    def _main_file(self) -> str | None:
        """The file that this program runs; none in an interpreter or a notebook."""
        file = modules.path_of(self._main().get("__file__"))
        if file is None or file.endswith(".ipynb"):
            return None
        path = Path(file)
        if path.is_file() or archive_of(path) is not None:
            return file
        if path.is_absolute():
            raise _missing_file(file)
        return None

    def _main_name(self) -> str | None:
        """The dotted name that this program was started by, as with `python -m`."""
        main = self._main()
        spec = main.get("__spec__")
        if spec is None or modules.origin_of(spec) != modules.path_of(main.get("__file__")):
            return None
        return cast("str", spec.name)

    def interactive_file(self) -> Path:
        """The file that a callable of an interpreter or a notebook is written to."""
        ending = "cls" if self.kind == "cls" else "fn"
        return working_directory() / f"{self.qualname.replace('.', '_')}_{ending}.py"


def unwrapped(definition: CallableT) -> CallableT:
    """The user's own function or class, where a name stands for a handle that a decorator made."""
    while introspection.is_ours(definition) and hasattr(definition, "__wrapped__"):
        definition = definition.__wrapped__
    return definition


def _checked(pointers: object) -> Pointers:
    if isinstance(pointers, (tuple, list)) and len(pointers) == len(("root", "module", "name")):
        root, module, name = pointers
        if isinstance(root, (str, Path)) and all(isinstance(x, str) and x for x in (module, name)):
            return str(root), module, name
    raise SpecError(
        f"pointers are {pointers!r}; they must be three: the folder to import from, the dotted "
        "module, and the name in it",
        hint='for example kt.Fn("train", ("/app", "ml.train", "train"))',
    )


def _qualname(callable_object: Callable[..., Any] | None) -> str:
    name = introspection.attribute(callable_object, "__qualname__")
    if not isinstance(name, str):
        raise SpecError(
            f"{introspection.shown(callable_object)} has no name that a pod could import it by",
            hint="wrap it in a function: def run(...): return ...",
        )
    if "<lambda>" in name:
        raise SpecError("a lambda cannot be imported by a pod", hint="write it as a def")
    if "<locals>" in name:
        raise SpecError(
            f"{name} is defined inside a function, so a pod cannot import it",
            hint="move it to the top level of its file; if it is there, a decorator made it that "
            "lacks @functools.wraps(function)",
        )
    bound = introspection.attribute(callable_object, "__self__")
    if bound is not None and not isinstance(bound, (type, type(sys))):
        raise SpecError(
            f"{name} is bound to an object of this program, which a pod does not have",
            hint="deploy its class with kt.cls(...)",
        )
    return name
