"""`kt.Module`: what `Fn` and `Cls` have in common: deploy, look-up, teardown, endpoints.

A module is a callable of this program, or the handle of a service: found by its name, or taken out
of a pickle. Nothing heavy is imported here: every user module that says `kt.fn(...)` at its top
level imports this file in every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from kubetorch.config.settings import config
from kubetorch.errors import ControllerError, ServiceNotFoundError, SpecError
from kubetorch.sdk import inpod, parameters
from kubetorch.sdk.compute import Compute
from kubetorch.sdk.declaration import Declaration
from kubetorch.sdk.deploys import naming
from kubetorch.sdk.deploys.source import Placement, Pointers, Source
from kubetorch.specs.callable import CallableKind
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import routes

if TYPE_CHECKING:
    from kubetorch.sdk.calls.invoke import Caller
    from kubetorch.sdk.deploys.deploy import Deployment
    from kubetorch.wire.messages import WorkloadView

#: What a deploy returns: the module itself, typed as what the user works with.
HandleT = TypeVar("HandleT")
ModuleT = TypeVar("ModuleT", bound="Module[Any]")


class Module(Declaration, Generic[HandleT]):
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

    def __init__(
        self,
        name: str,
        pointers: Pointers | None = None,
        sync_dir: str | Path | bool | None = None,
        remote_dir: str | None = None,
        remote_import_path: str | None = None,
    ) -> None:
        placement = Placement(sync_dir, remote_dir, remote_import_path)
        source = None if pointers is None else Source(self.kind, None, placement, pointers)
        super().__init__(name, source)
        self._view: WorkloadView | None = None

    @classmethod
    def _made(
        cls: type[ModuleT],
        callable_object: Callable[..., Any] | None,
        placement: Placement,
        *,
        name: str | None,
        get_if_exists: bool,
        reload_prefixes: str | Sequence[str] | None,
    ) -> ModuleT:
        """What `kt.fn` and `kt.cls` return."""
        if callable_object is None:
            factory = f"kt.{cls.kind}"
            if name is None or not get_if_exists:
                missing = "a callable, or a name" if name is None else "a callable"
                raise SpecError(f"{factory} needs {missing}", hint=f"{factory}(name=...) finds one")
            return cls.from_name(name, None, reload_prefixes)
        if not callable(callable_object):
            raise TypeError(f"kt.{cls.kind} needs a callable; this is {callable_object!r}")
        source = Source(cls.kind, callable_object, placement)
        module = cls(source.qualname if name is None else name)
        module._source = source
        module.reload_prefixes = reload_prefixes
        return module

    # ----------------------------------------------------------------------------------- deploy

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

        Raises:
            SpecError: Something is declared that is impossible.
            StartupError: The pods cannot start.
            Exception: What the user's code raised while it was loaded.
        """
        if not inpod.is_deploying():
            placement = Placement(sync_dir, remote_dir, remote_import_path)
            self._declare(compute, init_args, stream_logs, reload_prefixes, placement)
            if not dryrun:
                self._accept(self._deployment(get_if_exists).run())
        return cast("HandleT", self)

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

        Raises:
            SpecError: Something is declared that is impossible.
            StartupError: The pods cannot start.
            Exception: What the user's code raised while it was loaded.
        """
        if not inpod.is_deploying():
            placement = Placement(sync_dir, remote_dir, remote_import_path)
            self._declare(compute, init_args, stream_logs, reload_prefixes, placement)
            if not dryrun:
                self._accept(await self._deployment(get_if_exists).run_async())
        return cast("HandleT", self)

    def deploy(self) -> HandleT:
        """Deploy to `.compute`, and wait until all pods serve this code; see `.to`.

        Raises:
            SpecError: `.compute` was not set.
        """
        if not inpod.is_deploying():
            self._accept(self._deployment().run())
        return cast("HandleT", self)

    async def deploy_async(self) -> HandleT:
        """Deploy to `.compute`, and wait until all pods serve this code; see `.to`.

        Raises:
            SpecError: `.compute` was not set.
        """
        if not inpod.is_deploying():
            self._accept(await self._deployment().run_async())
        return cast("HandleT", self)

    def teardown(self) -> None:
        """Stop the service and forget it, if it is there. An error is logged, not raised."""
        if not inpod.is_deploying():
            self._delete()

    async def teardown_async(self) -> None:
        """Stop the service and forget it, if it is there. An error is logged, not raised."""
        if not inpod.is_deploying():
            import asyncio  # noqa: PLC0415  # loaded already by whoever awaits

            await asyncio.to_thread(self._delete)

    def _delete(self) -> None:
        import logging  # noqa: PLC0415  # for this alone

        from kubetorch.sdk import services  # noqa: PLC0415  # see the module's docstring

        log = logging.getLogger(__name__)
        try:
            services.delete(self._session(), self.namespace, self.service_name)
        except ServiceNotFoundError:
            log.info("there is no service %s to tear down", self.service_name)
        except ControllerError as error:
            log.warning("%s could not be torn down: %s", self.service_name, error)
        self._forget()

    def _deployment(self, get_if_exists: bool = False) -> Deployment:
        if self._compute is None:
            raise SpecError(
                f"{self.name} has no compute", hint="deploy it with .to(kt.Compute(...))"
            )
        if self._source is None:
            raise SpecError(
                f"{self.name} is the handle of a service, whose code is not here",
                hint="give the function or class too: kt.fn(train, name=...).to(compute)",
            )
        session = self._session()
        session.warm()
        from kubetorch.sdk.deploys import deploy  # noqa: PLC0415  # as above

        spec = WorkloadSpec(
            namespace=self.namespace,
            name=self.service_name,
            callable=self._declared_ref(),
            compute=replace(self._compute.to_spec(), logging=self.logging_config),
            username=config.username,
        )
        return deploy.begin(
            deploy.Order(
                source=self._source,
                spec=spec,
                init_args=self._init_args,
                stream_logs=self.stream_logs,
                existing=self._candidates() if get_if_exists or self._takes_existing else (),
                secrets=self._compute.secrets,
            ),
            session,
        )

    # ---------------------------------------------------------------------------------- look-up

    @classmethod
    def from_name(
        cls: type[ModuleT],
        name: str,
        namespace: str | None = None,
        reload_prefixes: str | Sequence[str] | None = None,
    ) -> ModuleT:
        """The handle of a service that exists.

        Args:
            name: Its name, as it was deployed.
            namespace: Its namespace; `kt.config.namespace` if not given.
            reload_prefixes: Whose service it is: prefixes of its name, instead of one's own user
                name, the git branch, and none.

        Raises:
            ServiceNotFoundError: There is none.
        """
        module = cls._named(name, namespace, reload_prefixes)
        found = None
        if not hasattr(cls, "kind"):  # `kt.Module` itself: a function or a class
            found = module._search()
            module = cls._of_kind(found.spec.callable.kind)._named(name, namespace, reload_prefixes)
        # A module that a pod imports must not ask anybody: there, the first call looks it up.
        if found is not None or not inpod.is_worker():
            module._accept(found or module._search())
        return module

    @classmethod
    def _of_kind(cls: type[ModuleT], kind: CallableKind) -> type[ModuleT]:
        from kubetorch.sdk.apps.app import App  # noqa: PLC0415  # it imports this module
        from kubetorch.sdk.cls import Cls  # noqa: PLC0415  # it imports this module
        from kubetorch.sdk.fn import Fn  # noqa: PLC0415  # it imports this module

        kinds = {"fn": Fn, "cls": Cls, "app": App}
        return cast("type[ModuleT]", kinds[kind])

    @classmethod
    def _named(
        cls: type[ModuleT],
        name: str,
        namespace: str | None,
        reload_prefixes: str | Sequence[str] | None,
    ) -> ModuleT:
        """A handle that was not looked up."""
        module = cls(name)
        module.reload_prefixes = naming.parse_prefixes(reload_prefixes)
        if namespace is not None:
            module._namespace = parameters.namespace(namespace)
        return module

    def _search(self) -> WorkloadView:
        names = self._candidates()
        found = self._session().find(self.namespace, names)
        if found is None:
            looked_for = " or ".join(repr(name) for name in names)
            raise ServiceNotFoundError(
                f"there is no service {looked_for} in namespace {self.namespace!r}",
                hint="kt list shows what there is"
                if self._source is None
                else "deploy it with .to(kt.Compute(...))",
            )
        return found

    def _accept(self, view: WorkloadView) -> None:
        """Be the service that a deploy or a look-up found."""
        from kubetorch.sdk import services  # noqa: PLC0415  # see the module's docstring

        spec = view.spec
        self._check_kind(spec)
        if self._compute is None or not self._compute.describes(spec):
            self._compute = Compute.from_spec(
                spec.compute, namespace=spec.namespace, service_name=spec.name
            )
        self._compute.deployed_at(view.url)
        self._service_name = spec.name
        self._found = spec.callable
        self._view = view
        self._callers.clear()
        services.remember(self._session(), view)

    # ------------------------------------------------------------------------------------ calls

    def _make_caller(self, method: str | None) -> Caller:
        if inpod.is_deploying(is_call=True):
            return cast("Caller", inpod.Inert())
        from kubetorch.sdk import services  # noqa: PLC0415  # see the module's docstring
        from kubetorch.sdk.calls import target  # noqa: PLC0415  # see the module's docstring
        from kubetorch.sdk.calls.invoke import Caller  # noqa: PLC0415  # as above

        view = self._view
        if view is None or self._found is None or not target.is_served(view):
            view = self._search()
            self._accept(view)
            if target.is_failed(view):
                raise target.failure_of(view, self._source)
        caller = Caller(
            target.describe(view.spec, method, self._source, self.logging_config),
            services.route(self._session(), view.spec.namespace, view.spec.name),
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
        from kubetorch.sdk import services  # noqa: PLC0415  # see the module's docstring

        return services.base_url(self._session(), self._known())

    def endpoint(self, method_name: str | None = None) -> str:
        """The URL that calls go to by `POST`, for other clients; see `request_headers`.

        Args:
            method_name: Method of a class.
        """
        return self.base_endpoint + routes.callable_path(self._ref.name, method_name)

    @property
    def request_headers(self) -> dict[str, str]:
        """Headers that other clients have to send."""
        return {routes.AUTHORIZATION: f"Bearer {self._known().token}"}

    def _known(self) -> WorkloadView:
        if self._view is None:
            raise SpecError(
                f"{self.name} was not deployed or looked up yet", hint="deploy it, or call it first"
            )
        return self._view

    def __setstate__(self, state: dict[str, Any]) -> None:
        Module.__init__(self, state["_name"])
        self.__dict__.update(state)
