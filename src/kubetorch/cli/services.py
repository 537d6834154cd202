"""Services and pods that commands name, and the questions about them that the SDK answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from kubetorch.cli.output import Output
from kubetorch.cli.views import mode
from kubetorch.config import environment
from kubetorch.config.settings import config
from kubetorch.errors import KubernetesUnavailableError, ServiceNotFoundError, SpecError
from kubetorch.sdk import backend as sdk
from kubetorch.sdk.calls import options, target
from kubetorch.sdk.calls.caller import Caller
from kubetorch.sdk.compute import Compute
from kubetorch.sdk.service_logs import ServiceLogs
from kubetorch.sdk.transport import pod_transport
from kubetorch.sdk.transport.session import Session
from kubetorch.sdk.tuning import TIMING
from kubetorch.specs import names
from kubetorch.wire import exceptions
from kubetorch.wire.messages import CallView, DeployLog, PodView, Teardown, TokenView, WorkloadView

#: The first digits of the id of a call, as `kt` takes them; a whole id has 32.
_BEGINNING_OF_ID = re.compile(r"[0-9a-fA-F]{1,31}")
_FEWEST_DIGITS = 6
# Calls that an error about an ambiguous beginning names.
_SHOWN_MATCHES = 10


def open_session(namespace: str, output: Output, *, is_changing: bool) -> Session:
    sdk.be_quiet()
    session = sdk.session()
    if is_changing:
        _report_backend(session, namespace, output)
    elif session.choice.is_doubtful:
        output.warn(f"looking on this machine: {session.choice.why}")
    return session


def open_namespace(
    namespace: str | None, output: Output, *, is_changing: bool
) -> tuple[Session, str]:
    """The session, and the checked name of the namespace; the configured one if none is given."""
    chosen: str = names.check_namespace(namespace or config.get("namespace"))
    return open_session(chosen, output, is_changing=is_changing), chosen


def report_backends(computes: Iterable[Compute], output: Output) -> None:
    sdk.be_quiet()
    for session, namespace in dict.fromkeys(
        (compute.session(), compute.namespace) for compute in computes
    ):
        _report_backend(session, namespace, output)


def _report_backend(session: Session, namespace: str, output: Output) -> None:
    if session.choice.is_doubtful:
        raise KubernetesUnavailableError(
            f"{session.choice.why}; it is not known whether that cluster is meant or this machine",
            hint="KT_BACKEND=local means this machine, kt config set backend local for good; "
            "kt check looks at the cluster",
        )
    if not environment.is_in_pod():
        backend = "local" if session.is_local else "kubernetes"
        output.note(f"backend {backend}: {session.pod_location}, namespace {namespace}", "dim")


class Services:
    """The services of one namespace; the configured one if none is given."""

    def __init__(self, namespace: str | None, output: Output, *, is_changing: bool = False) -> None:
        self.namespace: str = namespace or config.get("namespace")
        self.username: str | None = config.username
        self._output = output
        #: The session with the controller.
        self.session = open_session(self.namespace, output, is_changing=is_changing)

    def all(self, *, all_namespaces: bool = False) -> list[WorkloadView]:
        where = None if all_namespaces else self.namespace
        return self.session.ask(lambda controller: controller.list_workloads(where))

    def get(self, name: str) -> WorkloadView | None:
        """The service of exactly this name, if there is one."""
        return self.session.find(self.namespace, (name,))

    def find(self, name: str) -> WorkloadView:
        """The service of this name, or of this name behind the user name."""
        service = self.session.find(self.namespace, self._candidates(name))
        if service is None:
            raise self._missing(name)
        self._output.note(f"Found {mode(service)} service {service.spec.name}", "green")
        return service

    def find_to_change(self, name: str, *, exact_match: bool = False) -> WorkloadView:
        """The service of this name to change: the user's own before another user's.

        Raises:
            SpecError: It is another user's, and `exact_match` is not set.
        """
        candidates = [name.lower()] if exact_match else self._candidates(name)
        views = [view for view in map(self.get, candidates) if view is not None]
        chosen = next((view for view in views if not self.is_foreign(view)), None)
        if chosen is None and exact_match:
            chosen = next(iter(views), None)
        if chosen is not None:
            self._output.note(f"Found {mode(chosen)} service {chosen.spec.name}", "green")
            return chosen
        if views:
            foreign_service, creator = views[0].spec.name, views[0].creator
            raise SpecError(
                f"the service {foreign_service} in namespace {self.namespace} is not yours: "
                f"{str(creator or '') or 'somebody without a user name'} deployed it",
                hint=f"to use it all the same, write {foreign_service} --exact-match",
            )
        raise self._missing(name)

    def _missing(self, name: str) -> ServiceNotFoundError:
        return ServiceNotFoundError(
            f"Failed to load service {name.lower()} in namespace {self.namespace}",
            hint=self.hint(name),
        )

    def hint(self, name: str) -> str:
        return sdk.suggest_services(self.session, self.namespace, name)

    def _candidates(self, name: str) -> list[str]:
        lowered = name.lower()
        if not lowered or "/" in lowered:
            raise SpecError(f"{name!r} is no name of a service", hint="kt list shows their names")
        prefix = f"{self.username}-" if self.username else ""
        # The name of a function, and of the service that it becomes.
        spellings = dict.fromkeys([lowered, lowered.replace("_", "")])
        candidates = [
            candidate
            for spelling in spellings
            for candidate in (spelling, prefix + spelling.removeprefix(prefix))
        ]
        return list(dict.fromkeys(candidates))

    def is_own(self, service: WorkloadView) -> bool:
        """True if the user created the service with the configured user name."""
        creator = service.creator
        return creator is not None and service.is_own and creator.username == self.username

    def is_foreign(self, service: WorkloadView) -> bool:
        """True if another user created it; a service that was written by hand is of every user."""
        return service.creator is not None and not self.is_own(service)

    def delete(self, service: WorkloadView, *, force: bool) -> Teardown:
        spec, grace = service.spec, 0.0 if force else None
        return self.session.ask(
            lambda controller: controller.delete_workload(spec.namespace, spec.name, grace=grace)
        )

    def scale(self, service: WorkloadView, changes: dict[str, Any]) -> WorkloadView:
        """Change keywords of `autoscale()` of a service; returns it as it is then."""
        spec = service.spec
        return self.session.ask(
            lambda controller: controller.scale_workload(spec.namespace, spec.name, changes)
        )

    def token(self, service: WorkloadView, *, ttl: float | None = None) -> TokenView:
        spec = service.spec
        return self.session.ask(
            lambda controller: controller.get_token(spec.namespace, spec.name, ttl=ttl)
        )

    def call_service(
        self, service: WorkloadView, method: str | None, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401  # what the user's callable returns
        """Call a service, or a method of it: by JSON, or by a codec that it allows instead.

        All keywords are the user's own, also names that are options of a call in a program; and the
        method is one in the pods, also if a handle has a member of that name.
        """
        if target.is_failed(service):
            raise target.failure_of(service, None)
        spec = service.spec
        sdk.remember(self.session, service)
        logging = spec.compute.logging
        shown = config.stream_logs if logging.stream_logs is None else logging.stream_logs
        called = Caller(
            replace(target.describe(service, method, None, logging), declared=options.RESERVED),
            sdk.route(self.session, spec.namespace, spec.name),
            options.CallOptions(stream_logs=shown),
        )
        return called(*args, **kwargs)

    def ask_pod(self, service: WorkloadView, pod: PodView, path: str) -> bytes:
        with (
            pod_transport.client(
                self.session.transport,
                self.session.address(service, pod),
                self.session.call_token(service),
                timeout=TIMING.pod_question_seconds,
            ) as http,
            http.request("GET", path) as response,
        ):
            body = response.read()
        if response.status != 200:
            raise exceptions.rebuild(exceptions.parse_json(body))
        return body

    def logs(
        self,
        service: WorkloadView,
        *,
        tail: int,
        follow: bool = False,
        pod: PodView | None = None,
        rank: int | None = None,
        system: bool = False,
    ) -> Iterator[DeployLog]:
        """The last lines of a service, and with `follow` the following ones."""
        spec = service.spec
        service_logs = ServiceLogs(
            self.session,
            spec.namespace,
            spec.name,
            pod=None if pod is None else pod.name,
            rank=rank,
            system=system,
        )
        return service_logs.lines(tail=tail, follow=follow)

    def calls(self, name: str | None) -> list[CallView]:
        if name is None:
            return self.session.ask(lambda controller: controller.list_calls(self.namespace, None))
        try:
            candidates = [self.find(name).spec.name]
        except ServiceNotFoundError:
            # Calls are kept longer than their service.
            candidates = self._candidates(name)
            if not any(map(self.calls_of, candidates)):
                raise
        return [call for candidate in candidates for call in self.calls_of(candidate)]

    def calls_of(self, workload: str) -> list[CallView]:
        """The calls of the service of exactly this name, the latest first."""
        return self.session.ask(lambda controller: controller.list_calls(self.namespace, workload))

    def call(self, call_id: str) -> CallView:
        return self.session.ask(lambda controller: controller.get_call(call_id))

    def call_id(self, text: str, *, may_be_request: bool = False) -> str:
        """The whole id of a call of the namespace, of which the first digits are given.

        A text that cannot be the beginning of an id, such as a whole one, is returned as it is, and
        so is one that may be the request of a call, if no id begins so.

        Raises:
            SpecError: No id begins so, or several do, which are named, or the digits are too few.
        """
        is_short = len(text) < _FEWEST_DIGITS
        if not _BEGINNING_OF_ID.fullmatch(text) or (is_short and may_be_request):
            return text
        if is_short:
            raise SpecError(
                f"{text} has too few digits for the id of a call",
                hint=f"write the first {_FEWEST_DIGITS} or more; kt calls lists the calls",
            )
        call_id = whole_call_id(text, self.calls(None))
        if call_id is None and not may_be_request:
            raise SpecError(
                f"no call of namespace {self.namespace} has an id that begins with {text}",
                hint="kt calls lists the calls; one of another namespace takes its whole id",
            )
        return call_id or text


def whole_call_id(beginning: str, calls: Iterable[CallView]) -> str | None:
    """The id of the call whose id begins so; `None` without one.

    Raises:
        SpecError: Several do, which are named.
    """
    matches = {call.id: call for call in calls if call.id.startswith(beginning.lower())}
    if beginning in matches or len(matches) < 2:
        return beginning if beginning in matches else next(iter(matches), None)
    lines = [f"\n  {call.id}  {call.callable}, {call.state}" for call in matches.values()]
    rest = "\n  …" if len(lines) > _SHOWN_MATCHES else ""
    raise SpecError(
        f"{len(lines)} calls have an id that begins with {beginning}:"
        f"{''.join(lines[:_SHOWN_MATCHES])}{rest}",
        hint="write more digits of the one that is meant",
    )


def choose_pod(service: WorkloadView, name_or_index: str) -> PodView:
    name, pods = service.spec.name, service.pods
    pods_hint = f"pods are {', '.join(pod.name for pod in pods)}" if pods else "it has no pods"
    if name_or_index.isdigit():
        if int(name_or_index) < len(pods):
            return pods[int(name_or_index)]
        raise SpecError(f"Pod index {name_or_index} is out of range", hint=pods_hint)
    for pod in pods:
        if pod.name == name_or_index:
            return pod
    raise SpecError(
        f"Service {name} does not have an associated pod called {name_or_index}", hint=pods_hint
    )
