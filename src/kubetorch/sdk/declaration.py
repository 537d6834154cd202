"""What the user has said about a service: its names, its code, how it is called and logs.

Nothing heavy is imported here: every user module that says `kt.fn(...)` at its top level imports
this file in every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

from kubetorch.config import environment
from kubetorch.config.settings import config
from kubetorch.errors import SpecError
from kubetorch.sdk import parameters
from kubetorch.sdk.calls import options
from kubetorch.sdk.compute import Compute
from kubetorch.sdk.deploys import naming
from kubetorch.sdk.deploys.source import Placement, Source
from kubetorch.specs import names
from kubetorch.specs.callable import CallableKind, CallableRef
from kubetorch.specs.logging import LoggingConfig
from kubetorch.specs.workload import WorkloadSpec

if TYPE_CHECKING:
    from kubetorch.sdk.calls.invoke import Caller
    from kubetorch.sdk.session import Session


_KINDS = {"fn": "a function", "cls": "a class", "app": "an app"}


class Declaration:
    """A function or class, and what its service is to be.

    Args:
        name: What the user calls it.
        source: The callable, if its code is known.
    """

    kind: ClassVar[CallableKind]

    def __init__(self, name: str, source: Source | None) -> None:
        self._name = names.name(name)
        self._source = source
        # Of a service that exists: what is deployed there, and under which name.
        self._found: CallableRef | None = None
        self._service_name: str | None = None
        self._namespace: str | None = None
        self._compute: Compute | None = None
        self._init_args: dict[str, Any] | None = None
        self._reload_prefixes: list[str] = []
        self._options = options.CallOptions(serialization="json", async_=False)
        self._stream_logs: bool | None = None
        self._logging_config: LoggingConfig | None = None
        self._callers: dict[str | None, Caller] = {}
        # Whether it was declared by `@kt.compute`, and what that says of services that exist.
        self.is_decorated = False
        self._takes_existing = False

    def _forget(self) -> None:
        """Look the service up again before the next call."""
        self._found = None
        self._callers.clear()

    def _session(self) -> Session:
        """The way to the controller, in the cluster that the compute names."""
        if self._compute is not None:
            return self._compute.session()
        from kubetorch.sdk import services  # noqa: PLC0415  # see the module's docstring

        return services.session()

    # ------------------------------------------------------------------------------------ names

    @property
    def name(self) -> str:
        """Name that the user gave, cleaned."""
        return self._name

    @property
    def service_name(self) -> str:
        """Name of the service: with the configured user name in front, but for reload prefixes."""
        if self._service_name is not None:
            return self._service_name
        return names.service_name(
            self._name, username=config.username, prefixed=not self._reload_prefixes
        )

    @service_name.setter
    def service_name(self, value: str) -> None:
        self._service_name = names.service_name(value)
        self._forget()

    @property
    def namespace(self) -> str:
        """Namespace of the service."""
        if self._compute is not None:
            return self._compute.namespace
        return self._namespace or config.namespace

    @property
    def reload_prefixes(self) -> list[str]:
        """Whose service it is: prefixes to look for, instead of one's own user name and branch."""
        return list(self._reload_prefixes)

    @reload_prefixes.setter
    def reload_prefixes(self, value: str | Sequence[str] | None) -> None:
        prefixes = naming.parse_prefixes(value)
        if prefixes != self._reload_prefixes:
            self._reload_prefixes = prefixes
            self._service_name = None
            self._forget()

    def _candidates(self) -> tuple[str, ...]:
        if self._service_name is not None:
            return (self._service_name,)
        branch = environment.branch_of_build() or naming.checked_out_branch(Path.cwd())
        username = config.username
        return naming.candidates(
            self._name, self._reload_prefixes, username=username, branch=branch
        )

    # ------------------------------------------------------------------------------------- code

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The callable of this program, for whoever unwraps."""
        if self._source is None or self._source.callable_object is None:
            raise AttributeError("__wrapped__")
        return self._source.callable_object

    @property
    def _ref(self) -> CallableRef:
        if self._found is not None:
            return self._found
        if self._source is None:
            raise SpecError(
                f"{self.name} is a service that was not looked up yet",
                hint="call it, or kt.fn(name=...) / kt.cls(name=...) looks it up at once",
            )
        return self._declared_ref()

    def _declared_ref(self) -> CallableRef:
        """What a deploy says of the code of this program."""
        assert self._source is not None
        return self._source.ref()

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
        """What it runs on; set by `.to()`."""
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
        """How arguments and results travel, unless a call says otherwise."""
        return self._options.serialization or "json"

    @serialization.setter
    def serialization(self, value: str) -> None:
        self._options = replace(self._options, serialization=options.serialization(value))
        self._callers.clear()

    @property
    def async_(self) -> bool:
        """Whether calls return awaitables, unless a call says otherwise."""
        return bool(self._options.async_)

    @async_.setter
    def async_(self, value: bool) -> None:
        self._options = replace(self._options, async_=options.boolean("async_", value))
        self._callers.clear()

    @property
    def logging_config(self) -> LoggingConfig:
        """What of the service's logs is shown; that of the compute unless it was set."""
        if self._logging_config is not None:
            return self._logging_config
        return LoggingConfig() if self._compute is None else self._compute.logging_config

    @logging_config.setter
    def logging_config(self, value: LoggingConfig) -> None:
        self._logging_config = parameters.logging(value)
        self._callers.clear()

    @property
    def stream_logs(self) -> bool:
        """Whether calls and deploys show logs, unless a call says otherwise."""
        given = self._given_stream_logs
        return config.stream_logs if given is None else given

    @stream_logs.setter
    def stream_logs(self, value: bool | None) -> None:
        self._stream_logs = None if value is None else options.boolean("stream_logs", value)
        self._callers.clear()

    @property
    def _given_stream_logs(self) -> bool | None:
        """What goes before `kt.config.stream_logs`."""
        return self.logging_config.stream_logs if self._stream_logs is None else self._stream_logs

    def _declare(
        self,
        compute: Compute,
        init_args: Mapping[str, Any] | None,
        stream_logs: bool | None,
        reload_prefixes: str | Sequence[str] | None,
        placement: Placement,
    ) -> None:
        if init_args is not None and self.kind != "cls":
            raise SpecError(f"init_args are for classes; {self.name} is {_KINDS[self.kind]}")
        if reload_prefixes is not None:
            self.reload_prefixes = reload_prefixes
        if stream_logs is not None:
            self.stream_logs = stream_logs
        self.compute = compute
        self._init_args = None if init_args is None else parameters.init_args(init_args)
        if self._source is not None:
            self._source = self._source.with_placement(placement)

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

    # ----------------------------------------------------------------------------------- pickle

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs to find the service."""
        return {
            "_name": self._name,
            "_service_name": self._service_name,
            "_namespace": self.namespace,
            "_compute": self._compute,
            "_found": self._found if self._source is None else self._declared_ref(),
            "_init_args": self._init_args,
            "_reload_prefixes": self._reload_prefixes,
            "_options": replace(self._options, on_progress=None),
            "_stream_logs": self._stream_logs,
            "_logging_config": self._logging_config,
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.service_name!r}, namespace={self.namespace!r})"
