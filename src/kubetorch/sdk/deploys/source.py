"""The source of a callable: the object, if this program has it, and where a pod imports it from."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from kubetorch.errors import SpecError
from kubetorch.lib.records import record
from kubetorch.sdk import inpod
from kubetorch.sdk.calls import options
from kubetorch.sdk.deploys import project, runtime
from kubetorch.sdk.deploys.project import ProjectRef
from kubetorch.specs.callable import CallableKind, CallableRef

#: Folder to import from, dotted module, qualified name.
Pointers = tuple[str, str, str]


CallableT = TypeVar("CallableT")


@record
class Placement:
    """What travels with a callable; see `kubetorch.sdk.deploys.project.locate`."""

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

    def with_given(self, other: Placement) -> Placement:
        """This one, with what the other one says."""
        given = {name: value for name, value in vars(other).items() if value is not None}
        return replace(self, **given)


class Source:
    """A callable of this program, and what of its surroundings travels.

    Args:
        kind: A function or a class.
        callable_object: The callable.
        placement: What travels.
        pointers: Where the callable is, when the object is not here.

    Attributes:
        callable_object, placement: As given.
        qualname: Qualified name of the callable.

    Raises:
        SpecError: A pod could not import it, or the placement contradicts itself.
    """

    def __init__(
        self,
        kind: CallableKind,
        callable_object: Callable[..., Any] | None,
        placement: Placement,
        pointers: Pointers | None = None,
    ) -> None:
        self._kind = kind
        self.callable_object = callable_object
        self.placement = placement
        self._pointers = None if pointers is None else _checked(pointers)
        self._location: ProjectRef | None = None
        self.qualname = self._pointers[2] if self._pointers else _qualname(callable_object)
        # A module that a pod imports may name folders of the machine that it was deployed from.
        if not inpod.is_worker():
            self.locate()

    def with_placement(self, given: Placement) -> Source:
        """The same callable, where what travels is changed by what is given.

        Raises:
            SpecError: The placement contradicts itself.
        """
        placement = self.placement.with_given(given)
        return Source(self._kind, self.callable_object, placement, self._pointers)

    def frozen(self) -> Source:
        """The same callable, of which nothing travels, for a compute with `freeze`.

        Raises:
            SpecError: A folder was named that is to travel.
        """
        sync_dir = self.placement.sync_dir
        if sync_dir:
            raise SpecError(
                f"sync_dir={str(sync_dir)!r} and freeze=True exclude each other",
                hint="a frozen service runs what its image has; remote_dir says where",
            )
        return self.with_placement(Placement(sync_dir=False))

    def locate(self) -> ProjectRef:
        """Where the callable lies.

        Raises:
            SpecError: It cannot be imported by a pod, or the settings contradict each other.
        """
        if self._location is None:
            file, module = self._module()
            self._location = project.locate(
                file,
                module,
                sync_dir=self.placement.sync_dir,
                remote_dir=self.placement.remote_dir,
                remote_import_path=self.placement.remote_import_path,
            )
        return self._location

    def ref(self) -> CallableRef:
        """Where a pod finds the callable.

        Raises:
            SpecError: It cannot be imported by a pod.
        """
        where = self.locate()
        return CallableRef(
            kind=self._kind,
            name=self.qualname,
            module=where.import_path,
            qualname=self.qualname,
            project=where.name,
            root=where.root,
            roots=self._further_roots(where),
            remote_dir=where.remote_dir,
            source_file=where.source_file,
            is_script=self.is_script,
            own_options=self._own_options(),
        )

    def _own_options(self) -> tuple[str, ...]:
        """See `CallableRef`; so that handles that are made without the callable know them."""
        found = self.callable_object
        if not isinstance(found, type):
            return tuple(sorted(options.declared_parameters(found)))
        members: dict[str, object] = {}
        for base in reversed(found.__mro__):
            members.update(vars(base))
        return tuple(
            f"{method}.{name}"
            for method, member in sorted(members.items())
            if method == "__call__" or not method.startswith("_")
            if callable(member) or isinstance(member, classmethod)
            for name in sorted(options.declared_parameters(member))
        )

    def _further_roots(self, where: ProjectRef) -> tuple[str, ...]:
        if where.folder is None or where.only is not None or inpod.is_worker():
            return ()
        found = runtime.entries_below(sys.path, where.folder)
        return tuple(path for path in found if path != where.root)

    @property
    def is_script(self) -> bool:
        """Whether its module is `__main__` here."""
        return getattr(self.callable_object, "__module__", None) == "__main__"

    @property
    def is_interactive(self) -> bool:
        """Whether it was typed into an interpreter or a notebook, so that no file has it yet."""
        return self.is_script and _main_file() is None

    def write(self) -> None:
        """Write the file of an interactively defined callable; others have one.

        Raises:
            NotebookError: Its source cannot be found.
        """
        if self.is_interactive and self.callable_object is not None:
            from kubetorch.sdk.deploys import notebook  # noqa: PLC0415  # for interactive sessions only

            notebook.write_module(self.callable_object, self._interactive_file())

    def _module(self) -> tuple[str | None, str | None]:
        """File and dotted name of the module."""
        if self._pointers is not None:
            root, module, _ = self._pointers
            return str(Path(root, *module.split(".")).with_suffix(".py")), module
        if self.is_interactive:
            return str(self._interactive_file()), None
        name = getattr(self.callable_object, "__module__", None)
        if name == "__main__":
            return self._script(), _main_name()
        return getattr(sys.modules.get(name or ""), "__file__", None), name

    def _script(self) -> str | None:
        """The file of the program: where a link leads, as Python imports from there.

        `python -m` does not follow it, and a `sync_dir` may have either of the two.
        """
        file = _main_file()
        if file is None or _main_name() or isinstance(self.placement.sync_dir, (str, Path)):
            return file
        # Folders that are links stay: their names are those of the user.
        while os.path.islink(file):  # noqa: PTH114  # Path.resolve() would follow those, too
            file = os.path.join(os.path.dirname(file), os.readlink(file))  # noqa: PTH115, PTH118, PTH120
        return file

    def _interactive_file(self) -> Path:
        ending = "cls" if self._kind == "cls" else "fn"
        return Path.cwd() / f"{self.qualname}_{ending}.py"


def unwrapped(found: CallableT) -> CallableT:
    """The user's own function or class, where a name stands for a handle that a decorator made."""
    while type(found).__module__.partition(".")[0] == "kubetorch" and hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found


def _main_file() -> str | None:
    """The file that this program runs; none in an interpreter or a notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None or file.endswith(".ipynb") or not Path(file).is_file():
        return None
    return str(file)


def _main_name() -> str | None:
    """The dotted name that this program was started by, as with `python -m`."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return spec.name if spec is not None and spec.origin == main.__file__ else None


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
    name = getattr(callable_object, "__qualname__", None)
    if not isinstance(name, str):
        raise SpecError(
            f"{callable_object!r} has no name that a pod could import it by",
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
    bound = getattr(callable_object, "__self__", None)
    if bound is not None and not isinstance(bound, (type, type(sys))):
        raise SpecError(
            f"{name} is bound to an object of this program, which a pod does not have",
            hint="deploy its class with kt.cls(...)",
        )
    return name
