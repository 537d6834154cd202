"""The controller of this process, and the services there that it knows; `kt.globals`.

The local backend is a background service of the user, started on demand. What reaches a cluster is
loaded only by programs that use one (`kubetorch.sdk.reach`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kubetorch.config import environment
from kubetorch.config.settings import config
from kubetorch.sdk.reach import choosing
from kubetorch.sdk.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from kubetorch.sdk.calls.route import Route
    from kubetorch.sdk.controller import Controller
    from kubetorch.sdk.forwarding import Forwarding
    from kubetorch.sdk.streams.connecting import Location
    from kubetorch.wire.messages import WorkloadView

__all__ = ["config", "controller_client", "disable_decorators", "service_url", "session"]

#: Whether `@kt.compute` and its like leave functions and classes as they are.
disable_decorators = False


class _Registry:
    """What this process has open: a session for each controller, a route for each service.

    A forked child opens its own: locks and connections of the parent are of no use to it.
    """

    def __init__(self) -> None:
        self.clear()
        os.register_at_fork(after_in_child=self.clear)

    def clear(self) -> None:
        """Nothing is open."""
        self.sessions: dict[Path | choosing.Cluster, Session] = {}
        self.routes: dict[tuple[Session, str, str], Route] = {}
        self.forwardings: dict[tuple[Session, str, str], Forwarding] = {}


_registry = _Registry()


def session(kubeconfig: str | None = None) -> Session:
    """The way to the controller of the configured backend.

    Args:
        kubeconfig: The kubeconfig that a `kt.Compute` of this program names.

    Raises:
        KubetorchError: The cluster that is meant cannot be used.
    """
    cluster = choosing.choose(kubeconfig)
    key = environment.local_dir() if cluster is None else cluster
    found = _registry.sessions.get(key)
    if found is None:
        found = _registry.sessions.setdefault(key, _open(key))
    return found


def _open(key: Path | choosing.Cluster) -> Session:
    if isinstance(key, Path):
        return Session(lambda: _begin(key))
    from kubetorch.sdk.reach import sessions  # noqa: PLC0415  # not for programs without a cluster

    return sessions.open_session(key)


def close_all() -> None:
    """Close every connection of this process, and forget which backend was chosen."""
    routes, forwardings = _registry.routes, _registry.forwardings
    sessions = _registry.sessions
    _registry.clear()
    choosing.forget()
    for route in routes.values():
        route.close()
    for forwarding in forwardings.values():
        forwarding.close()
    for session in sessions.values():
        session.close()


def be_quiet() -> None:
    """Do not say in this process which backend was chosen, and why."""
    choosing.be_quiet()


def _begin(home: Path) -> Callable[[], Controller]:
    """Have a service started before anything else: that takes longer than a program's imports."""
    from kubetorch.local import lifetime  # noqa: PLC0415  # not for programs that never deploy

    wait = lifetime.begin(home)

    def connect() -> Controller:
        from kubetorch.lib.http import HttpClient  # noqa: PLC0415  # while the service starts
        from kubetorch.sdk.controller import Controller  # noqa: PLC0415

        service = wait()
        return Controller(HttpClient(service.url, service.token, hint="kt local status"))

    return connect


def controller_client() -> Controller:
    """The controller.

    Raises:
        ControllerUnavailableError: It cannot be reached or started.
    """
    return session().controller()


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
        from kubetorch.sdk.calls.route import Route  # noqa: PLC0415  # as in `_begin`

        def resolve() -> Location:
            return _location_of(opened, opened.get_workload(namespace, name))

        made = Route(name, resolve, way=opened.way)
        made.session = opened
        found = _registry.routes.setdefault(key, made)
    return found


def port_of(opened: Session, namespace: str, name: str) -> int:
    """A port of this machine that leads to the pods of a workload, from the first question on."""
    key = (opened, namespace, name)
    found = _registry.forwardings.get(key)
    if found is None:
        from kubetorch.sdk import forwarding  # noqa: PLC0415  # few programs need it

        def find() -> str:
            view = opened.get_workload(namespace, name)
            return opened.scaler(view) or opened.address(view, forwarding.choose(view))

        made = forwarding.Forwarding(find, opened.way, service=(namespace, name))
        found = _registry.forwardings.setdefault(key, made)
    return found.port


def base_url(opened: Session, view: WorkloadView) -> str:
    """Where other programs of this machine call a workload."""
    own, spec = view.spec.compute.endpoint, view.spec
    if own is not None and own.base_url is not None:
        return own.base_url
    found = opened.way.base_url(spec.namespace, spec.name)
    if found is None:
        return f"http://localhost:{port_of(opened, spec.namespace, spec.name)}"
    return found or view.url


def remember(opened: Session, view: WorkloadView) -> None:
    """Take note of where a workload is."""
    route(opened, view.spec.namespace, view.spec.name).locate(_location_of(opened, view))


def _location_of(opened: Session, view: WorkloadView) -> Location:
    from kubetorch.sdk.streams.connecting import Location, Scaler  # noqa: PLC0415  # as in `_begin`

    own = view.spec.compute.endpoint
    if own is not None and own.base_url is not None:
        return Location((own.base_url,), view.token)
    ready = sorted((pod for pod in view.pods if pod.is_ready), key=lambda pod: pod.ordinal)
    scaler, spec = None, view.spec
    if view.scaler:
        said = {} if ready else view.failure or {}
        failure = f"{said.get('error_type')}: {said.get('message')}" if said else ""
        scaler = Scaler(
            opened.way.scaler(spec.namespace, spec.name, view.scaler),
            {pod.name: opened.address(view, pod) for pod in view.pods if pod.url},
            spec.compute.launch_timeout,
            failure,
        )
    return Location(
        tuple(opened.address(view, pod) for pod in ready),
        view.token,
        tuple(pod.ordinal for pod in ready),
        scaler,
        {pod.name: pod.ended for pod in view.pods if pod.ended is not None},
    )


def forget(opened: Session, namespace: str, name: str) -> None:
    """Close the connections to the pods of a workload."""
    key = (opened, namespace, name)
    for way in (_registry.routes.pop(key, None), _registry.forwardings.pop(key, None)):
        if way is not None:
            way.close()


def delete(opened: Session, namespace: str, name: str) -> None:
    """Stop a workload and forget it.

    Raises:
        ServiceNotFoundError: There is none of that name.
    """
    opened.ask(lambda asked: asked.delete_workload(namespace, name))
    forget(opened, namespace, name)
