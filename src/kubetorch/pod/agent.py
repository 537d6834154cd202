"""The agent: reads which pod it serves, makes its parts, and runs until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import uvloop

from kubetorch._version import __version__
from kubetorch.datastore.blobs import BlobStore
from kubetorch.errors import KubetorchError, OutOfMemoryError
from kubetorch.lib import (
    deadlines,
    files,
    http_server,
    memory,
    processes,
    proxy,
    runtime,
    sockets,
    websocket,
)
from kubetorch.lib.descriptors import DescriptorWatch
from kubetorch.lib.process_watch import OrphanReaper
from kubetorch.lib.tasks import cancel_all
from kubetorch.lib.websocket import Endpoint
from kubetorch.pod import environment, identity
from kubetorch.pod.apps.process import AppHost, AppProcess
from kubetorch.pod.apps.proxy import AppNames, AppProxy
from kubetorch.pod.calls import Call, Calls
from kubetorch.pod.data import DataMounts
from kubetorch.pod.debug_sessions import DebugSessions
from kubetorch.pod.environment import Interpreters, container_environ, user_environ
from kubetorch.pod.filesystem import PodFilesystem
from kubetorch.pod.http.app import App
from kubetorch.pod.http.auth import Credentials, Guard
from kubetorch.pod.http.published import Published
from kubetorch.pod.http.request_forwarder import RequestForwarder
from kubetorch.pod.image.preparation import Images
from kubetorch.pod.knative_keepalive import KnativeKeepAlive
from kubetorch.pod.load import LoadReports, Metrics, Usage
from kubetorch.pod.logs import AgentLines, Line, LogLine, PodLog
from kubetorch.pod.membership import Membership
from kubetorch.pod.peers import Peers
from kubetorch.pod.results import Outcomes, Results
from kubetorch.pod.session import ControllerAddress, Session
from kubetorch.pod.shells import Shells
from kubetorch.pod.streams import MESSAGE_LIMIT, Streams
from kubetorch.pod.supervisor import GenerationLoader, ProjectCode, Supervisor
from kubetorch.pod.transfers import Transfers
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.pod.user_process.tuning import LIMITS as WORKER_LIMITS
from kubetorch.pod.worker_process.worker import Worker, WorkerHost
from kubetorch.pod.worker_process.zygotes import LaunchedZygote
from kubetorch.specs.logging import LEVELS
from kubetorch.wire import messages, routes, tokens, versions
from kubetorch.wire.podenv import PodEnv

#: All addresses of a container: IPv4, or IPv6 and IPv4.
EVERYWHERE = ("0.0.0.0", "::")

_log = logging.getLogger(__name__)


def main(
    environ: Mapping[str, str], zygote: LaunchedZygote | None = None, *, refusal: str | None = None
) -> int:
    memory.give_back_soon()
    level = environ.get("KT_LOG_LEVEL", "")
    logging.basicConfig(
        stream=sys.stderr,
        # A name that is no level must not keep the agent from starting.
        level=level.upper() if level.lower() in LEVELS else "INFO",
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    try:
        pod = PodEnv.read(identity.complete(environ))
        is_local = pod.backend == "local"
        credentials = Credentials.read(pod.credentials_file) if is_local else Credentials()
        if not is_local:
            Path(pod.working_dir).mkdir(parents=True, exist_ok=True)
        filesystem = PodFilesystem(pod, refusal)
        pod = filesystem.place_working_dir(pod)
        filesystem.attach(pod.attachments_file)
        # A container is reached at its address, by probes, and through port-forwards at loopback.
        everywhere = EVERYWHERE[":" in pod.host]
        sock = bind(pod.host if is_local else pod.listen or everywhere, pod.port)
    except (KubetorchError, OSError) as error:
        _log.error("agent not started error=%s", error)
        return 1
    processes.become_subreaper()
    with sock:
        is_to_go_on = uvloop.run(_run(pod, credentials, environ, filesystem, zygote, sock))
    if is_to_go_on:
        # Start anew, for a service that is deployed to this pod later.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    return 0


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at this address; connections wait until the server is started."""
    is_ipv6 = ":" in host
    sock = socket.create_server(
        (host, port),
        family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
        backlog=LIMITS.listen_backlog_connections,
        dualstack_ipv6=is_ipv6 and socket.has_dualstack_ipv6(),
    )
    sock.setblocking(False)
    # Connections inherit it: the call of a client that vanishes without a word holds nothing.
    sockets.keep_alive(sock)
    return sock


async def _run(
    pod: PodEnv,
    credentials: Credentials,
    environ: Mapping[str, str],
    filesystem: PodFilesystem,
    zygote: LaunchedZygote | None,
    sock: socket.socket,
) -> bool:
    """Run the agent; true if the pod goes on afterwards."""
    environ = container_environ(environ)
    if filesystem.is_container:
        environ = user_environ(environ, Path(pod.root))
    agent = Agent(pod, credentials, environ, filesystem, zygote)
    loop = asyncio.get_running_loop()
    grace = TIMING.kill_grace_seconds if pod.grace is None else pod.grace
    calls = max(grace - TIMING.closing_seconds, grace / 4)
    signals = asyncio.Event()

    def end(name: str) -> None:
        signals.set()
        agent.stop(name, calls)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, signal.Signals(number).name)
    await agent.run(sock)
    if agent.is_dismissed and agent.gets_signal:
        # A kubelet that does not know yet that the pod is deleted would start the container again.
        await deadlines.wait_at_most(TIMING.deletion_seconds, signals.wait())
    return agent.is_dismissed and pod.is_joined


class Agent:
    def __init__(
        self,
        pod: PodEnv,
        credentials: Credentials,
        environ: Mapping[str, str],
        filesystem: PodFilesystem,
        zygote: LaunchedZygote | None = None,
    ) -> None:
        #: True if the controller ended the agent, not Kubernetes or a user.
        self.is_dismissed = False
        self._has_failed = False
        self._pod = pod
        self._environ = environ
        self._filesystem = filesystem
        self._root = Path(pod.root)
        self._incarnation = os.urandom(8).hex()
        # Why the agent ends; and the time of the loop until which calls may run.
        self._stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._deadline = math.inf
        audience = tokens.audience(pod.namespace, pod.workload)
        self._guard = Guard(credentials, audience=audience, host=pod.host, clock=time.time)
        self._make_session(credentials)
        self._make_calls()
        self._make_processes(zygote)
        self._make_supervisor()
        self._make_server()

    def _make_session(self, credentials: Credentials) -> None:
        """What this pod says to its controller, and moves to and from it."""
        pod, root = self._pod, self._root
        output = root / "agent.log" if pod.backend == "local" else None
        self._log = PodLog(root / "log", stdout=sys.stdout.fileno(), output=output)
        self._store = BlobStore(root / "blobs")
        contact = ControllerAddress.of_pod(pod, credentials.session)
        self._transfers = Transfers(self._store, contact, workload=pod.workload, pod=pod.pod)
        self._session = Session(
            address=contact,
            hello=self._hello,
            activity=self._activity,
            on_message=self._on_message,
            on_settled=lambda call_id: self._results.forget(call_id),
            on_abandoned=lambda: self.stop("the folder of its controller is gone", 0.0),
            load=lambda: self._load.report(),
        )
        self._members = Membership(self._session.send)

    def _make_calls(self) -> None:
        """The calls, and the results that outlive them."""
        root, pod_name = self._root, self._pod.pod
        self._results = Results(
            root / "results",
            pod_name=pod_name,
            upload=self._transfers.upload,
            report=self._session.report_call,
        )
        self._calls = Calls(
            pod_name=pod_name,
            results=self._results,
            on_line=self._write_line,
            outcomes=Outcomes(root / "outcomes", time.monotonic),
            values=Outcomes(
                root / environment.VALUES,
                time.monotonic,
                TIMING.kept_value_seconds,
                WORKER_LIMITS.stored_value_bytes + LIMITS.kept_value_overhead_bytes,
                LIMITS.kept_value_overhead_bytes,
            ),
            on_change=self._calls_changed,
        )
        self._peers = Peers(pod_name, self._guard.own_token, self._calls.references)

    def _make_processes(self, zygote: LaunchedZygote | None) -> None:
        """The processes of user code, and what watches them."""
        pod = self._pod
        self._apps = AppHost(
            root=self._root,
            pod_name=pod.pod,
            service=pod.workload,
            on_line=self._write_line,
            on_exit=self._on_app_exit,
            on_change=self._session.report_activity,
            on_activity=self._calls_changed,
        )
        self._metrics = Metrics(self._root / environment.METRICS)
        self._load = LoadReports(
            calls=lambda: self._calls.running + self._apps.requests,
            waiting=lambda: self._calls.not_begun + self._apps.waiting,
            came=lambda: self._calls.total + self._apps.total,
            metrics=self._metrics,
            usage=Usage(is_container=self._filesystem.is_container),
            send=self._session.send,
        )
        self._metrics.on_change = self._load.metrics_changed
        self._workers = WorkerHost(
            pod_name=pod.pod,
            service=pod.workload,
            on_line=self._write_line,
            on_exit=lambda worker, error: self._supervisor.on_exit(worker, error),
            zygote=zygote,
            memory_limit=pod.memory_limit,
            references=self._calls.references,
        )
        self._limit = None
        if pod.memory_limit is not None:
            self._limit = MemoryLimit(
                pod.memory_limit,
                pod_name=pod.pod,
                service=pod.workload,
                processes=lambda: [*self._workers.alive, *self._apps.alive],
            )
        self._descriptors = DescriptorWatch(self._give_up)

    def _make_supervisor(self) -> None:
        """What brings the code of a generation to this pod, and has processes run it."""
        pod = self._pod
        self._images = Images(
            pod=pod,
            store=self._store,
            blobs=self._transfers,
            filesystem=self._filesystem,
            session=self._session,
            on_line=self._on_step_line,
        )
        code = ProjectCode(self._root, Path(pod.working_dir), self._store, self._transfers)
        loader = GenerationLoader(
            pod=pod,
            environ=self._environ,
            host=self._workers,
            apps=self._apps,
            code=code,
            images=self._images,
            session=self._session,
            membership=self._members,
            peers=self._peers,
            incarnation=self._incarnation,
            on_line=self._write_line,
        )
        # The agent's interpreter, where it is the user's too.
        user_interpreter = None if runtime.is_used() else sys.executable
        interpreters = Interpreters(pod, self._environ, user_interpreter)
        interpreters.start()
        self._supervisor = Supervisor(
            pod=pod,
            interpreters=interpreters,
            loader=loader,
            project=code,
            apps=self._apps,
            calls=self._calls,
            session=self._session,
            membership=self._members,
            filesystem=self._filesystem,
            data=DataMounts(pod, self._environ, self._filesystem),
        )

    def _make_server(self) -> None:
        """What clients and other pods reach: streams, requests, apps, shells, debuggers."""
        pod, root, guard = self._pod, self._root, self._guard
        self._streams = Streams(
            incarnation=self._incarnation,
            pod_name=pod.pod,
            calls=self._calls,
            guard=guard,
            allocate=memory.allocate,
            memory_path=root / "memory" / "socket",
            memory_share=self._workers.memory_bytes // LIMITS.memory_share_divisor,
        )
        self._keepalive = KnativeKeepAlive(
            self._streams.has_unseen_call, guard.own_token, self._environ
        )
        self._make_app_proxy()
        self._debug_sessions = DebugSessions(
            pod_name=pod.pod,
            namespace=pod.namespace,
            host=self._environ.get("POD_IP", ""),
            path=environment.debugger_socket(root),
            guard=guard,
            workers=lambda: self._workers.alive,
            on_line=lambda line: self._write_line(line, self._supervisor.generation),
            on_change=self._session.activity_changed,
        )
        app = App(
            pod_name=pod.pod,
            guard=guard,
            calls=self._calls,
            members=self._members,
            images=self._images,
            supervisor=self._supervisor,
            workers=self._workers,
            apps=self._apps,
            gate=self._gate,
            log=self._log,
            forwarder=self._forwarder,
            debug_sessions=self._debug_sessions,
            published=Published(root / environment.PUBLICATIONS),
        )
        self._shells = Shells(
            pod_name=pod.pod,
            guard=guard,
            shell_environment=self._supervisor.shell_environment,
            on_change=self._session.activity_changed,
        )
        upgrade = websocket.upgrader(self._accept, max_message=MESSAGE_LIMIT)
        self._server = http_server.Server(
            app,
            upgrade=proxy.tunnels(
                lambda request: self._gate.has_path(request.raw_path), self._gate.open, upgrade
            ),
        )

    def _make_app_proxy(self) -> None:
        """What leads requests to the apps of this pod, and of others that are less busy."""
        pod, guard = self._pod, self._guard
        self._app_names = AppNames(pod.namespace, pod.workload)
        self._forwarder = RequestForwarder(
            pod_name=pod.pod,
            members=self._members,
            token=guard.own_token,
            load=lambda: self._calls.running + self._apps.busy,
            takes_turns=pod.backend == "local",
            is_on=not self._keepalive.is_on_knative,
        )
        self._gate = AppProxy(
            pod_name=pod.pod,
            guard=guard,
            host=self._apps,
            names=self._app_names,
            forwarder=self._forwarder,
        )

    def _accept(self, path: str, headers: Mapping[str, str]) -> Endpoint:
        if path == routes.SHELL:
            return self._shells.accept(headers)
        if path.startswith(f"{routes.DEBUGGER}/"):
            return self._debug_sessions.accept(path, headers)
        return self._streams.accept(path, headers)

    # --------------------------------------------------------------------------------- its life

    def stop(self, reason: str, grace: float) -> None:
        """End the agent soon: calls have `grace` seconds, or what is left of an earlier grace."""
        deadline = asyncio.get_running_loop().time() + grace
        self._deadline = min(self._deadline, deadline)
        if not self._stopped.done():
            self._stopped.set_result(reason)
            self._session.report_activity()

    def _give_up(self, reason: str) -> None:
        """End the agent with a failure, so that Kubernetes or the backend starts it again."""
        _log.error("agent ends error=%s", reason)
        self._has_failed = True
        self.stop(reason, 0.0)
        # Closing may wait for a descriptor for ever.
        asyncio.get_running_loop().call_later(TIMING.closing_seconds, os._exit, 1)

    async def run(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        orphans = OrphanReaper()
        orphans.start()
        lines = AgentLines(self._log, self._pod.pod, loop)
        logging.getLogger("kubetorch").addHandler(lines)
        self._metrics.open()
        self._streams.open()
        # The session opens at the same time as the server: the socket listens already.
        session = loop.create_task(self._session.run())
        await self._debug_sessions.start()
        await self._server.start(sock)
        self._results.recover()
        self._keepalive.start()
        _log.info("agent started pod=%s port=%s", self._pod.pod, self._pod.port)
        # The objects made so far stay: the garbage collector need not traverse them again.
        gc.freeze()
        gc.enable()
        if self._limit is not None:
            self._limit.start()
        self._descriptors.start()
        try:
            await self._drain(await self._stopped)
        finally:
            orphans.stop()
            self._descriptors.stop()
            if self._limit is not None:
                self._limit.stop()
            self._load.close()
            self._metrics.close()
            self._streams.close()
            await cancel_all([session])
            logging.getLogger("kubetorch").removeHandler(lines)
            self._log.close()
            if self._has_failed:
                os._exit(1)  # to close the event loop takes a descriptor, too

    async def _drain(self, reason: str) -> None:
        loop = asyncio.get_running_loop()
        grace = max(self._deadline - loop.time(), 0.0)
        _log.info("agent stops reason=%s grace=%s", reason, round(grace, 2))
        self._streams.stop_accepting(reason)
        self._server.stop_keeping_alive()
        if self._is_behind_service:
            # Until the nodes know that the pod leaves, they lead new connections here.
            await asyncio.sleep(min(TIMING.service_update_seconds, grace / 4))
        self._calls.stop_accepting(reason)
        self._apps.stop_accepting(self._calls.stopping_error())
        preempting = asyncio.ensure_future(self._workers.preempt(grace))
        # `stop` may shorten the time meanwhile.
        while loop.time() < self._deadline and (self._has_calls or not preempting.done()):  # noqa: ASYNC110  # two ends
            await asyncio.sleep(TIMING.closing_check_interval_seconds)
        self._calls.end_all(reason)
        self._apps.end_all(self._calls.ending_error(reason))
        await cancel_all([preempting])
        self._peers.close()
        self._keepalive.close()
        await self._forwarder.close()
        await self._shells.close()
        await self._debug_sessions.close()
        await self._server.close(TIMING.server_close_seconds)
        await asyncio.gather(
            self._supervisor.close(TIMING.worker_close_seconds),
            self._results.close(TIMING.outcome_upload_close_seconds),
        )
        self._transfers.close()

    @property
    def gets_signal(self) -> bool:
        """True if a kubelet sends SIGTERM at once when the pod is deleted.

        On Knative the queue-proxy delays it.
        """
        pod = self._pod
        is_of_kubelet = pod.backend == "kubernetes" and not pod.is_joined
        return is_of_kubelet and not self._keepalive.is_on_knative

    @property
    def _is_behind_service(self) -> bool:
        """True if a Kubernetes Service spreads new connections over pods that come and go.

        Knative's queue-proxy sees to that itself.
        """
        spec, pod = self._calls.spec, self._pod
        is_scaled = spec is not None and spec.compute.autoscaling is not None
        is_ended_by_cluster = pod.backend == "kubernetes" and not self.is_dismissed
        return is_scaled and is_ended_by_cluster and not self._keepalive.is_on_knative

    @property
    def _has_calls(self) -> bool:
        """True if calls or requests run, or a client reads the results of its calls.

        The app is told to end while WebSockets are open, so that it can close them its way.
        """
        requests = self._apps.requests + self._forwarder.running - self._gate.sockets
        return self._calls.running + requests > 0 or not self._streams.is_delivered

    # ----------------------------------------------------------------------------- the session

    def _calls_changed(self) -> None:
        self._session.activity_changed()
        if self._load.is_on:
            self._load.calls_changed()

    def _hello(self) -> messages.Hello:
        pod = self._pod
        host = f"[{pod.host}]" if ":" in pod.host else pod.host
        spec = self._calls.spec
        return messages.Hello(
            namespace=pod.namespace,
            workload=pod.workload,
            pod=pod.pod,
            incarnation=self._incarnation,
            url=f"http://{host}:{pod.port}",
            protocol=versions.PROTOCOL,
            version=__version__,
            generation=self._supervisor.generation,
            memory_socket=self._streams.memory_socket,
            python=((spec.runtime.version if spec else None) or sys.version.split()[0])[:100],
        )

    def _activity(self) -> messages.Activity:
        self._calls.request_waits()
        return messages.Activity(
            calls=self._calls.running + self._apps.busy + self._shells.running,
            last=max(self._calls.last, self._apps.last, self._shells.last_end),
            workers=self._supervisor.workers,
            app=self._apps.view if self._supervisor.serves_app else None,
            is_stopping=self._stopped.done(),
            queue=self._apps.queue if self._supervisor.serves_app else self._calls.queue,
            stopped=self._debug_sessions.stopped,
        )

    def _on_message(self, message: messages.FromController) -> None:
        match message:
            case messages.Reload():
                self._load.configure(message.spec)
                self._supervisor.on_reload(message)
            case messages.Terminate(grace=grace, reason=reason):
                self.is_dismissed = not self._stopped.done()
                self.stop(reason, grace)
            case messages.Ending():
                self._calls.ending = message
            case messages.CancelCall(id=call_id, reason=reason):
                call = self._calls.find(call_id)
                if isinstance(call, Call):
                    call.revoke(reason)
            case messages.Members():
                self._members.update(message)
                self._write_members(message)
                is_rank = message.world is not None
                self._session.beat(
                    TIMING.rank_heartbeat_seconds if is_rank else TIMING.heartbeat_seconds
                )
                if not self._stopped.done():  # else user code saves its state until the end
                    self._supervisor.on_members()
            case messages.Probe():
                self._session.probe(message)
            case messages.Welcome():
                self._guard.set_key(bytes.fromhex(message.key))
                self._app_names.controller_names = message.app_hosts
                self._calls.may_record = message.records
            case messages.RegroupFailed(id=call_id, failure=failure):
                self._members.forget_request(call_id)
                self._calls.refuse_waiting(call_id, failure)
            case messages.SendBlobs():
                self._transfers.send_later(message.blobs, message.trees)

    def _write_members(self, message: messages.Members) -> None:
        """Write the hosts of the siblings into a file for code in the pod."""
        hosts = [member.host for member in message.members if member.url]
        file = Path(self._pod.root, environment.MEMBERS)
        with contextlib.suppress(OSError):  # with a full disk the file is old, and calls go on
            files.write_atomically(file, "".join(f"{host}\n" for host in hosts).encode())

    # ----------------------------------------------------------------------------- the workers

    def _write_line(self, line: Line, generation: int, request: str | None = None) -> None:
        pod, (text, source, level, time_, *_) = self._pod.pod, line
        self._log.write(LogLine(time_, pod, text, source, level, request, generation, line.rank))
        self._supervisor.on_line(line, generation)

    def _on_app_exit(self, app: AppProcess) -> None:
        text = f"{app.ending}, and is started again"
        self._write_line(Line(text, "logger", "WARNING", time.time(), None), app.generation)
        self._supervisor.on_app_exit(app)

    def _on_step_line(self, text: str, generation: int) -> None:
        line = LogLine(time.time(), self._pod.pod, text, "image", generation=generation)
        self._log.write(line, echo=False)


class MemoryLimit:
    """The memory limit of a pod of the local backend.

    It ends the worker or app that uses most memory when the pod uses more than its limit.
    """

    def __init__(
        self,
        limit: int,
        *,
        pod_name: str,
        service: str,
        processes: Callable[[], Collection[Worker | AppProcess]],
    ) -> None:
        self._limit = limit
        self._service = service
        self._pod_name = pod_name
        self._processes = processes
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = self._loop.call_later(TIMING.memory_check_interval_seconds, self._check)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        begin = time.thread_time()  # of the processor: beside other programs it takes longer
        pids = processes.descendants(os.getpid())
        if processes.resident(pids) > self._limit:
            used = processes.proportional(pids)
            if used > self._limit:
                self._end_largest(used)
        cost = time.thread_time() - begin
        seconds = max(TIMING.memory_check_interval_seconds, cost / TIMING.memory_check_share)
        self._timer = self._loop.call_later(seconds, self._check)

    def _end_largest(self, used: int) -> None:
        sizes = {
            worker: processes.proportional(processes.descendants(worker.pid))
            for worker in self._processes()
            if worker.is_alive
        }
        if not sizes:
            return
        largest = max(sizes, key=lambda worker: sizes[worker])
        limit_text, used_text = processes.written(self._limit), processes.written(used)
        _log.warning(
            "memory limit exceeded pod=%s limit=%s used=%s", self._pod_name, limit_text, used_text
        )
        error = OutOfMemoryError(
            f"the worker of {self._service} in {self._pod_name} was killed: the pod used "
            f"{used_text} of memory, and its limit is {limit_text}",
            exit_code=-signal.SIGKILL,
            hint="resources.limits.memory in the manifest, or in service_template, allows more",
        )
        error.pod_name = self._pod_name
        error.limit_bytes, error.used_bytes = self._limit, used
        largest.abort(error)
