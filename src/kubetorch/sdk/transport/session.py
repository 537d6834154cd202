"""The connection of this process to a controller: made once, and again when it has ended."""

from __future__ import annotations

import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kubetorch.errors import ControllerUnavailableError, ServiceNotFoundError
from kubetorch.lib import processes
from kubetorch.sdk.transport.pod_transport import DIRECT, PodTransport
from kubetorch.sdk.tuning import TIMING

if TYPE_CHECKING:
    from kubetorch.sdk.controller import Controller
    from kubetorch.wire.messages import PodView, WorkloadView

_T = TypeVar("_T")
#: The verbs of a token that stands for the owner's own.
_OWNER_VERBS = ("exec",)


class ClusterSettings(NamedTuple):
    """A cluster, as a user names it."""

    kubeconfig: str | None
    install_namespace: str
    api_url: str | None


class Choice(NamedTuple):
    """A decision about where pods run.

    Attributes:
        cluster: The cluster; `None` for this machine.
        why: The reason, for people.
        is_doubtful: True if this machine was chosen because a cluster did not answer.
    """

    cluster: ClusterSettings | None
    why: str
    is_doubtful: bool = False


class Session:
    """A controller, which is connected again when it ended. Threads may share it.

    Args:
        connect: Connects with the controller.
        transport: Connects with pods.
        patience: Seconds for which a question is repeated while the controller is away.
        is_local: True for the controller of this machine.
        pod_location: The place where pods run, for people.
        context: The context of the kubeconfig for this cluster, if there is one.
    """

    #: Why this controller was chosen.
    choice: Choice

    def __init__(
        self,
        connect: Callable[[], Controller],
        transport: PodTransport = DIRECT,
        *,
        patience: float = 0.0,
        is_local: bool = True,
        pod_location: str = "this machine",
        context: str | None = None,
    ) -> None:
        self.transport = transport
        self.patience = patience
        self.is_local = is_local
        self.pod_location = pod_location
        self.context = context
        self._connect = connect
        self._lock = threading.Lock()
        self._controller: Controller | None = None
        #: The error of the last `warm`, if it failed.
        self._failure: Exception | None = None

    def controller(self) -> Controller:
        was_locked = self._lock.locked()
        with self._lock:
            if self._controller is None:
                if was_locked and self._failure is not None:
                    raise self._failure
                self._controller, self._failure = self._connect(), None
            return self._controller

    def warm(self) -> None:
        """Connect with the controller in a thread, while the caller does other things.

        An error is raised where the controller is needed.
        """
        if self._controller is not None or not self._lock.acquire(blocking=False):
            return
        try:
            # `threading` waits for the start; what a signal handler raises then would leave nobody
            # sure who releases the lock.
            start_new_thread(self._warm, ())
        except RuntimeError:  # the machine has no room for a thread
            self._lock.release()
            raise

    def _warm(self) -> None:
        """Connect with the controller; the lock is held."""
        self._failure = None
        try:
            self._controller = self._connect()
        except Exception as error:  # noqa: BLE001  # it is raised where the controller is waited for
            self._failure = error
        finally:
            self._lock.release()

    def reconnect(self, failed_controller: Controller) -> Controller:
        """Connect again with a controller that did not answer: it may have ended meanwhile."""
        with self._lock:
            if self._controller is failed_controller:
                self._controller = None
        failed_controller.close()
        return self.controller()

    def ask(self, question: Callable[[Controller], _T]) -> _T:
        """Ask the controller something that may be asked twice, and again if it did not answer."""
        controller = self.controller()
        try:
            return question(controller)
        except ControllerUnavailableError:
            deadline, delay = (
                time.monotonic() + self.patience,
                TIMING.controller_first_delay_seconds,
            )
        while True:
            controller = self.reconnect(controller)
            try:
                return question(controller)
            except ControllerUnavailableError:
                if time.monotonic() + delay > deadline:
                    raise
            time.sleep(delay)
            delay = min(2 * delay, TIMING.controller_longest_delay_seconds)

    @property
    def program(self) -> str:
        """This process, for a controller of the same machine; empty for another one."""
        return processes.identity() if self.is_local else ""

    def address(self, view: WorkloadView, pod: PodView) -> str:
        """URL of the agent of a pod, for this session's transport; empty while there is none."""
        return self.transport.address(view.spec.namespace, view.spec.name, pod)

    def scaler(self, view: WorkloadView) -> str:
        """URL of the scaler, which makes pods for calls; empty where calls go to pods."""
        if not view.scaler or self.transport is DIRECT:
            return ""
        return self.transport.scaler(view.spec.namespace, view.spec.name, view.scaler)

    def entrance(self, view: WorkloadView) -> str:
        """URL for plain requests to an autoscaled service, perhaps without a pod; empty for others.

        A forwarded port leads to one pod, which may go.
        """
        if not (view.scaler or view.scaling) or self.transport is DIRECT:
            return ""
        return self.transport.scaler(view.spec.namespace, view.spec.name, view.scaler)

    def call_token(self, view: WorkloadView) -> str:
        """The token for calls of a workload; the error of a refusal names the missing right."""
        spec = view.spec
        return view.token or self.ask(
            lambda controller: controller.get_token(spec.namespace, spec.name).token
        )

    def own_token(self, view: WorkloadView) -> str:
        """A token for acts of the workload's owner in its pods, such as a shell."""

        def get(controller: Controller) -> str:
            if controller.token is not None:
                return controller.token
            spec = view.spec
            return controller.get_token(spec.namespace, spec.name, verbs=_OWNER_VERBS).token

        return self.ask(get)

    def get_workload(self, namespace: str, name: str) -> WorkloadView:
        program = self.program
        return self.ask(
            lambda controller: controller.get_workload(namespace, name, program=program)
        )

    def find(self, namespace: str, names: Iterable[str]) -> WorkloadView | None:
        """The first of these workloads that exists."""
        for name in names:
            try:
                return self.get_workload(namespace, name)
            except ServiceNotFoundError:
                continue
        return None

    def close(self) -> None:
        """Close the connections of this process; the controller goes on."""
        with self._lock:
            controller, self._controller = self._controller, None
        if controller is not None:
            controller.close()
        self.transport.close()
