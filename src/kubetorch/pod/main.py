"""The agent: reads who it is, builds everything, runs until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import uvloop

from kubetorch._version import __version__
from kubetorch.datastore.blobs import BlobStore
from kubetorch.errors import KubetorchError
from kubetorch.lib import memory, processes
from kubetorch.lib.connections import Endpoint
from kubetorch.pod import identity
from kubetorch.pod.apps.gate import Gate
from kubetorch.pod.apps.host import AppHost
from kubetorch.pod.apps.process import AppProcess
from kubetorch.pod.calls.call import Call
from kubetorch.pod.calls.calls import Calls
from kubetorch.pod.calls.members import Membership
from kubetorch.pod.calls.results import Results
from kubetorch.pod.calls.streams import Streams
from kubetorch.pod.calls.uncounted import Presence
from kubetorch.pod.code import Code
from kubetorch.pod.contact import contact_of
from kubetorch.pod.environment import given
from kubetorch.pod.http.app import App
from kubetorch.pod.http.auth import Credentials, Guard
from kubetorch.pod.http.server import Server, bind
from kubetorch.pod.image.images import Images
from kubetorch.pod.interpreters import Interpreters, of_agent
from kubetorch.pod.logs import AgentLines, LogLine, PodLog
from kubetorch.pod.making import Maker
from kubetorch.pod.orphans import Orphans
from kubetorch.pod.session import Session
from kubetorch.pod.shells import Shells
from kubetorch.pod.supervisor import Supervisor
from kubetorch.pod.transfers import Transfers
from kubetorch.pod.view import PodView
from kubetorch.pod.workers.host import Worker, WorkerHost
from kubetorch.pod.workers.launching import Launched
from kubetorch.pod.workers.lines import Line
from kubetorch.specs.logging import LEVELS
from kubetorch.wire import routes, tokens, versions
from kubetorch.wire.messages import (
    Activity,
    CancelCall,
    Ending,
    FromController,
    Hello,
    Members,
    Reload,
    SendBlobs,
    Terminate,
    Welcome,
)
from kubetorch.wire.podenv import PodEnv

#: All addresses of a container: IPv4, or IPv6 and IPv4.
EVERYWHERE = ("0.0.0.0", "::")
#: Seconds from SIGTERM to SIGKILL that Kubernetes gives unless it is told otherwise, and those of
#: them that are for what comes after the calls: workers, outcomes, the last answers.
KILL_GRACE, LAST_WORDS = 30.0, 5.0
#: Seconds that workers have to end after their calls.
WORKER_GRACE = 2.0
#: Seconds for outcomes of spawned calls to reach the controller; the rest stays on disk.
UPLOAD_GRACE = 2.0

_log = logging.getLogger(__name__)


def main(
    environ: Mapping[str, str], zygote: Launched | None = None, *, refusal: str | None = None
) -> int:
    """Run the agent; its exit status.

    Args:
        environ: Its environment.
        zygote: A zygote that was started already.
        refusal: What `kubetorch.lib.mounts.separate` said, where the backend is this machine.
    """
    logging.basicConfig(
        stream=sys.stderr,
        level=_level(environ.get("KT_LOG_LEVEL", "")),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    try:
        pod = PodEnv.read(identity.complete(environ))
        is_local = pod.backend == "local"
        credentials = Credentials.read(pod.credentials_file) if is_local else Credentials()
        if not is_local:
            Path(pod.working_dir).mkdir(parents=True, exist_ok=True)
        view = PodView(pod, refusal)
        view.attach(pod.attachments_file)
        # A container is reached at its address, by probes, and through port-forwards at loopback.
        everywhere = EVERYWHERE[":" in pod.host]
        sock = bind(pod.host if is_local else pod.listen or everywhere, pod.port)
    except (KubetorchError, OSError) as error:
        _log.error("agent not started error=%s", error)
        return 1
    processes.become_subreaper()
    with sock:
        is_to_go_on = uvloop.run(_run(pod, credentials, environ, view, zygote, sock))
    if is_to_go_on:
        # As new, for a service that is deployed to this pod later.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    return 0


def _level(name: str) -> str:
    """The level of the agent's own lines; a name that is none must not keep it from starting."""
    return name.upper() if name.lower() in LEVELS else "INFO"


async def _run(
    pod: PodEnv,
    credentials: Credentials,
    environ: Mapping[str, str],
    view: PodView,
    zygote: Launched | None,
    sock: socket.socket,
) -> bool:
    """Whether the pod goes on afterwards."""
    agent = Agent(pod, credentials, given(environ), view, zygote)
    loop = asyncio.get_running_loop()
    grace = KILL_GRACE if pod.grace is None else pod.grace
    calls = max(grace - LAST_WORDS, grace / 4)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stop, signal.Signals(number).name, calls)
    await agent.run(sock)
    return agent.is_dismissed and pod.is_joined


class Agent:
    """Everything that an agent consists of, put together.

    Args:
        pod: Who the pod is.
        credentials: What it checks tokens with, and shows to the controller.
        environ: The environment that workers inherit.
        view: The file system as it sees it.
        zygote: A zygote that was started already.
    """

    def __init__(
        self,
        pod: PodEnv,
        credentials: Credentials,
        environ: Mapping[str, str],
        view: PodView,
        zygote: Launched | None = None,
    ) -> None:
        #: Whether the controller ended it, not who made the pod.
        self.is_dismissed = False
        self._pod = pod
        self._view = view
        self._incarnation = os.urandom(8).hex()
        self._stopped: asyncio.Future[tuple[str, float]] = (
            asyncio.get_running_loop().create_future()
        )
        root = Path(pod.root)
        store = BlobStore(root / "blobs")
        self._log = PodLog(root / "log", stdout=sys.stdout.fileno())
        contact = contact_of(pod, credentials.session)
        self._transfers = Transfers(store, contact)
        self._session = Session(
            contact=contact,
            hello=self._hello,
            activity=self._activity,
            on_message=self._on_message,
            on_settled=lambda call_id: self._results.forget(call_id),
            on_abandoned=lambda: self.stop("the folder of its controller is gone", 0.0),
        )
        self._results = Results(
            root / "results",
            pod_name=pod.pod,
            upload=self._transfers.upload,
            report=self._session.call,
        )
        self._members = Membership()
        self._calls = Calls(
            pod_name=pod.pod,
            records=self._results,
            on_change=self._calls_changed,
            clock=time.monotonic,
        )
        self._apps = AppHost(
            root,
            pod_name=pod.pod,
            on_line=self._on_app_line,
            on_exit=self._on_app_exit,
            on_change=self._session.app_changed,
            on_activity=self._session.activity_changed,
        )
        host = WorkerHost(
            pod_name=pod.pod, on_line=self._on_line, on_exit=self._on_exit, zygote=zygote
        )
        self._limit = None
        if pod.memory_limit is not None:
            from kubetorch.pod.memory_limit import MemoryLimit  # noqa: PLC0415  # few pods have one

            self._limit = MemoryLimit(
                pod.memory_limit,
                pod_name=pod.pod,
                processes=lambda: [*host.alive, *self._apps.alive],
            )
        images = Images(
            pod=pod,
            store=store,
            blobs=self._transfers,
            view=view,
            reporter=self._session,
            on_line=self._on_step_line,
        )
        maker = Maker(
            pod=pod,
            environ=environ,
            host=host,
            apps=self._apps,
            code=Code(root, Path(pod.working_dir), store, self._transfers),
            images=images,
            reporter=self._session,
        )
        interpreters = Interpreters(pod, environ, of_agent())
        interpreters.begin()
        self._supervisor = Supervisor(
            pod=pod,
            interpreters=interpreters,
            maker=maker,
            apps=self._apps,
            calls=self._calls,
            reporter=self._session,
        )
        audience = tokens.audience(pod.namespace, pod.workload)
        guard = Guard(credentials, audience=audience, host=pod.host, clock=time.time)
        self._guard = guard
        self._streams = Streams(
            incarnation=self._incarnation,
            pod_name=pod.pod,
            calls=self._calls,
            guard=guard,
            allocate=memory.allocate,
        )
        self._presence = Presence(self._streams.has_uncounted, guard.own_token, environ)
        gate = Gate(pod_name=pod.pod, guard=guard, host=self._apps)
        app = App(
            pod_name=pod.pod,
            guard=guard,
            calls=self._calls,
            members=self._members,
            images=images,
            supervisor=self._supervisor,
            apps=self._apps,
            gate=gate,
            log=self._log,
        )
        self._shells = Shells(
            pod_name=pod.pod,
            guard=guard,
            surroundings=self._supervisor.surroundings,
            on_change=self._session.activity_changed,
        )
        self._server = Server(app, self._accept, gate)

    def _calls_changed(self) -> None:
        self._session.activity_changed()
        self._presence.changed(self._calls.running)

    def _accept(self, path: str, headers: Mapping[str, str]) -> Endpoint:
        if path == routes.SHELL:
            return self._shells.accept(headers)
        return self._streams.accept(path, headers)

    # --------------------------------------------------------------------------------- its life

    def stop(self, reason: str, grace: float) -> None:
        """End soon: calls have `grace` seconds."""
        if not self._stopped.done():
            self._stopped.set_result((reason, grace))

    async def run(self, sock: socket.socket) -> None:
        """Serve until `stop`."""
        loop = asyncio.get_running_loop()
        orphans = Orphans()
        orphans.start()
        lines = AgentLines(self._log, self._pod.pod, loop)
        logging.getLogger("kubetorch").addHandler(lines)
        # The session is opened while the port is: the socket takes connections already.
        session = loop.create_task(self._session.run())
        await self._server.listen(sock)
        self._results.recover()
        _log.info("agent started pod=%s port=%s", self._pod.pod, self._pod.port)
        # What is here now stays: the collector need not look at it again and again.
        gc.freeze()
        gc.enable()
        if self._limit is not None:
            self._limit.start()
        try:
            reason, grace = await self._stopped
            await self._drain(reason, grace)
        finally:
            orphans.stop()
            if self._limit is not None:
                self._limit.stop()
            session.cancel()
            await asyncio.gather(session, return_exceptions=True)
            logging.getLogger("kubetorch").removeHandler(lines)
            self._log.close()

    async def _drain(self, reason: str, grace: float) -> None:
        _log.info("agent stops reason=%s grace=%s", reason, grace)
        self._streams.go_away(reason)
        await self._calls.drain(grace, reason)
        self._presence.close()
        await self._shells.close()
        await self._server.close()
        await asyncio.gather(
            self._supervisor.close(WORKER_GRACE), self._results.close(UPLOAD_GRACE)
        )
        self._transfers.close()

    # ----------------------------------------------------------------------------- the session

    def _hello(self) -> Hello:
        pod = self._pod
        host = f"[{pod.host}]" if ":" in pod.host else pod.host
        spec = self._calls.spec
        return Hello(
            namespace=pod.namespace,
            workload=pod.workload,
            pod=pod.pod,
            incarnation=self._incarnation,
            url=f"http://{host}:{pod.port}",
            protocol=versions.PROTOCOL,
            version=__version__,
            generation=self._supervisor.generation,
            python=(spec.runtime.version if spec else None) or sys.version.split()[0],
        )

    def _activity(self) -> Activity:
        return Activity(
            calls=self._calls.running + self._apps.busy + self._shells.running,
            last=max(self._calls.last, self._apps.last),
            workers=self._supervisor.workers,
            app=self._apps.view if self._supervisor.serves_app else None,
        )

    def _on_message(self, message: FromController) -> None:
        match message:
            case Reload():
                self._supervisor.on_reload(message)
            case Terminate(grace=grace, reason=reason):
                self.is_dismissed = not self._stopped.done()
                self.stop(reason, grace)
            case Ending():
                self._calls.ending = message
            case CancelCall(id=call_id, reason=reason):
                call = self._calls.find(call_id)
                if isinstance(call, Call):
                    call.revoke(reason)
            case Members():
                self._members.update(message)
            case Welcome():
                self._guard.take_key(bytes.fromhex(message.key))
            case SendBlobs():
                self._transfers.send_later(message.blobs, message.trees)

    # ----------------------------------------------------------------------------- the workers

    def _on_line(self, line: Line, worker: Worker) -> None:
        call = self._calls.by_number(worker.pid, line.call) if line.call is not None else None
        request = call.request.request_id if call is not None else None
        self._write_line(line, worker.generation, request)

    def _on_app_line(self, line: Line, generation: int) -> None:
        self._write_line(line, generation, None)

    def _write_line(self, line: Line, generation: int, request: str | None) -> None:
        pod, (text, source, level, time_, _) = self._pod.pod, line
        self._log.write(LogLine(time_, pod, text, source, level, request, generation))
        self._supervisor.on_line(line, generation)

    def _on_step_line(self, text: str, generation: int) -> None:
        line = LogLine(time.time(), self._pod.pod, text, "image", generation=generation)
        self._log.write(line, echo=False)

    def _on_exit(self, worker: Worker, error: KubetorchError) -> None:
        self._supervisor.on_exit(worker, error)

    def _on_app_exit(self, app: AppProcess) -> None:
        self._supervisor.on_app_exit(app)
