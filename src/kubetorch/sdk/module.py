"""`kt.Module`: a function, class or app that is a service, or can be deployed as one.

A module is a callable of this program, or the handle of a service: found by its name, or read from
a pickle. The methods import the modules that reach controller and pods: every user module that says
`kt.fn(...)` at its top level imports this file in every worker.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, ParamSpec, TypeVar, cast

from kubetorch.config import environment
from kubetorch.config.settings import config
from kubetorch.errors import ControllerError, ServiceNotFoundError, SpecError, UnknownParameterError
from kubetorch.lib import terminal
from kubetorch.sdk import backend, compute_parameters, inpod, parameters
from kubetorch.sdk.awaitable import awaitable
from kubetorch.sdk.calls import options
from kubetorch.sdk.compute import Compute
from kubetorch.sdk.deploys.source import (
    Placement,
    Pointers,
    Source,
    checked_out_branch,
    unwrapped,
    working_directory,
)
from kubetorch.specs import hints, names
from kubetorch.specs.callable import CallableKind, CallableRef, RecordMode
from kubetorch.specs.logging import LoggingConfig
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import introspection, routes
from kubetorch.wire.values import expect

if TYPE_CHECKING:
    from kubetorch.sdk.calls.caller import Caller
    from kubetorch.sdk.deploys.deploy import Deployment
    from kubetorch.sdk.scaling import ScalingStats
    from kubetorch.sdk.transport.session import Session
    from kubetorch.wire.messages import DeployLog, WorkloadView


_KINDS = {"fn": "a function", "cls": "a class", "app": "an app"}
#: Names of handles in hints.
_CALLED = {"fn": "f", "cls": "handle", "app": "app"}


#: The result of a deploy: the module itself, typed as the handle that the user works with.
HandleT = TypeVar("HandleT")
ModuleT = TypeVar("ModuleT", bound="Module[Any]")
P = ParamSpec("P")
R = TypeVar("R")


def _with_checked_keywords(deploy: Callable[P, R]) -> Callable[P, R]:
    """Refuse keywords that `.to` does not take, with a hint where they belong."""
    code: CodeType = deploy.__code__
    parameter_names = code.co_varnames[: code.co_argcount]

    @functools.wraps(deploy)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for keyword in kwargs:
            if keyword not in parameter_names:
                raise _unknown_keyword(keyword)
        return deploy(*args, **kwargs)

    return checked


def _unknown_keyword(keyword: str) -> UnknownParameterError:
    hint = hints.hint("to", keyword)
    if hint is None and keyword in compute_parameters.PARAMETERS:
        hint = f".to(kt.Compute({keyword}=...))"
    return UnknownParameterError(
        f".to() has no parameter {keyword!r}", hint=hint or "its first argument is a kt.Compute"
    )


#: Options of calls that travel with a handle in the default codec. `serialization` does not: the
#: sender of a handle could decide that its answers are unpickled.
_WIRE_OPTIONS = frozenset(
    {*("async_", "timeout", "queue_timeout"), *("retries", "retry_on", "backoff", "max_backoff")}
)


class Module(Generic[HandleT]):
    """A function or class that is, or can be, deployed as a service.

    Args:
        name: Name of the service; lower-cased, and cleaned of all but letters, digits and `-`.
        pointers: Where the callable is: folder to import from, dotted module, qualified name.
        sync_dir: Folder whose files go to the pods; `None` finds the project, `False` sends none.
        remote_dir: Folder in the container that has the code already; then none is sent.
        remote_import_path: Dotted name of the module in `remote_dir`.

    Raises:
        SpecError: The name is impossible, or the last three contradict each other.
    """

    kind: ClassVar[CallableKind]
    _record: RecordMode | None = None
    #: Attributes without a setter of their own.
    _PLAIN: ClassVar[frozenset[str]] = frozenset({"is_decorated"})

    if not TYPE_CHECKING:  # which would believe that every name can be set

        def __setattr__(self, name, value):
            # Attributes that `functools.wraps` sets begin with `_`, too.
            is_setting = hasattr(getattr(type(self), name, None), "__set__")
            if not (name.startswith("_") or is_setting or name in self._PLAIN):
                raise AttributeError(
                    f"{name!r} cannot be set on {self!r}: its pods would not know of it\nhint: "
                    "give the class a method that sets it, or keep the value in a variable of "
                    "this program"
                )
            super().__setattr__(name, value)

    def __init__(
        self,
        name: str,
        pointers: Pointers | None = None,
        sync_dir: str | Path | bool | None = None,
        remote_dir: str | None = None,
        remote_import_path: str | None = None,
    ) -> None:
        placement = Placement(sync_dir, remote_dir, remote_import_path)
        self._source = None if pointers is None else Source(self.kind, None, placement, pointers)
        self._name = names.name(name)
        #: The name as the user wrote it.
        self._written_name = name
        #: True if the user chose the name, and not the callable.
        self._is_named = True
        #: The identity of a command that a manifest declares; others are known by their file.
        self._known_as: str | None = None
        #: The code of an unpickled handle, which this program may be able to import.
        self._unpickled: tuple[CallableRef, Placement] | None = None
        #: The callable and the name of a service that exists.
        self._deployed_ref: CallableRef | None = None
        self._service_name: str | None = None
        self._namespace: str | None = None
        self._compute: Compute | None = None
        self._init_args: dict[str, Any] | None = None
        self._reload_prefixes: list[str] = []
        self._prefix_username: bool | None = None
        self._options = options.CallOptions(async_=False)
        self._stream_logs: bool | None = None
        self._logging_config: LoggingConfig | None = None
        self._callers: dict[str | None, Caller] = {}
        #: The function that `functools.wraps` copied to this object.
        self._wraps: Callable[..., Any] | None = None
        #: True if `@kt.compute` declared it, and if that uses a service that exists as it is.
        self.is_decorated = False
        self._takes_existing = False
        #: The controller's description at the deploy or look-up.
        self._view: WorkloadView | None = None

    @classmethod
    def _create(
        cls: type[ModuleT],
        callable_object: Callable[..., Any] | None,
        placement: Placement,
        *,
        name: str | None,
        get_if_exists: bool,
        reload_prefixes: str | Sequence[str] | None,
        prefix_username: bool | None,
        call_options: Mapping[str, Any] | None = None,
    ) -> ModuleT:
        if callable_object is None:
            factory = f"kt.{cls.kind}"
            if name is None or not get_if_exists:
                missing = "a callable, or a name" if name is None else "a callable"
                raise SpecError(
                    f"{factory} needs {missing}", hint=f"{factory}(name=...) finds a service"
                )
            existing_module = cls.from_name(name, None, reload_prefixes, prefix_username)
            existing_module._declare_options(call_options or {})
            return existing_module
        if not callable(callable_object):
            raise TypeError(
                f"kt.{cls.kind} needs a callable; this is {introspection.shown(callable_object)}"
            )
        source = Source(cls.kind, callable_object, placement)
        module = cls(source.qualname if name is None else name)
        module._source = source
        module._is_named = name is not None
        module.reload_prefixes = reload_prefixes
        module.prefix_username = prefix_username
        module._declare_options(call_options or {})
        return module

    def _declare_options(self, changes: Mapping[str, Any]) -> None:
        """Set options of all its calls."""
        self._options = self._options.with_changes(changes)
        if "stream_logs" in changes:
            self.stream_logs = changes["stream_logs"]

    def _forget(self) -> None:
        """Look the service up again before the next call."""
        self._deployed_ref = None
        self._callers.clear()

    def _session(self) -> Session:
        """The session with the controller, in the cluster that the compute names."""
        if self._compute is not None:
            return self._compute.session()
        return backend.session()

    # ------------------------------------------------------------------------------------ names

    @property
    def name(self) -> str:
        """Name that the user gave, cleaned."""
        return self._name

    @property
    def service_name(self) -> str:
        """Name of the service: with the user name in front, unless `prefix_username` is false."""
        if self._service_name is not None:
            return self._service_name
        is_prefixed = self._has_prefix and not self._reload_prefixes
        return names.service_name(self._name, username=config.username, prefixed=is_prefixed)

    @service_name.setter
    def service_name(self, value: str) -> None:
        self._service_name = names.service_name(value)
        self._is_named = True
        self._forget()

    @property
    def namespace(self) -> str:
        """Namespace of the service."""
        if self._compute is not None:
            return self._compute.namespace
        return self._namespace or config.namespace

    @property
    def reload_prefixes(self) -> list[str]:
        """The prefixes to look for, instead of one's own user name and branch."""
        return list(self._reload_prefixes)

    @reload_prefixes.setter
    def reload_prefixes(self, value: str | Sequence[str] | None) -> None:
        prefixes = parse_prefixes(value)
        if prefixes != self._reload_prefixes:
            self._reload_prefixes = prefixes
            self._service_name = None
            self._forget()

    @property
    def prefix_username(self) -> bool | None:
        """Whether the user name stands in front of the name; `None`: as `kt.config` says."""
        return self._prefix_username

    @prefix_username.setter
    def prefix_username(self, value: bool | None) -> None:
        if not (value is None or isinstance(value, bool)):
            raise SpecError(
                f"`prefix_username` must be a boolean or None, and is {introspection.shown(value)}",
                hint="False deploys and finds the bare name; None is as kt.config says",
            )
        if value != self._prefix_username:
            self._prefix_username = value
            self._service_name = None
            self._forget()

    @property
    def _has_prefix(self) -> bool:
        choice = self._prefix_username
        return config.prefix_username if choice is None else choice

    def _candidates(self) -> tuple[str, ...]:
        if self._service_name is not None:
            return (self._service_name,)
        if not (self._has_prefix or self._reload_prefixes):
            return (self.service_name,)
        branch = environment.branch_of_build() or checked_out_branch(working_directory())
        username = config.username
        return candidates(self._name, self._reload_prefixes, username=username, branch=branch)

    # ------------------------------------------------------------------------------------- code

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The callable of this program; `functools.wraps` may set another."""
        if self._wraps is not None:
            return self._wraps
        if self._source is None or self._source.callable_object is None:
            raise AttributeError("__wrapped__")
        return self._source.callable_object

    @__wrapped__.setter
    def __wrapped__(self, value: Callable[..., Any]) -> None:
        self._wraps = value

    @property
    def _ref(self) -> CallableRef:
        if self._deployed_ref is not None:
            return self._deployed_ref
        if self._source is None:
            raise SpecError(
                f"{self.name} is a service that was not looked up yet",
                hint="call it, or kt.fn(name=...) / kt.cls(name=...) looks it up at once",
            )
        return self._declared_ref()

    def _declared_ref(self) -> CallableRef:
        """The reference that a deploy sends for the code of this program."""
        assert self._source is not None
        record = self._record or parameters.record(environment.record(), "KT_RECORD")
        return replace(self._source.ref(), record=record)

    @property
    def callable_name(self) -> str:
        """Qualified name of the function or class."""
        return self._ref.qualname

    @property
    def remote_import_path(self) -> str:
        """Dotted name of the module in the pods."""
        return self._ref.module

    @property
    def container_project_root(self) -> str | None:
        """Folder of the project in the pods, from their working directory if that is unset."""
        if self._ref.project is None:
            return None
        working_dir = self._compute.working_dir if self._compute is not None else None
        return str(PurePosixPath(working_dir or "", self._ref.project))

    @property
    def remote_root_path(self) -> str | None:
        """Entry of `sys.path` in the pods that the callable is imported from."""
        root = self.container_project_root
        return self._ref.remote_dir if root is None else str(PurePosixPath(root, self._ref.root))

    @property
    def sync_dir(self) -> str | Path | bool | None:
        """Folder whose files go to the pods, as the user gave it."""
        return None if self._source is None else self._source.placement.sync_dir

    # --------------------------------------------------------------------------------- settings

    @property
    def compute(self) -> Compute | None:
        """The compute on which the callable runs; set by `.to()`."""
        return self._compute

    @compute.setter
    def compute(self, value: Compute) -> None:
        if not isinstance(value, Compute):
            raise TypeError(f"compute is {value!r}; it must be a kt.Compute")
        chosen = value.chosen_name
        if chosen is not None and chosen != self.service_name:
            import logging  # noqa: PLC0415  # for this alone

            logging.getLogger(__name__).info("the service is called %s, like its compute", chosen)
            self._service_name = chosen
            self._is_named = True
        self._compute = value.for_service(self.service_name)
        self._forget()

    def declare(self, compute: Compute, *, get_if_exists: bool) -> None:
        """Run on `compute` when it is deployed, as `@kt.compute` says.

        Args:
            compute: What it runs on.
            get_if_exists: Whether a deploy takes the service as it is, if there is one.
        """
        self.compute = compute
        self.is_decorated = True
        self._takes_existing = get_if_exists

    @property
    def serialization(self) -> str:
        """The codec of arguments and results, unless a call says otherwise."""
        return self._options.serialization or "json"

    @serialization.setter
    def serialization(self, value: str) -> None:
        self._options = replace(self._options, serialization=options.serialization(value))
        self._callers.clear()

    @property
    def async_(self) -> bool:
        """True if calls return awaitables, unless a call says otherwise."""
        return bool(self._options.async_)

    @async_.setter
    def async_(self, value: bool) -> None:
        self._options = replace(self._options, async_=options.boolean("async_", value))
        self._callers.clear()

    @property
    def logging_config(self) -> LoggingConfig:
        """The part of the service's logs that is shown; that of the compute unless it was set."""
        if self._logging_config is not None:
            return self._logging_config
        return LoggingConfig() if self._compute is None else self._compute.logging_config

    @logging_config.setter
    def logging_config(self, value: LoggingConfig) -> None:
        self._logging_config = parameters.logging(value)
        self._callers.clear()

    @property
    def stream_logs(self) -> bool:
        """True if calls and deploys show logs, unless a call says otherwise."""
        choice = self._given_stream_logs
        return config.stream_logs if choice is None else choice

    @stream_logs.setter
    def stream_logs(self, value: bool | None) -> None:
        self._stream_logs = None if value is None else options.boolean("stream_logs", value)
        self._callers.clear()

    @property
    def _given_stream_logs(self) -> bool | None:
        """The choice that goes before `kt.config.stream_logs`."""
        return self.logging_config.stream_logs if self._stream_logs is None else self._stream_logs

    def _declare(
        self,
        compute: Compute,
        init_args: Mapping[str, Any] | None,
        stream_logs: bool | None,
        reload_prefixes: str | Sequence[str] | None,
        prefix_username: bool | None,
        placement: Placement,
    ) -> None:
        if init_args is not None and self.kind != "cls":
            raise SpecError(f"init_args are for classes; {self.name} is {_KINDS[self.kind]}")
        if reload_prefixes is not None:
            self.reload_prefixes = reload_prefixes
        if prefix_username is not None:
            self.prefix_username = prefix_username
        if stream_logs is not None:
            self.stream_logs = stream_logs
        self.compute = compute
        self._init_args = None if init_args is None else parameters.init_args(init_args)
        if self._source is not None:
            self._source = self._source.with_placement(placement)
        elif self._unpickled is not None:
            ref, before = self._unpickled
            self._unpickled = ref, before.with_changes(placement)

    def _check_kind(self, spec: WorkloadSpec) -> None:
        """Refuse a service of another kind."""
        kind = spec.callable.kind
        if kind != self.kind:
            raise SpecError(
                f"the service {spec.name} is {_KINDS[kind]}",
                hint=f"kt describe {spec.name}"
                if kind == "app"
                else f"kt.{kind}(name={spec.name!r})",
            )

    # ----------------------------------------------------------------------------------- deploy

    @_with_checked_keywords
    def to(  # noqa: PLR0913  # the documented parameters
        self,
        compute: Compute,
        init_args: Mapping[str, Any] | None = None,
        stream_logs: bool | None = None,
        get_if_exists: bool = False,
        reload_prefixes: str | Sequence[str] | None = None,
        dryrun: bool = False,
        sync_dir: str | Path | bool | None = None,
        remote_dir: str | None = None,
        remote_import_path: str | None = None,
        replace: bool = False,
        prefix_username: bool | None = None,
    ) -> HandleT:
        """Deploy to `compute`, and wait until all pods serve this code.

        Deploying again brings changed code to the pods that run, and makes a new instance of a
        class. If the new code cannot be loaded, this raises what its import or constructor raised,
        and the pods go on with the code that they have.

        Args:
            compute: What it runs on.
            init_args: Arguments of a class's constructor, by name; JSON must be able to carry them.
            stream_logs: Whether lines that the code prints while it is loaded are shown.
            get_if_exists: Take the service if there is one, as it is, instead of deploying.
            reload_prefixes: Whose service to take, see `kt.fn`.
            dryrun: Only set `.compute`, whose `.manifest` says what would be applied.
            sync_dir: Folder whose files go to the pods; `False` sends none.
            remote_dir: Folder in the container that has the code already; then none is sent.
            remote_import_path: Dotted name of the module in `remote_dir`.
            replace: Replace the service of that name, also one of somebody else; it is yours then.
            prefix_username: Whether the user name stands in front of the service's name, also for
                later deploys of this object; `kt.config.prefix_username` if neither says.

        Raises:
            SpecError: Something is declared that is impossible.
            ServiceTakenError: The service of that name is another user's, or runs another callable
                and is in use; see "Names and owners" in the documents.
            StartupError: The pods cannot start.
            Exception: What the user's code raised while it was loaded.
        """
        if not self._has_no_effect(compute):
            placement = Placement(sync_dir, remote_dir, remote_import_path)
            self._declare(
                compute, init_args, stream_logs, reload_prefixes, prefix_username, placement
            )
            if dryrun:
                self._note_declared()
            else:
                self._accept(self._deployment(get_if_exists, replace).run())
        return cast("HandleT", self)

    @_with_checked_keywords
    async def to_async(  # noqa: PLR0913  # the documented parameters
        self,
        compute: Compute,
        init_args: Mapping[str, Any] | None = None,
        stream_logs: bool | None = None,
        get_if_exists: bool = False,
        reload_prefixes: str | Sequence[str] | None = None,
        dryrun: bool = False,
        sync_dir: str | Path | bool | None = None,
        remote_dir: str | None = None,
        remote_import_path: str | None = None,
        replace: bool = False,
        prefix_username: bool | None = None,
    ) -> HandleT:
        """Awaitable form of `to`."""
        if not self._has_no_effect(compute):
            placement = Placement(sync_dir, remote_dir, remote_import_path)
            self._declare(
                compute, init_args, stream_logs, reload_prefixes, prefix_username, placement
            )
            if dryrun:
                self._note_declared()
            else:
                self._accept(await self._deployment(get_if_exists, replace).run_async())
        return cast("HandleT", self)

    def deploy(self, replace: bool = False) -> HandleT:
        """Deploy to `.compute`, and wait until all pods serve this code; see `.to`.

        Args:
            replace: See `.to`.

        Raises:
            SpecError: `.compute` was not set.
        """
        if not self._has_no_effect():
            self._accept(self._deployment(is_replacing=replace).run())
        return cast("HandleT", self)

    async def deploy_async(self, replace: bool = False) -> HandleT:
        """Awaitable form of `deploy`."""
        if not self._has_no_effect():
            self._accept(await self._deployment(is_replacing=replace).run_async())
        return cast("HandleT", self)

    def teardown(self) -> None:
        """Stop the service and forget it, if it is there. An error is logged, not raised."""
        if not self._has_no_effect():
            self._delete()

    async def teardown_async(self) -> None:
        """Stop the service and forget it, if it is there. An error is logged, not raised."""
        if not self._has_no_effect():
            import asyncio  # noqa: PLC0415  # an awaiting program has loaded it

            await asyncio.to_thread(self._delete)

    # ---------------------------------------------------------------------------------- scaling

    def stats(self) -> ScalingStats:
        """The pods of the service and its load, as they are now.

        Of an autoscaled service it has the last changes of the number of pods and their reasons,
        too. A class with a method `stats` has its own; `kt.service(handle).stats()` is this one.

        Raises:
            ServiceNotFoundError: It was not deployed.
            ControllerUnavailableError: The controller does not answer.

        Example:
            >>> remote.stats().pods_ready
            2
        """
        from kubetorch.sdk.scaling import ScalingStats  # noqa: PLC0415  # see the docstring above

        return ScalingStats.of_service(self._current_view())

    stats_async = awaitable(stats)

    def autoscale(self, **settings: Any) -> ScalingStats:  # noqa: ANN401  # those of `kt.Compute`
        """Change how the load decides on the number of pods, while the service runs.

        Pods stay, and calls go on. The change holds until a deploy declares other numbers, which
        says so. A class with a method `autoscale` has its own;
        `kt.service(handle).autoscale(...)` is this one.

        Args:
            settings: Keywords of `kt.Compute.autoscale`, such as `min_scale`, `max_scale`, `target`
                or `window`; `None` is as deployed again. `concurrency` and others that pods know
                need a deploy.

        Returns:
            The state of the service, with the change.

        Raises:
            AutoScalingError: There is no such keyword, it needs a deploy, or a value is impossible.
            SpecError: The number of pods is fixed.
            ServiceNotFoundError: It was not deployed.

        Example:
            >>> remote.autoscale(min_scale=2, max_scale=30)
        """
        from kubetorch.sdk import scaling  # noqa: PLC0415  # see the docstring above

        view = self._current_view()
        changes = scaling.checked(view, settings)
        namespace, name = view.spec.namespace, view.spec.name
        changed_view = self._session().ask(
            lambda controller: controller.scale_workload(namespace, name, changes)
        )
        return scaling.ScalingStats.of_service(changed_view)

    autoscale_async = awaitable(autoscale)

    # ------------------------------------------------------------------------------------- data

    def refresh_data(self) -> dict[str, str]:
        """Bring what the keys of `kt.Compute(data=)` hold now to all pods; calls go on.

        Each path changes in one step once its content is there: files that are open stay as they
        were. A class with a method `refresh_data` has its own;
        `kt.service(handle).refresh_data()` is this one.

        Returns:
            The version at each path.

        Raises:
            SpecError: The service has no data.
            DataStoreError: A key is missing, or a pod cannot store what it holds.
            ServiceNotFoundError: It was not deployed.

        Example:
            >>> remote.refresh_data()
            {'/models': '4'}
        """
        from kubetorch.sdk.data import mounts  # noqa: PLC0415  # for this alone

        return mounts.refresh(self._session(), self._current_view())

    refresh_data_async = awaitable(refresh_data)

    def _current_view(self) -> WorkloadView:
        """The service as the controller describes it now."""
        if self._view is None:
            self._accept(self._search())
        return self._session().get_workload(self.namespace, self.service_name)

    def _has_no_effect(self, compute: Compute | None = None) -> bool:
        """True if a pod that imports the deployed file runs the statement that deploys it."""
        del compute
        return inpod.is_deploying()

    def _delete(self) -> None:
        import logging  # noqa: PLC0415  # for this alone

        log = logging.getLogger(__name__)
        try:
            teardown = backend.delete(self._session(), self.namespace, self.service_name)
            for remaining_object in teardown.remaining:
                log.warning("the teardown of %s leaves %s", self.service_name, remaining_object)
            if teardown.keys:
                log.info("%s keys of the data store ended with it", teardown.keys)
        except ServiceNotFoundError:
            log.info("there is no service %s to tear down", self.service_name)
        except ControllerError as error:
            log.warning("%s could not be torn down: %s", self.service_name, error)
        self._forget()

    def _deployment(self, get_if_exists: bool = False, is_replacing: bool = False) -> Deployment:
        if self._compute is None:
            raise SpecError(
                f"{self.name} has no compute", hint="deploy it with .to(kt.Compute(...))"
            )
        if self._source is None:
            self._source = self._imported()
        session = self._session()
        session.warm()
        written, is_quiet = self._written_name, config.quiet or environment.is_in_pod()
        if names.is_shortened(written) and not is_quiet:
            terminal.say_once(f"{written} is deployed as the service {self.service_name}")
        if self._compute._beside is not None:
            terminal.say_once(
                f"{self.service_name} is a second service, with pods of its own, on the kt.Compute "
                f"of {self._compute._beside}"
            )
        from kubetorch.sdk.deploys import deploy  # noqa: PLC0415  # as above

        return deploy.begin(
            deploy.Order(
                source=self._source,
                spec=self._declared_spec(self._compute),
                init_args=self._init_args,
                stream_logs=self.stream_logs,
                existing=self._candidates() if get_if_exists or self._takes_existing else (),
                secrets=self._compute.secrets,
                replace=options.boolean("replace", is_replacing),
                is_named=self._is_named,
                callable=self._known_as,
                on_existing=self._report_owner,
                on_shown=self._note_shown,
            ),
            session,
        )

    def _note_shown(self, line: DeployLog) -> None:
        """A deploy has shown a line of the user's code."""

    def _declared_spec(self, compute: Compute) -> WorkloadSpec:
        return WorkloadSpec(
            namespace=self.namespace,
            name=self.service_name,
            callable=self._declared_ref(),
            compute=replace(compute.to_spec(), logging=self.logging_config),
            username=config.username,
            prefix_username=config.prefix_username,
        )

    def _note_declared(self) -> None:
        """Note on the compute the workload that would run on it, for its manifest."""
        if self._compute is not None and self._source is not None:
            self._compute.declares(self._declared_spec(self._compute))

    def _imported(self) -> Source:
        """The code of a handle that was unpickled, imported here."""
        if self._unpickled is None:
            raise SpecError(
                f"{self.name} is the handle of a service, whose code is not here",
                hint="give the function or class too: kt.fn(train, name=...).to(compute)",
            )
        ref, placement = self._unpickled
        sync_dir = placement.sync_dir
        if isinstance(sync_dir, (str, Path)) and not Path(sync_dir).expanduser().is_dir():
            # The folder is one of the machine that it was pickled on.
            placement = replace(placement, sync_dir=None)
        try:
            return self._source_of(ref, placement)
        except (ImportError, AttributeError) as error:
            raise SpecError(
                f"the code of {self.name}, {ref.module}:{ref.qualname}, cannot be imported here: "
                f"{error}",
                hint="deploy it where it can, or give it: kt.fn(train, name=...).to(compute)",
            ) from error

    def _source_of(self, ref: CallableRef, placement: Placement) -> Source:
        """The code of a callable that can be imported."""
        from kubetorch.sdk.calls import target  # noqa: PLC0415  # see the module's docstring

        definition: Any = importlib.import_module(
            target.local_modules(ref).get(ref.module, ref.module)
        )
        for name in ref.qualname.split("."):
            definition = getattr(definition, name)
        return Source(self.kind, unwrapped(definition), placement)

    # ---------------------------------------------------------------------------------- look-up

    @classmethod
    def from_name(
        cls: type[ModuleT],
        name: str,
        namespace: str | None = None,
        reload_prefixes: str | Sequence[str] | None = None,
        prefix_username: bool | None = None,
    ) -> ModuleT:
        """The handle of a service that exists.

        Args:
            name: Its name, as it was deployed.
            namespace: Its namespace; `kt.config.namespace` if not given.
            reload_prefixes: Whose service it is: prefixes of its name, instead of one's own user
                name, the git branch, and none.
            prefix_username: False finds the bare name alone; `kt.config.prefix_username` if it is
                not given. With `reload_prefixes` it has no effect.

        Raises:
            ServiceNotFoundError: There is none.
        """
        is_prefixed = config.prefix_username if prefix_username is None else prefix_username
        module = cls._named(name, namespace, reload_prefixes, is_prefixed)
        view = None
        if not hasattr(cls, "kind"):  # `kt.Module` itself: a function or a class
            view = module._search()
            # `Fn`, `Cls` and `App` lie in modules that are called like the kind.
            kind = view.spec.callable.kind
            owner = importlib.import_module(f"kubetorch.sdk.{kind}")
            handle = cast("type[ModuleT]", getattr(owner, kind.capitalize()))
            module = handle._named(name, namespace, reload_prefixes, is_prefixed)
        # A module that a pod imports must not ask the controller: the first call looks it up.
        if view is not None or not inpod.is_worker() or environment.deployed_apps():
            module._accept(view or module._search())
        return module

    @classmethod
    def _named(
        cls: type[ModuleT],
        name: str,
        namespace: str | None,
        reload_prefixes: str | Sequence[str] | None,
        prefix_username: bool,
    ) -> ModuleT:
        """A handle that was not looked up."""
        module = cls(name)
        module.reload_prefixes = parse_prefixes(reload_prefixes)
        module.prefix_username = prefix_username
        if namespace is not None:
            module._namespace = names.check_namespace(namespace)
        return module

    def _search(self) -> WorkloadView:
        names = self._candidates()
        view = self._session().find(self.namespace, names)
        if view is None:
            looked_for = " or ".join(repr(name) for name in names)
            raise ServiceNotFoundError(
                f"there is no service {looked_for} in namespace {self.namespace!r}",
                hint=backend.suggest_services(self._session(), self.namespace, self.name)
                if self._source is None
                else self._deploying_hint,
            )
        self._report_owner(view)
        return view

    @property
    def _deploying_hint(self) -> str:
        if self.is_decorated:
            return f"deploy it with {self.callable_name}.deploy(), or by kt deploy and its file"
        return "deploy it with .to(kt.Compute(...))"

    def _report_owner(self, view: WorkloadView) -> None:
        """Report the owner of a service that a bare name led to, and if it runs other code."""
        self._report_edited_code(view)
        is_bare = view.spec.name == names.service_name(self._name) and not self._reload_prefixes
        if is_bare and self._service_name is None:
            backend.report_owner(self._session(), view)

    def _report_edited_code(self, view: WorkloadView) -> None:
        """Report if the callable of this program differs from the deployed one."""
        source, deployed = self._source, view.spec.callable
        if source is None or environment.is_in_pod() or not (view.is_own and deployed.code):
            return
        if deployed.qualname != source.qualname or deployed.kind != self.kind:
            return
        from kubetorch.sdk import logs  # noqa: PLC0415  # see the module's docstring
        from kubetorch.sdk.deploys import origin  # noqa: PLC0415  # as above

        code = origin.code_of(source)
        if code and code != deployed.code:
            file = Path(source.file()[0] or "")
            terminal.say_once(
                f"{view.spec.name} runs {source.qualname} as it was deployed at "
                f"{logs.moment(view.updated)}, which is not what {file.name} has since "
                f"{logs.moment(file.stat().st_mtime)}; .to(...) deploys it"
            )

    def _accept(self, view: WorkloadView) -> None:
        """Become the handle of the service that a deploy or a look-up found."""
        spec = view.spec
        self._check_kind(spec)
        if self._compute is None or not self._compute.describes(spec):
            self._compute = Compute.from_spec(
                spec.compute, namespace=spec.namespace, service_name=spec.name
            )
        self._compute.deployed_as(view)
        self._service_name = spec.name
        self._deployed_ref = spec.callable
        self._view = view
        self._callers.clear()
        backend.remember(self._session(), view)

    # ------------------------------------------------------------------------------------ calls

    def _make_caller(self, method: str | None) -> Caller:
        if inpod.is_deploying(is_call=True):
            return cast("Caller", inpod.Inert())
        from kubetorch.sdk.calls import target  # noqa: PLC0415  # see the module's docstring
        from kubetorch.sdk.calls.caller import Caller  # noqa: PLC0415  # as above

        view = self._view
        if view is None or self._deployed_ref is None or not target.is_served(view):
            view = self._search()
            self._accept(view)
            if target.is_failed(view):
                raise target.failure_of(view, self._source)
        caller = Caller(
            target.describe(view, method, self._source, self.logging_config),
            backend.route(self._session(), view.spec.namespace, view.spec.name),
            replace(self._options, stream_logs=self._given_stream_logs),
            (self, method),
        )
        self._callers[method] = caller
        return caller

    @property
    def service_config(self) -> dict[str, Any] | None:
        """The service as the controller described it; `None` when it was not asked yet."""
        if self._view is None:
            return None
        import msgspec  # noqa: PLC0415  # see the module's docstring

        described: dict[str, Any] = msgspec.to_builtins(self._view)
        described.pop("token", None)
        return described

    @property
    def base_endpoint(self) -> str:
        """Base URL of the service, for other clients."""
        return backend.base_url(self._session(), self._required_view())

    def endpoint(self, method_name: str | None = None) -> str:
        """The URL that calls go to by `POST`, for other clients; see `request_headers`.

        Args:
            method_name: Method of a class.
        """
        return self.base_endpoint + routes.callable_path(self._ref.name, method_name)

    @property
    def request_headers(self) -> dict[str, str]:
        """Headers that other clients have to send."""
        return {routes.AUTHORIZATION: f"Bearer {self._session().call_token(self._required_view())}"}

    def _required_view(self) -> WorkloadView:
        if self._view is None:
            raise SpecError(
                f"{self.name} was not deployed or looked up yet", hint="deploy it, or call it first"
            )
        return self._view

    # ----------------------------------------------------------------------- in values of calls

    def _to_wire(self) -> dict[str, Any]:
        """The names of the service, for the default codec."""
        set_options, default_options = vars(self._options), vars(options.CallOptions(async_=False))
        declared = {
            name: set_options[name]
            for name in _WIRE_OPTIONS
            if set_options[name] != default_options[name]
        }
        if self._stream_logs is not None:
            declared["stream_logs"] = self._stream_logs
        state = {"name": self._name, "service": self.service_name, "namespace": self.namespace}
        return {**state, "options": declared}

    @classmethod
    def _from_wire(cls: type[ModuleT], state: dict[str, Any]) -> ModuleT:
        """The handle that `_to_wire` described; its first call looks the service up."""
        name, service, namespace = (state[key] for key in ("name", "service", "namespace"))
        declared = expect(state["options"], dict)
        for text in (name, service, namespace):
            expect(text, str)
        for option, value in declared.items():
            if option not in {*_WIRE_OPTIONS, "stream_logs"}:
                raise SpecError(f"a handle with the option {option!r:.100}")
            if type(value) not in (bool, int, float):
                for item in expect(value, tuple):
                    expect(item, str)
        if names.clean(namespace) != namespace:
            raise SpecError(f"a handle in the namespace {namespace!r:.100}")
        handle = cls(name)
        handle._service_name, handle._namespace = names.service_name(service), namespace
        handle._declare_options(declared)
        return handle

    # ----------------------------------------------------------------------------------- pickle

    def __getstate__(self) -> dict[str, Any]:
        """The state with which another process finds the service, and deploys it again."""
        ref, unpickled = self._deployed_ref, self._unpickled
        if self._source is not None:
            ref = self._declared_ref()
            unpickled = ref, self._source.placement
        return {
            "_name": self._name,
            "_service_name": self._service_name,
            "_is_named": self._is_named,
            "_unpickled": unpickled,
            "_namespace": self.namespace,
            "_compute": self._compute,
            "_found": ref,
            "_init_args": self._init_args,
            "_reload_prefixes": self._reload_prefixes,
            "_prefix_username": self._prefix_username,
            "_options": replace(self._options, on_progress=None),
            "_record": self._record,
            "_stream_logs": self._stream_logs,
            "_logging_config": self._logging_config,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        Module.__init__(self, state["_name"])
        attributes = dict(state)
        # Pickles have the key of earlier versions.
        self._deployed_ref = attributes.pop("_found", None)
        self.__dict__.update(attributes)

    def _python_of_handle(self, name: str) -> str:
        """Python that binds a name to this handle in a pod, where its first call looks it up."""
        expression = f"kubetorch.{type(self).__name__}.from_name({self.name!r}, {self.namespace!r})"
        lines = [f"{name} = {expression}", f"{name}.service_name = {self.service_name!r}"]
        if self.serialization != "json":
            lines.append(f"{name}.serialization = {self.serialization!r}")
        if self.async_:
            lines.append(f"{name}.async_ = True")
        return "\n".join(lines)

    # To a type checker, `__getattr__` says that any name is right.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if hasattr(type(self), name):  # a property that raised AttributeError: let it be seen
                object.__getattribute__(self, name)
            raise self._no_attribute(name)

    def _no_attribute(self, name: str) -> AttributeError:
        """The error of a missing attribute, whose name may be another tool's word."""
        if name.startswith("_"):
            return AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        called = _CALLED[getattr(type(self), "kind", "fn")]
        return hints.no_attribute("handle", self, name, called, self.service_name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.service_name!r}, namespace={self.namespace!r})"


def candidates(
    name: str, prefixes: Sequence[str], *, username: str | None, branch: str | None
) -> tuple[str, ...]:
    """Service names to look for, in order."""
    if prefixes:
        service_names = [names.service_name(f"{prefix}-{name}") for prefix in prefixes]
    else:
        service_names = [names.service_name(name, username=username)]
        if branch is not None:
            service_names += _with_branch(name, branch)
        service_names += [names.service_name(name)]
    return tuple(dict.fromkeys(service_names))


def _with_branch(name: str, branch: str) -> list[str]:
    try:
        return [names.service_name(f"{names.clean_username(branch)}-{name}")]
    except SpecError:  # a branch such as "2024-01" has no name that a service could have
        return []


def parse_prefixes(value: object) -> list[str]:
    """Parse `reload_prefixes`: `None`, text, or a list of texts."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return list(value)
    raise SpecError(
        f"reload_prefixes is {value!r}; it must be text or a list of texts",
        hint='for example reload_prefixes=["main", "alice"]',
    )
