"""Which backend runs the pods, and the sessions of this process with controllers; `kt.globals`.

`choose` finds out which backend is meant. `local` is this machine, with a background service of the
user that is started on demand; `kubernetes` is the cluster of the kubeconfig's context, or the one
that this pod runs in. `auto` is the first of:

- in a pod of Kubetorch, what that runs on: `KT_BACKEND` says so;
- the cluster that the user points to: `kubeconfig_path=`, `api_url`, `KUBECONFIG`;
- the cluster of the default kubeconfig, if the user has deployed to its context before, or if its
  API server answers at once and it has a controller;
- this machine.

A cluster that the user means and that cannot be used is an error, never this machine. What `auto`
found is kept for the process: nothing is deployed half here and half there. What reaches a cluster
is loaded only by programs that use one (`kubetorch.sdk.transport`).
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from kubetorch.config import environment
from kubetorch.config.settings import config
from kubetorch.errors import KubetorchError, did_you_mean
from kubetorch.lib import terminal
from kubetorch.sdk.transport.session import Choice, ClusterSettings, Session

if TYPE_CHECKING:
    from kubetorch.sdk.calls.route import Location, Route
    from kubetorch.sdk.controller import Controller
    from kubetorch.sdk.transport.local_port import LocalPort
    from kubetorch.wire.messages import WorkloadView

#: Seconds in which an API server has to say whether it has a controller.
PATIENCE = 1.5


class _Choices:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_quiet = False
        self.found: dict[ClusterSettings, Choice] = {}


choices = _Choices()


def choose(kubeconfig: str | None = None) -> Choice:
    backend = config.backend
    if backend == "local":
        return Choice(None, "the setting backend is local")
    if kubeconfig is not None:
        file = Path(kubeconfig).expanduser()
        is_elsewhere = environment.kubernetes_service() is not None and not file.exists()
        # In a pod the declaration is of the machine that deployed it.
        kubeconfig = None if is_elsewhere else str(file)
    listed = environment.kubeconfig_list()
    cluster = ClusterSettings(kubeconfig or listed, config.install_namespace, config.api_url)
    pointers = {
        "api_url": cluster.api_url,
        "kubeconfig_path": kubeconfig,
        "KUBECONFIG": listed,
        "the setting backend is kubernetes": backend == "kubernetes",
    }
    for why, is_given in pointers.items():
        if is_given:
            return Choice(cluster, why)
    with choices.lock:
        if cluster not in choices.found:
            choices.found[cluster] = _look(cluster)
        return choices.found[cluster]


def has_cluster() -> bool:
    """True if this program is pointed to a cluster, or there is a kubeconfig, or it is in a pod."""
    is_pointed = config.backend == "kubernetes" or config.api_url or environment.kubeconfig_list()
    has_kubeconfig = (Path.home() / ".kube" / "config").exists()
    return bool(is_pointed) or has_kubeconfig or environment.kubernetes_service() is not None


def _look(cluster: ClusterSettings) -> Choice:
    """Look for a cluster that nobody has pointed to."""
    if not has_cluster():
        return Choice(None, "there is no kubeconfig")
    from kubetorch.sdk.transport import cluster_session  # noqa: PLC0415  # few programs

    return cluster_session.detect(cluster, patience=PATIENCE)


def _say(opened: Session) -> None:
    if choices.is_quiet or config.quiet or environment.is_in_pod():
        return
    children = sys.modules.get("multiprocessing.process")
    if children is not None and children.parent_process() is not None:
        return  # the program itself has said it
    where = f"on {opened.place}" if opened.is_local else f"in Kubernetes: {opened.place}"
    terminal.say_once(f"pods run {where} ({opened.choice.why})")


def choose_anew() -> None:
    choices.found.clear()


__all__ = [
    "be_quiet",
    "config",
    "controller_client",
    "disable_decorators",
    "service_url",
    "session",
]

#: Whether `@kt.compute` and its like leave functions and classes as they are.
disable_decorators = False


class _Registry:
    """The open sessions of this process, one for each controller, and a route for each service.

    A forked child opens its own: locks and connections of the parent are of no use to it.
    """

    def __init__(self) -> None:
        self.clear()
        os.register_at_fork(after_in_child=self.clear)

    def clear(self) -> None:
        self.sessions: dict[Path | ClusterSettings, Session] = {}
        self.routes: dict[tuple[Session, str, str], Route] = {}
        self.local_ports: dict[tuple[Session, str, str], LocalPort] = {}
        #: Services that this process has deployed or found.
        self.known: set[tuple[Session, str, str]] = set()


_registry = _Registry()


def session(kubeconfig: str | None = None) -> Session:
    """The way to the controller of the configured backend.

    Args:
        kubeconfig: The kubeconfig that a `kt.Compute` of this program names.

    Raises:
        KubetorchError: The cluster that is meant cannot be used.
    """
    choice = choose(kubeconfig)
    key = environment.local_dir() if choice.cluster is None else choice.cluster
    found = _registry.sessions.get(key)
    if found is None:
        opened = _open(key)
        opened.choice = choice
        _say(opened)
        found = _registry.sessions.setdefault(key, opened)
    return found


def _open(key: Path | ClusterSettings) -> Session:
    if isinstance(key, Path):
        from kubetorch.sdk.transport import local_session  # noqa: PLC0415  # by the first verb

        return local_session.open_session(key)
    from kubetorch.sdk.transport import cluster_session  # noqa: PLC0415  # where there is a cluster

    return cluster_session.open_session(key)


def note_deploy(opened: Session) -> None:
    """Keep in mind that the user means the cluster of a context, to which something is deployed."""
    if opened.context is not None:
        from kubetorch.sdk.transport import cluster_session  # noqa: PLC0415  # as in `_open`

        cluster_session.note_deploy(opened.context)


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
    """Do not say in this process where pods run: what it does says so itself."""
    choices.is_quiet = True


def controller_client() -> Controller:
    """The controller.

    Raises:
        ControllerUnavailableError: It cannot be reached or started.
    """
    asked = session()
    # The service of this machine ends when nobody needs it for a while, and is started again here.
    found = asked.ask(_answering) if asked.is_local else asked.controller()
    found.find_method = functools.partial(_find_method, found)
    return found


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
    """The way to the pods of a workload, which all handles in this process share."""
    key = (opened, namespace, name)
    found = _registry.routes.get(key)
    if found is None:
        from kubetorch.sdk.calls.route import Location, Route  # noqa: PLC0415  # by the first verb

        def resolve() -> Location:
            view = opened.get_workload(namespace, name)
            return Location.of_service(opened, view)._replace(token=opened.call_token(view))

        made = Route(name, resolve, transport=opened.transport)
        made.session = opened
        found = _registry.routes.setdefault(key, made)
    return found


def port_of(opened: Session, namespace: str, name: str) -> int:
    """A port of this machine that leads to the pods of a workload, from the first question on."""
    key = (opened, namespace, name)
    found = _registry.local_ports.get(key)
    if found is None:
        from kubetorch.sdk.transport import local_port  # noqa: PLC0415  # few programs need it

        def find() -> str:
            view = opened.get_workload(namespace, name)
            return opened.scaler(view) or opened.address(view, local_port.choose(view))

        made = local_port.LocalPort(find, opened.transport, service=(namespace, name))
        found = _registry.local_ports.setdefault(key, made)
    return found.port


def known_url(opened: Session, view: WorkloadView) -> str | None:
    """The URL of a workload for other programs of this machine; `None` if that takes a forward."""
    own, spec = view.spec.compute.endpoint, view.spec
    if own is not None and own.base_url is not None:
        return own.base_url
    found = opened.transport.base_url(spec.namespace, spec.name)
    return view.url if found == "" else found


def base_url(opened: Session, view: WorkloadView) -> str:
    """As `known_url`, which a port of this machine is made for if it takes one."""
    found = known_url(opened, view)
    if found is None:
        found = f"http://localhost:{port_of(opened, view.spec.namespace, view.spec.name)}"
    return found


def remember(opened: Session, view: WorkloadView) -> None:
    _registry.known.add((opened, view.spec.namespace, view.spec.name))
    route(opened, view.spec.namespace, view.spec.name).accept(view)


def say_whose(opened: Session, view: WorkloadView) -> None:
    """Report whose service a bare name led to, unless this process has deployed or found it."""
    spec, creator = view.spec, view.creator
    is_own = view.is_own and creator is not None and creator.username == config.username
    is_known = (opened, spec.namespace, spec.name) in _registry.known
    if is_known or config.quiet or (is_own and environment.is_in_pod()):
        return
    by = str(creator or "") or spec.username or "somebody without a user name"
    whose = "your service" if is_own else f"a service of {by}"
    runs = f"runs {spec.origin}" if spec.origin is not None else "does not say whose code it runs"
    terminal.say_once(f"{spec.name} in namespace {spec.namespace} is {whose}, and {runs}")


def near_services(opened: Session, namespace: str, name: str) -> str:
    """A hint for a name that no service has: the one that is meant, if one is like it."""
    where = f"kt list -n {namespace} shows the services"
    try:
        found = opened.ask(lambda controller: controller.list_workloads(namespace))
    except KubetorchError:  # who may not list them gets no help
        return where
    known = [view.spec.name for view in found]
    # One that another user name, or a branch, stands in front of is meant rather than a like one.
    longer = [one for one in known if one.endswith(f"-{name}")]
    meant = f"did you mean {longer[0]}?" if longer else did_you_mean(name, known, likeness=0.6)
    return where if meant is None else f"{meant} {where}"


def forget(opened: Session, namespace: str, name: str) -> None:
    """Close the connections to the pods of a workload."""
    key = (opened, namespace, name)
    route, listener = _registry.routes.pop(key, None), _registry.local_ports.pop(key, None)
    if route is not None:
        route.close(is_torn_down=True)
    if listener is not None:
        listener.close()


def delete(opened: Session, namespace: str, name: str) -> list[str]:
    """Delete a service; returns what it leaves, in words."""
    left = opened.ask(lambda asked: asked.delete_workload(namespace, name))
    forget(opened, namespace, name)
    return left
