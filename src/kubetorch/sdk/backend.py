"""The choice of the backend, and the sessions of this process with controllers; `kt.globals`.

`choose` decides on the backend. `local` is this machine, with a background service of the user that
is started on demand; `kubernetes` is the cluster of the kubeconfig's context, or the cluster of
this pod. `auto` is the first of:

- in a pod of Kubetorch, the backend of the pod, from `KT_BACKEND`;
- the cluster that the user points to: `kubeconfig_path=`, `api_url`, `KUBECONFIG`;
- the cluster of the default kubeconfig, if the user has deployed to its context before, or if its
  API server answers at once and it has a controller;
- this machine.

A cluster that the user names and that cannot be used is an error, never this machine. The choice of
`auto` holds for the whole process: nothing is deployed half here and half there. The modules that
reach a cluster (`kubetorch.sdk.transport`) are imported only by programs that use one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from kubetorch.config import environment
from kubetorch.config.settings import config
from kubetorch.errors import KubetorchError, did_you_mean
from kubetorch.lib import terminal
from kubetorch.sdk import bars
from kubetorch.sdk.transport.session import Choice, ClusterSettings, Session
from kubetorch.sdk.tuning import TIMING

if TYPE_CHECKING:
    from kubetorch.sdk.calls.route import Location, Route
    from kubetorch.sdk.controller import Controller
    from kubetorch.sdk.transport.local_port import LocalPort
    from kubetorch.wire.messages import PodWait, Teardown, WorkloadView


class _Choices:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_quiet = False
        self.by_cluster: dict[ClusterSettings, Choice] = {}


choices = _Choices()
_is_on_this_machine = ContextVar("is_on_this_machine", default=False)


def choose(kubeconfig: str | None = None) -> Choice:
    if _is_on_this_machine.get():
        return Choice(None, "a replay runs on this machine")
    backend = config.backend
    if backend == "local":
        return Choice(None, "the setting backend is local")
    if kubeconfig is not None:
        file = Path(kubeconfig).expanduser()
        is_elsewhere = environment.kubernetes_service() is not None and not file.exists()
        # In a pod the declared path may be a file of the machine that deployed the code.
        kubeconfig = None if is_elsewhere else str(file)
    listed = environment.kubeconfig_list()
    cluster = ClusterSettings(kubeconfig or listed, config.install_namespace, config.api_url)
    pointers = {
        "api_url": cluster.api_url,
        "kubeconfig_path": kubeconfig,
        "KUBECONFIG": listed,
        "the setting backend is kubernetes": backend == "kubernetes",
    }
    for reason, is_given in pointers.items():
        if is_given:
            return Choice(cluster, reason)
    with choices.lock:
        if cluster not in choices.by_cluster:
            choices.by_cluster[cluster] = _detect(cluster)
        return choices.by_cluster[cluster]


def has_cluster() -> bool:
    """True if this program is pointed to a cluster, or there is a kubeconfig, or it is in a pod."""
    is_pointed = config.backend == "kubernetes" or config.api_url or environment.kubeconfig_list()
    has_kubeconfig = (Path.home() / ".kube" / "config").exists()
    return bool(is_pointed) or has_kubeconfig or environment.kubernetes_service() is not None


def _detect(cluster: ClusterSettings) -> Choice:
    """Look for a cluster that no setting names."""
    if not has_cluster():
        return Choice(None, "there is no kubeconfig")
    from kubetorch.sdk.transport import cluster_session  # noqa: PLC0415  # few programs

    return cluster_session.detect(cluster, patience=TIMING.controller_detection_seconds)


def _report_choice(opened: Session) -> None:
    if choices.is_quiet or config.quiet or environment.is_in_pod():
        return
    children = sys.modules.get("multiprocessing.process")
    if children is not None and children.parent_process() is not None:
        return  # the parent process has reported it
    where = (
        f"on {opened.pod_location}" if opened.is_local else f"in Kubernetes: {opened.pod_location}"
    )
    terminal.say_once(f"pods run {where} ({opened.choice.why})")


def choose_anew() -> None:
    choices.by_cluster.clear()


__all__ = [
    "be_quiet",
    "config",
    "controller_client",
    "disable_decorators",
    "service_url",
    "session",
]

#: True if `@kt.compute` and its like leave functions and classes as they are.
disable_decorators = False


class _Registry:
    """The open sessions of this process, one for each controller, and a route for each service.

    A forked child opens its own, for it cannot use the locks and connections of its parent.
    """

    def __init__(self) -> None:
        self.clear()
        os.register_at_fork(after_in_child=self.clear)

    def clear(self) -> None:
        self.sessions: dict[Path | ClusterSettings, Session] = {}
        self.routes: dict[tuple[Session, str, str], Route] = {}
        self.local_ports: dict[tuple[Session, str, str], LocalPort] = {}
        #: Services that this process has deployed or found.
        self.known_services: set[tuple[Session, str, str]] = set()


_registry = _Registry()


def session(kubeconfig: str | None = None) -> Session:
    """The session with the controller of the configured backend.

    Args:
        kubeconfig: The kubeconfig that a `kt.Compute` of this program names.

    Raises:
        KubetorchError: The chosen cluster cannot be used.
    """
    choice = choose(kubeconfig)
    key = environment.local_dir() if choice.cluster is None else choice.cluster
    controller_session = _registry.sessions.get(key)
    if controller_session is None:
        opened = _open(key)
        opened.choice = choice
        _report_choice(opened)
        controller_session = _registry.sessions.setdefault(key, opened)
    return controller_session


def _open(key: Path | ClusterSettings) -> Session:
    if isinstance(key, Path):
        from kubetorch.sdk.transport import local_session  # noqa: PLC0415  # by the first verb

        return local_session.open_session(key)
    from kubetorch.sdk.transport import cluster_session  # noqa: PLC0415  # where there is a cluster

    return cluster_session.open_session(key)


def note_deploy(opened: Session) -> None:
    """Remember the context of a deploy: `auto` chooses its cluster from now on."""
    if opened.context is not None:
        from kubetorch.sdk.transport import cluster_session  # noqa: PLC0415  # as in `_open`

        cluster_session.note_deploy(opened.context)


def announce_records() -> None:
    """Say once, to each user of a machine, that calls that fail keep their arguments."""
    if choices.is_quiet or config.quiet or environment.is_in_pod():
        return
    mark = environment.cache_dir() / "calls-are-kept"
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch(exist_ok=False)
    except OSError:  # it was said before, or would be said each time
        return
    with bars.above(sys.stderr):  # the deploy has one
        terminal.say_once(
            "calls that fail keep their arguments for 7 days, for kt replay; "
            'KT_RECORD=none, or kt.fn(..., record="none"), turns it off'
        )


@contextlib.contextmanager
def on_this_machine() -> Iterator[None]:
    """Have sessions of this context lead to the local backend, whatever is configured."""
    token = _is_on_this_machine.set(True)
    try:
        yield
    finally:
        _is_on_this_machine.reset(token)


def close_all() -> None:
    """Close every connection of this process, and forget which backend was chosen."""
    routes, local_ports = _registry.routes, _registry.local_ports
    sessions = _registry.sessions
    _registry.clear()
    choose_anew()
    for route in routes.values():
        route.close()
    for listener in local_ports.values():
        listener.close()
    for session in sessions.values():
        session.close()


def be_quiet() -> None:
    """Do not report in this process where pods run, because its own output does."""
    choices.is_quiet = True


def controller_client() -> Controller:
    """The controller.

    Raises:
        ControllerUnavailableError: It cannot be reached or started.
    """
    current_session = session()
    # The service of this machine ends when it is not used for a while, and is started again here.
    controller = (
        current_session.ask(_answering)
        if current_session.is_local
        else current_session.controller()
    )
    controller.find_method = functools.partial(_find_method, controller)
    return controller


def _answering(controller: Controller) -> Controller:
    controller.get_status()
    return controller


def _find_method(controller: Controller, name: str) -> object:
    """A method that a controller had in 0.5."""
    from kubetorch.sdk import cluster_objects  # noqa: PLC0415  # few programs

    return cluster_objects.method_of(controller, session, name)


def service_url() -> str:
    """Base URL of the controller.

    Raises:
        ControllerUnavailableError: It cannot be reached or started.
    """
    return controller_client().base_url


# ------------------------------------------------------------------------------------- workloads


def route(opened: Session, namespace: str, name: str) -> Route:
    """The route to the pods of a workload, which all handles in this process share."""
    key = (opened, namespace, name)
    shared_route = _registry.routes.get(key)
    if shared_route is None:
        from kubetorch.sdk.calls.route import Location, Route  # noqa: PLC0415  # by the first verb

        def resolve() -> Location:
            view = opened.get_workload(namespace, name)
            return Location.of_service(opened, view)._replace(token=opened.call_token(view))

        def wait_for_pods(wait: PodWait) -> Location:
            view = opened.ask(lambda controller: controller.wait_for_pods(namespace, name, wait))
            return Location.of_service(opened, view)._replace(token=opened.call_token(view))

        new_route = Route(name, resolve, transport=opened.transport, wait=wait_for_pods)
        new_route.session = opened
        shared_route = _registry.routes.setdefault(key, new_route)
    return shared_route


def port_of(opened: Session, namespace: str, name: str) -> int:
    """A port of this machine that leads to the pods of a workload; the first call opens it."""
    key = (opened, namespace, name)
    listener = _registry.local_ports.get(key)
    if listener is None:
        from kubetorch.sdk.transport import local_port  # noqa: PLC0415  # few programs need it

        def find() -> str:
            view = opened.get_workload(namespace, name)
            return opened.entrance(view) or opened.address(view, local_port.choose(view))

        new_listener = local_port.LocalPort(find, opened.transport, service=(namespace, name))
        listener = _registry.local_ports.setdefault(key, new_listener)
    return listener.port


def known_url(opened: Session, view: WorkloadView) -> str | None:
    """The URL of a workload for other programs of this machine; `None` if that takes a forward."""
    endpoint, spec = view.spec.compute.endpoint, view.spec
    if endpoint is not None and endpoint.base_url is not None:
        return endpoint.base_url
    transport_url = opened.transport.base_url(spec.namespace, spec.name)
    return view.url if transport_url == "" else transport_url


def base_url(opened: Session, view: WorkloadView) -> str:
    """As `known_url`; opens a port of this machine if the URL takes a forward."""
    url = known_url(opened, view)
    if url is None:
        url = f"http://localhost:{port_of(opened, view.spec.namespace, view.spec.name)}"
    return url


def remember(opened: Session, view: WorkloadView) -> None:
    _registry.known_services.add((opened, view.spec.namespace, view.spec.name))
    route(opened, view.spec.namespace, view.spec.name).accept(view)


def report_owner(opened: Session, view: WorkloadView) -> None:
    """Report whose service a bare name led to, unless this process has deployed or found it."""
    spec, creator = view.spec, view.creator
    is_own = view.is_own and creator is not None and creator.username == config.username
    is_known = (opened, spec.namespace, spec.name) in _registry.known_services
    if is_known or config.quiet or (is_own and environment.is_in_pod()):
        return
    creator_name = str(creator or "") or spec.username or "somebody without a user name"
    owner = "your service" if is_own else f"a service of {creator_name}"
    code = f"runs {spec.origin}" if spec.origin is not None else "does not say whose code it runs"
    terminal.say_once(f"{spec.name} in namespace {spec.namespace} is {owner}, and {code}")


def suggest_services(opened: Session, namespace: str, name: str) -> str:
    """A hint for a name that no service has: a similar name, if there is one."""
    where = f"kt list -n {namespace} shows the services"
    try:
        views = opened.ask(lambda controller: controller.list_workloads(namespace))
    except KubetorchError:  # who may not list them gets no help
        return where
    service_names = [view.spec.name for view in views]
    # The name behind a user name or a branch is a better suggestion than a similar name.
    longer_names = [
        service_name for service_name in service_names if service_name.endswith(f"-{name}")
    ]
    suggestion = (
        f"did you mean {longer_names[0]}?"
        if longer_names
        else did_you_mean(name, service_names, likeness=0.6)
    )
    return where if suggestion is None else f"{suggestion} {where}"


def forget(opened: Session, namespace: str, name: str) -> None:
    """Close the connections to the pods of a workload."""
    key = (opened, namespace, name)
    route, listener = _registry.routes.pop(key, None), _registry.local_ports.pop(key, None)
    if route is not None:
        route.close(is_torn_down=True)
    if listener is not None:
        listener.close()


def delete(opened: Session, namespace: str, name: str) -> Teardown:
    teardown = opened.ask(lambda controller: controller.delete_workload(namespace, name))
    forget(opened, namespace, name)
    return teardown
