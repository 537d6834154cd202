"""`kt.fn`: a function as a service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from kubetorch.sdk import parameters
from kubetorch.sdk.calls.remote import RemoteCallable
from kubetorch.sdk.deploys.source import Placement, unwrapped
from kubetorch.sdk.module import Module
from kubetorch.specs.callable import RecordMode

if TYPE_CHECKING:
    from kubetorch.sdk.batching import Batched, ItemT, ResultT
    from kubetorch.sdk.calls.caller import Caller

P = ParamSpec("P")
R = TypeVar("R")
Y = TypeVar("Y")


class Fn(Module["Fn[P, R]"], RemoteCallable[P, R], Generic[P, R]):
    """A function that is, or can be, deployed as a service; `kt.fn(...)` makes one."""

    kind = "fn"

    def _caller(self) -> Caller:
        return self._callers.get(None) or self._make_caller(None)

    def local(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function here, in this process, without a service.

        Raises:
            SpecError: This is the handle of a service, whose code is not here.
            Exception: What the function raises.
        """
        if self._source is None:
            self._source = self._imported()
        function: Callable[P, R] = self.__wrapped__
        return function(*args, **kwargs)


@overload
def fn(
    function_obj: Batched[ItemT, ResultT, Any],
    name: str | None = None,
    get_if_exists: bool = True,
    reload_prefixes: str | Sequence[str] | None = None,
    sync_dir: str | Path | bool | None = None,
    remote_dir: str | None = None,
    remote_import_path: str | None = None,
    prefix_username: bool | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    record: RecordMode | None = None,
) -> Fn[[ItemT], ResultT]: ...
@overload
def fn(
    function_obj: Callable[P, Coroutine[Any, Any, R]],
    name: str | None = None,
    get_if_exists: bool = True,
    reload_prefixes: str | Sequence[str] | None = None,
    sync_dir: str | Path | bool | None = None,
    remote_dir: str | None = None,
    remote_import_path: str | None = None,
    prefix_username: bool | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    record: RecordMode | None = None,
) -> Fn[P, R]: ...
@overload
def fn(
    function_obj: Callable[P, AsyncIterator[Y]],
    name: str | None = None,
    get_if_exists: bool = True,
    reload_prefixes: str | Sequence[str] | None = None,
    sync_dir: str | Path | bool | None = None,
    remote_dir: str | None = None,
    remote_import_path: str | None = None,
    prefix_username: bool | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    record: RecordMode | None = None,
) -> Fn[P, Iterator[Y]]: ...
@overload
def fn(
    function_obj: Callable[P, R],
    name: str | None = None,
    get_if_exists: bool = True,
    reload_prefixes: str | Sequence[str] | None = None,
    sync_dir: str | Path | bool | None = None,
    remote_dir: str | None = None,
    remote_import_path: str | None = None,
    prefix_username: bool | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    record: RecordMode | None = None,
) -> Fn[P, R]: ...
@overload
def fn(
    function_obj: None = None,
    name: str | None = None,
    get_if_exists: bool = True,
    reload_prefixes: str | Sequence[str] | None = None,
    sync_dir: str | Path | bool | None = None,
    remote_dir: str | None = None,
    remote_import_path: str | None = None,
    prefix_username: bool | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    record: RecordMode | None = None,
) -> Fn[..., Any]: ...
def fn(  # noqa: PLR0913  # the documented parameters
    function_obj: Callable[..., Any] | None = None,
    name: str | None = None,
    get_if_exists: bool = True,
    reload_prefixes: str | Sequence[str] | None = None,
    sync_dir: str | Path | bool | None = None,
    remote_dir: str | None = None,
    remote_import_path: str | None = None,
    prefix_username: bool | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    record: RecordMode | None = None,
) -> Fn[..., Any]:
    """Make a service of a function, or get the handle of one that exists.

    With a function nothing is sent anywhere until `.to(compute)`, or until the first call of one
    that was deployed before. With a name alone the service is looked up at once.

    Args:
        function_obj: The function: at the top level of a file, or of a notebook.
        name: Name of the service; that of the function if not given.
        get_if_exists: Whether a service that exists may be taken, when there is no function.
        reload_prefixes: Whose service it is: prefixes of its name, instead of one's own user name,
            the git branch, and none.
        sync_dir: Folder whose files go to the pods; `None` finds the project, `False` sends none.
        remote_dir: Folder in the container that has the code already; then none is sent.
        remote_import_path: Dotted name of the module in `remote_dir`.
        prefix_username: Whether the user name stands in front of the service's name; as
            `kt.config.prefix_username` says if not given. False finds the bare name alone.
        options: Options of its calls, as `.options(...)` takes them; that changes them further.
        record: The calls that leave a record, with their arguments, for `kt replay`: `"failed"`,
            `"all"` or `"none"`; as `KT_RECORD` says, or those that fail, if not given.

    Raises:
        SpecError: There is neither a function nor a name, or a pod could not import the function.
        TypeError: It is no function.
        ServiceNotFoundError: There is no service of that name.
    """
    function_obj = unwrapped(function_obj)
    if isinstance(function_obj, type):
        raise TypeError(f"{function_obj.__name__} is a class; use kt.cls({function_obj.__name__})")
    handle: Fn[..., Any] = Fn._create(
        function_obj,
        Placement(sync_dir, remote_dir, remote_import_path),
        name=name,
        get_if_exists=get_if_exists,
        reload_prefixes=reload_prefixes,
        prefix_username=prefix_username,
        call_options=options,
    )
    handle._record = None if record is None else parameters.record(record)
    return handle
