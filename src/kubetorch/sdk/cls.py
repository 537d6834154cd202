"""`kt.cls`: a class as a service; its instance keeps its state between calls."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, get_args, overload

from kubetorch.errors import SerializationError, SpecError
from kubetorch.sdk import inpod, parameters
from kubetorch.sdk.calls.remote import RemoteCallable
from kubetorch.sdk.deploys.source import Placement, Pointers, unwrapped
from kubetorch.sdk.module import Module
from kubetorch.specs import hints
from kubetorch.specs.callable import CALLABLES, CallableRef, OnReplace, RecordMode
from kubetorch.wire import codecs, introspection

if TYPE_CHECKING:
    from kubetorch.sdk.calls.caller import Caller
    from kubetorch.sdk.deploys.deploy import Deployment
    from kubetorch.wire.messages import WorkloadView

T = TypeVar("T")

#: Methods of the compute that a class has too, unless it defines one of that name itself.
OF_COMPUTE = ("ssh", "run_bash", "rsync")
#: The handle of a class in hints.
_CALLED = "handle"


class _UsersFirst:
    """A method of `Module` that a method of the user's class goes before."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: Cls[Any] | None, owner: type[Cls[Any]]) -> Any:  # noqa: ANN401  # one of the two
        ours = getattr(Module, self._name)
        if module is None:
            return ours
        if module._has_method(self._name):
            return Method(module, self._name)
        return ours.__get__(module, owner)


class Cls(Module[T], Generic[T]):
    """A class that is, or can be, deployed as a service; `kt.cls(...)` makes one.

    Its attributes are the methods of the class: `remote.add(2)` calls `add` in a pod. What `.to()`
    returns is this object, typed as an instance of the class, so that type checkers know the
    methods; `.options`, `.map` and `.spawn` of a method are typed on this object.

    Args:
        name: See `kt.Module`.
        pointers: See `kt.Module`.
        init_args: Arguments of the constructor, by name.
        sync_dir: See `kt.Module`.
        remote_dir: See `kt.Module`.
        remote_import_path: See `kt.Module`.
    """

    kind = "cls"
    #: Names that can be called, as a worker reported.
    _learned: frozenset[str] = frozenset()
    _on_replace: OnReplace = "warn"

    def __init__(  # the documented constructor
        self,
        name: str,
        pointers: Pointers | None = None,
        init_args: Mapping[str, Any] | None = None,
        sync_dir: str | Path | bool | None = None,
        remote_dir: str | None = None,
        remote_import_path: str | None = None,
    ) -> None:
        super().__init__(name, pointers, sync_dir, remote_dir, remote_import_path)
        self.init_args = init_args

    @property
    def init_args(self) -> dict[str, Any] | None:
        """Arguments of the constructor, as they were given; `None` if there were none."""
        return None if self._init_args is None else dict(self._init_args)

    @init_args.setter
    def init_args(self, value: Mapping[str, Any] | None) -> None:
        self._init_args = None if value is None else parameters.init_args(value)

    if not TYPE_CHECKING:  # to a type checker they are those of `Module`
        autoscale = _UsersFirst("autoscale")
        autoscale_async = _UsersFirst("autoscale_async")
        refresh_data = _UsersFirst("refresh_data")
        refresh_data_async = _UsersFirst("refresh_data_async")
        stats = _UsersFirst("stats")
        stats_async = _UsersFirst("stats_async")

    def _declared_ref(self) -> CallableRef:
        return replace(super()._declared_ref(), on_replace=self._on_replace)

    def _deployment(self, get_if_exists: bool = False, is_replacing: bool = False) -> Deployment:
        spec = None if self._compute is None else self._compute.to_spec()
        if self._on_replace == "error" and spec and (spec.is_balanced or spec.pods > 1):
            obstacle = f"it has {spec.pods} pods"
            if spec.is_balanced:
                obstacle = "it is autoscaled" if spec.autoscaling else 'its dispatch is "any"'
            raise SpecError(
                f"on_replace='error' is for a class with one instance; {self.name}: {obstacle}",
                hint="leave out autoscale(), distribute(), replicas and dispatch, or on_replace",
            )
        return super()._deployment(get_if_exists, is_replacing)

    def _accept(self, view: WorkloadView) -> None:
        if self._view is not None:
            self._learned = frozenset()
        super()._accept(view)
        if self._source is None:
            self._on_replace = view.spec.callable.on_replace
        digest = view.spec.init_args
        if digest is not None and self._init_args is None:
            namespace = view.spec.namespace
            stored = self._session().ask(lambda controller: controller.get_blob(digest, namespace))
            with contextlib.suppress(SerializationError):  # their classes may be missing here
                self._init_args = codecs.decode_arguments(json.loads(stored), "__main__")

    def _local_class(self) -> object:
        return None if self._source is None else self._source.callable_object

    def _local_member(self, name: str) -> object:
        """The member of this name of the class in this program; `None` also without a class."""
        of_class = self._local_class()
        is_defined = any(name in vars(base) for base in getattr(of_class, "__mro__", ()))
        return introspection.attribute(of_class, name) if is_defined else None

    def _has_method(self, name: str) -> bool:
        """True if the class has a method of this name, one of `OVERRIDABLE_METHODS`."""
        if callable(self._local_member(name)):
            return True
        return self._deployed_ref is not None and name in self._deployed_ref.own_methods

    def _missing(self, name: str) -> str | None:
        """The reason why no callable has that name; empty if one has it, `None` if unknown."""
        local_member = self._local_member(name)
        if callable(local_member) or name in self._learned:
            return ""
        if isinstance(local_member, property):
            return f"{self.name}.{name} is a property; give the class a method that returns it"
        if (self._source is not None and self._view is None) or inpod.is_importing():
            return None
        return self._ask_worker(name)

    def _ask_worker(self, name: str) -> str | None:
        try:
            answer = Method(self, CALLABLES).options(
                stream_logs=False, serialization=None, async_=False, timeout=30.0
            )(name)
        except Exception:  # noqa: BLE001  # a call will raise it; loading may fail by the user's code
            return None
        if isinstance(answer, list):
            answer = answer[0]  # of several pods
        if answer is None:
            return None  # where calls have no effect
        missing: str = answer["missing"]
        self._learned |= {*answer["names"], *(() if missing else (name,))}
        return missing

    def __getstate__(self) -> dict[str, Any]:
        of_class = {name for name in dir(self._local_class()) if callable(self._local_member(name))}
        return super().__getstate__() | {"_learned": self._learned | of_class}

    def __getattr__(self, name: str) -> Method:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in OF_COMPUTE and self._compute is not None and self._local_member(name) is None:
            return cast("Method", getattr(self._compute, name))
        missing = self._missing(name)
        if missing:
            # Python itself would suggest an attribute of this object behind the hint.
            raise AttributeError(self._missing_hint(name, missing), name=name, obj=None)
        return Method(self, name)

    def _missing_hint(self, name: str, missing: str) -> str:
        """The reason why no callable has that name, or a hint for a word of ours or other tools."""
        verbs = (verb for verb in vars(RemoteCallable) if not verb.startswith("_"))
        if name in verbs:
            method = "__call__" if callable(self._local_member("__call__")) else "method"
            hint: str | None = f'methods have .{name}: handle["{method}"].{name}(...)'
        else:
            hint = hints.hint("handle", name, _CALLED, self.service_name)
        if hint is None:
            return missing
        return "\n".join([*missing.splitlines()[:1], f"hint: {hint}"])

    def __getitem__(self, name: str) -> Method:
        """The method of that name, also where an attribute of this object hides it.

        Raises:
            TypeError: It is no name, as where a loop takes this object for a sequence.
        """
        if not isinstance(name, str):
            raise TypeError(f"{self!r} is no sequence; [...] takes the name of a method")
        return Method(self, name)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the user's own values
        """Call the instance itself, whose class has a `__call__`."""
        return Method(self, None)(*args, **kwargs)


class Method(RemoteCallable[..., Any]):
    """A method of a class that is a service."""

    __slots__ = ("_module", "_name")

    def __init__(self, module: Cls[Any], name: str | None) -> None:
        self._module = module
        self._name = name

    def _caller(self) -> Caller:
        module, name = self._module, self._name
        return module._callers.get(name) or module._make_caller(name)

    def __bool__(self) -> bool:
        missing = self._module._missing(self._name) if self._name else ""
        if missing is None:
            raise TypeError(
                f"whether {self._module.name} has a method {self._name!r} is not known here: "
                "its class does not say, and no pod was asked"
            )
        return not missing

    @property
    def _called(self) -> str:
        return f"{_CALLED}.{self._name}" if self._name else _CALLED

    def __repr__(self) -> str:
        return f"{self._module!r}.{self._name}"


@overload
def cls(
    class_obj: type[T],
    name: str | None = None,
    get_if_exists: bool = True,
    reload_prefixes: str | Sequence[str] | None = None,
    sync_dir: str | Path | bool | None = None,
    remote_dir: str | None = None,
    remote_import_path: str | None = None,
    prefix_username: bool | None = None,
    *,
    on_replace: OnReplace = "warn",
    options: Mapping[str, Any] | None = None,
    record: RecordMode | None = None,
) -> Cls[T]: ...
@overload
def cls(
    class_obj: None = None,
    name: str | None = None,
    get_if_exists: bool = True,
    reload_prefixes: str | Sequence[str] | None = None,
    sync_dir: str | Path | bool | None = None,
    remote_dir: str | None = None,
    remote_import_path: str | None = None,
    prefix_username: bool | None = None,
    *,
    on_replace: OnReplace = "warn",
    options: Mapping[str, Any] | None = None,
    record: RecordMode | None = None,
) -> Cls[Any]: ...
def cls(  # noqa: PLR0913  # the documented parameters
    class_obj: type[Any] | None = None,
    name: str | None = None,
    get_if_exists: bool = True,
    reload_prefixes: str | Sequence[str] | None = None,
    sync_dir: str | Path | bool | None = None,
    remote_dir: str | None = None,
    remote_import_path: str | None = None,
    prefix_username: bool | None = None,
    *,
    on_replace: OnReplace = "warn",
    options: Mapping[str, Any] | None = None,
    record: RecordMode | None = None,
) -> Cls[Any]:
    """Make a service of a class, or get the handle of one that exists.

    With a class nothing is sent anywhere until `.to(compute)`, or until the first call of one that
    was deployed before. With a name alone the service is looked up at once.

    Args:
        class_obj: The class: at the top level of a file, or of a notebook.
        name: Name of the service; that of the class if not given.
        get_if_exists: Whether a service that exists may be taken, when there is no class.
        reload_prefixes: Whose service it is: prefixes of its name, instead of one's own user name,
            the git branch, and none.
        sync_dir: Folder whose files go to the pods; `None` finds the project, `False` sends none.
        remote_dir: Folder in the container that has the code already; then none is sent.
        remote_import_path: Dotted name of the module in `remote_dir`.
        prefix_username: Whether the user name stands in front of the service's name; as
            `kt.config.prefix_username` says if not given. False finds the bare name alone.
        on_replace: What the next call of a program gets after the instance was made anew although
            nobody deployed, because its worker or pod ended: `"warn"` runs it and warns with
            `InstanceReplacedWarning`, `"error"` raises `InstanceReplacedError` instead, once. For
            classes with one pod.
        options: Options of calls of its methods, as `.options(...)` takes them.
        record: The calls that leave a record, with their arguments, for `kt replay`: `"failed"`,
            `"all"` or `"none"`; as `KT_RECORD` says, or those that fail, if not given.

    Raises:
        SpecError: There is neither a class nor a name, or a pod could not import the class.
        TypeError: It is no class.
        ServiceNotFoundError: There is no service of that name.
    """
    class_obj = unwrapped(class_obj)
    candidate: object = class_obj
    if not (candidate is None or isinstance(candidate, type)):
        hint = "; use kt.fn for a function" if callable(candidate) else ""
        raise TypeError(f"kt.cls needs a class; this is {introspection.shown(candidate)}{hint}")
    if on_replace not in get_args(OnReplace):
        raise SpecError(f"on_replace is {on_replace!r}; it must be 'warn' or 'error'")
    handle: Cls[Any] = Cls._create(
        class_obj,
        Placement(sync_dir, remote_dir, remote_import_path),
        name=name,
        get_if_exists=get_if_exists,
        reload_prefixes=reload_prefixes,
        prefix_username=prefix_username,
        call_options=options,
    )
    handle._record = None if record is None else parameters.record(record)
    if class_obj is not None:
        handle._on_replace = on_replace
    return handle
