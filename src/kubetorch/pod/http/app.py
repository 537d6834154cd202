"""The agent's HTTP routes without the stream: the verbs that a token needs, and the answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from kubetorch.errors import CallRefusedError, KubetorchError
from kubetorch.lib import deadlines
from kubetorch.lib.asgi import (
    NDJSON,
    ClientGoneError,
    Receive,
    Request,
    Responder,
    Scope,
    Send,
    refusal,
    request_id,
)
from kubetorch.pod.apps.process import AppHost
from kubetorch.pod.apps.proxy import AppProxy
from kubetorch.pod.calls import Calls
from kubetorch.pod.debug_sessions import DebugSessions
from kubetorch.pod.http import broadcast, calling
from kubetorch.pod.http.auth import Guard
from kubetorch.pod.http.published import Published
from kubetorch.pod.http.request_forwarder import RequestForwarder
from kubetorch.pod.image import commands
from kubetorch.pod.image.preparation import Images
from kubetorch.pod.logs import PodLog
from kubetorch.pod.membership import Membership
from kubetorch.pod.supervisor import Supervisor
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.pod.worker_process.worker import WorkerHost
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import exceptions, messages, routes, tokens

_log = logging.getLogger(__name__)

_Answer = Callable[[Request, Responder], Awaitable[None]]


class Route(NamedTuple):
    method: str
    path: str
    opens: tuple[str, ...]
    about: str
    is_open: bool = False


_CALL = (tokens.CALL,)
_EXEC = (tokens.EXEC,)

TABLE = (
    Route("GET", "/", (), "whether it answers", is_open=True),
    Route("GET", routes.HEALTH, (), "whether it answers", is_open=True),
    Route("GET", routes.SERVING, (), "whether it serves, for probes", is_open=True),
    Route("GET", routes.READY, (), "which generation it serves"),
    Route("GET", routes.LOAD, _CALL, "how many calls it has"),
    Route("GET", routes.METRICS, (), "figures for Prometheus"),
    Route("GET", routes.OPENAPI, (), "what can be called"),
    Route("GET", routes.DOCS, (), "the same as a page"),
    Route("GET", routes.APP_STATUS, (), "whether its app runs"),
    Route("GET", routes.LOGS, (tokens.LOGS, tokens.CALL), "its log"),
    Route("GET", routes.STACKS, (tokens.LOGS, tokens.CALL), "what its workers do"),
    Route("GET", routes.DEBUGGER, (tokens.LOGS, tokens.CALL), "which calls wait for a debugger"),
    Route("POST", "/{callable}", _CALL, "a call"),
    Route("POST", "/{callable}/{method}", _CALL, "a call of a method"),
    Route("POST", routes.PUBLISHED, (tokens.DATA,), "blobs of keys that it publishes"),
    Route("POST", routes.RUN, _EXEC, "a command in the pod"),
    Route("GET", routes.DATA, (tokens.LOGS, tokens.CALL), "which data it shows"),
    Route("POST", routes.DATA, _EXEC, "new versions of its data"),
    Route("WebSocket", routes.STREAM, _CALL, "calls"),
    Route("WebSocket", routes.SHELL, _EXEC, "a shell in the pod"),
    Route("WebSocket", f"{routes.DEBUGGER}/{{session}}", _EXEC, "a debugger of a call"),
    Route("any", f"{routes.APP}/{{path}}", _CALL, "its app; with `public=True` without a token"),
)

_ROUTES = {(route.method, route.path): route for route in TABLE}


def required_verbs(method: str, path: str) -> tuple[str, ...] | None:
    """The verbs of which a token must allow one; `None` if the request needs no token.

    An open path may only be read: a callable may have the same name.
    """
    if path == routes.RUN:  # whatever the method
        return _EXEC
    if path == routes.PUBLISHED:
        return (tokens.DATA,)
    route = _ROUTES.get(("GET" if method == "HEAD" else method, path))
    if route is None:
        return _CALL if method == "POST" else ()
    return None if route.is_open else route.opens


class App(msgspec.Struct, eq=False, kw_only=True, dict=True):
    pod_name: str
    guard: Guard
    calls: Calls
    members: Membership
    images: Images
    supervisor: Supervisor
    workers: WorkerHost
    apps: AppHost
    gate: AppProxy
    log: PodLog
    forwarder: RequestForwarder
    debug_sessions: DebugSessions
    published: Published

    def __post_init__(self) -> None:
        self._routes: dict[str, _Answer] = {
            "/": self._health,
            routes.HEALTH: self._health,
            routes.SERVING: self._serving,
            routes.READY: self._ready,
            routes.LOAD: self._load,
            routes.METRICS: self._metrics,
            routes.OPENAPI: self._openapi,
            routes.DOCS: self._openapi,
            routes.LOGS: self._logs,
            routes.STACKS: self._stacks,
            routes.DEBUGGER: self._debuggers,
            routes.DATA: self._data,
            routes.APP_STATUS: self._app_status,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        name = routes.REQUEST_ID.lower()
        request.headers[name] = identity = request_id(request.headers.get(name, ""))
        respond = Responder(send, {routes.REQUEST_ID: identity})
        try:
            if self.gate.has_path(scope["raw_path"]):
                await self.gate.answer(scope, receive, send)
            else:
                await self._answer(request, respond, send)
        except ClientGoneError:
            return
        except KubetorchError as error:
            await self._fail(error, respond)
        except Exception as error:  # noqa: BLE001  # one request must not end the server
            _log.exception("request failed path=%s", request.path)
            await self._fail(error, respond)

    async def _answer(self, request: Request, respond: Responder, send: Send) -> None:
        headers = request.headers
        self.guard.check_origin(headers.get("host"), headers.get("origin"))
        verbs = required_verbs(request.method, request.path)
        if verbs is not None:
            self.guard.check_token(headers.get(routes.AUTHORIZATION.lower()), *verbs)
            request.admit()
        if request.path == routes.RUN and request.method == "POST":
            await commands.run(request, respond, self.images.run_now)
            return
        if request.path == routes.PUBLISHED and request.method == "POST":
            await self.published.answer(request, respond)
            return
        if request.path == routes.DATA and request.method == "POST":
            mounts = await self.supervisor.refresh_data()
            await respond.answer(200, messages.encode(mounts))
            return
        if request.method == "POST":
            await self._call(request, respond, send)
            return
        route = self._routes.get(request.path)
        if route is None:
            raise self._no_route(request)
        if request.method not in ("GET", "HEAD"):
            raise refusal(405, f"{request.path} can be read only", hint="use GET")
        await route(request, respond)

    async def _call(self, request: Request, respond: Responder, send: Send) -> None:
        """Run a call in this pod, on all pods, or on the least busy pod."""
        if self.calls.is_draining:
            raise self.calls.stopping_error()
        name, method = _target(request.path)
        spec = self.calls.spec
        if spec is not None and routes.ALONE.lower() not in request.headers:
            together, is_balanced = self._together(spec), spec.compute.is_balanced
            if together is not None:
                is_balanced = await calling.is_for_any(request)
            if together is not None and not is_balanced:
                await broadcast.call(request, respond, self.members, together)
                return
            ordinals = together or range(spec.compute.pods)
            if is_balanced and await self._forward(request, send, ordinals):
                return
        await calling.call(request, respond, self.calls, name, method)

    async def _forward(self, request: Request, send: Send, ordinals: Sequence[int]) -> bool:
        """Let a less busy pod run a call, or the pod of its key; false if this pod has to."""
        key = request.headers.get(routes.IDEMPOTENCY_KEY.lower())
        if key is None:
            member = await self.forwarder.choose()
        else:
            member = self.forwarder.choose_by(key, ordinals)
        if member is None:
            return False
        headers, receive = request.replay()
        return await self.forwarder.relay(member, request.scope, headers, receive, send)

    async def _fail(self, error: Exception, respond: Responder) -> None:
        failure = exceptions.describe_refusal(error, pod_name=self.pod_name, started=False)
        if respond.has_begun:
            await respond.write(failure.to_json() + b"\n", more=False)
        else:
            await respond.refuse(failure.status, failure.to_json())

    def _no_route(self, request: Request) -> KubetorchError:
        spec = self.calls.spec
        if spec is not None and request.path[1:].partition("/")[0] == spec.callable.name:
            return refusal(405, f"{request.path} is called with POST")
        return refusal(404, f"there is nothing at {request.path[:200]!r}")

    # ----------------------------------------------------------------------------------- routes

    async def _health(self, _request: Request, respond: Responder) -> None:
        await respond.answer_json(200, {"status": "healthy"})

    async def _serving(self, request: Request, respond: Responder) -> None:
        """See `routes.serving`."""
        wait = request.query("wait")
        with contextlib.suppress(TimeoutError):
            async with deadlines.timeout(
                min(float(wait), TIMING.serving_wait_longest_seconds) if wait.isdecimal() else 0.0
            ):
                while self.supervisor.is_starting:
                    await self.supervisor.changes.wait()
        status, text = (200, "serving") if self._is_serving else (503, "starting")
        await respond.answer_json(status, {"status": text})

    @property
    def _is_serving(self) -> bool:
        is_app = self.supervisor.serves_app
        serves = self.calls.is_serving or (is_app and not self.calls.is_draining)
        return bool(self.supervisor.generation) and serves

    async def _ready(self, request: Request, respond: Responder) -> None:
        requested_generation = request.query("launch_id") or None
        generation = self.supervisor.generation
        if not self._is_serving or (
            requested_generation is not None and requested_generation != str(generation)
        ):
            raise CallRefusedError(
                f"pod {self.pod_name} serves generation {generation}"
                if generation
                else f"pod {self.pod_name} serves nothing yet",
                hint=None
                if requested_generation is None
                else f"generation {requested_generation} was asked for",
            )
        spec = self._spec()
        await respond.answer_json(
            200,
            {
                "status": "ready",
                "callable": spec.callable.name,
                "generation": generation,
                "launch_id": str(generation),
            },
        )

    async def _load(self, _request: Request, respond: Responder) -> None:
        if not self._is_serving:
            raise CallRefusedError(f"pod {self.pod_name} serves nothing yet")
        await respond.answer_json(200, {"calls": self.forwarder.load()})

    async def _metrics(self, _request: Request, respond: Responder) -> None:
        calls = self.calls
        restarts, dropped = self.supervisor.restarts, self.log.dropped
        lost_lines = "Lines that could not be written to the log."
        figures = (
            ("calls_total", "counter", "Calls that were begun.", calls.total),
            ("calls_failed_total", "counter", "Calls that failed.", calls.failed),
            ("calls_running", "gauge", "Calls that have not ended.", calls.running),
            ("last_activity_timestamp", "gauge", "Last begin or end.", calls.last),
            ("generation", "gauge", "Generation that is served.", calls.generation),
            ("worker_restarts_total", "counter", "Workers that died and were replaced.", restarts),
            ("log_lines_dropped_total", "counter", lost_lines, dropped),
        )
        text = "".join(
            f"# HELP kubetorch_{name} {about}\n# TYPE kubetorch_{name} {kind}\n"
            f"kubetorch_{name} {value}\n"
            for name, kind, about, value in figures
        )
        await respond.answer(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")

    async def _openapi(self, request: Request, respond: Responder) -> None:
        from kubetorch.pod.http import openapi  # noqa: PLC0415  # rarely needed, and imports ast

        spec = self._spec()
        operations = await asyncio.to_thread(
            openapi.operations, spec, self.supervisor.code, self._together(spec)
        )
        if request.path == routes.OPENAPI:
            document = openapi.document(spec.callable, spec.name, operations)
            await respond.answer(200, json.dumps(document, indent=2).encode())
        else:
            base = f"http://{request.headers.get('host', '')}"
            text = openapi.page(spec.callable, spec.name, operations, base)
            await respond.answer(200, text.encode(), "text/html; charset=utf-8")

    def _together(self, spec: WorkloadSpec) -> tuple[int, ...] | None:
        return messages.called_together(spec, self.members.pool)

    async def _app_status(self, _request: Request, respond: Responder) -> None:
        view = self.apps.view if self.supervisor.serves_app else None
        status: dict[str, object] = {"running": None if view is None else view.state != "exited"}
        if view is not None and view.state == "exited":
            status["exit_code"] = view.exit_code
        elif view is not None:
            status["pid"] = view.pid
        await respond.answer_json(200, status)

    async def _logs(self, request: Request, respond: Responder) -> None:
        count = min(
            _number(request.query("tail", str(LIMITS.log_tail_lines))),
            LIMITS.log_tail_longest_lines,
        )
        if request.query("follow") not in ("1", "true"):
            self.log.flush()
            lines = await asyncio.to_thread(self.log.tail, count)
            await respond.answer(200, b"".join(lines), NDJSON)
            return
        await respond.begin(200, NDJSON)
        ends = [asyncio.ensure_future(request.disconnected())]
        if generation := request.query("app"):
            ends.append(asyncio.ensure_future(self.apps.end(_number(generation))))
        follower = self.log.follow(count)
        for end in ends:
            end.add_done_callback(lambda _: follower.close())
        try:
            async for piece in follower:
                await respond.write(piece)
            await respond.write(b"", more=False)
        finally:
            for end in ends:
                end.cancel()
            follower.close()

    async def _stacks(self, request: Request, respond: Responder) -> None:
        text = request.query("rank")
        rank = _number(text) if text else None
        workers = [worker for worker in self.workers.alive if rank in (None, worker.rank)]
        stacks = await asyncio.gather(*(worker.stacks() for worker in workers))
        if rank is None:
            stacks += [view for app in self.apps.alive for view in await app.stacks()]
        await respond.answer(
            200, messages.encode(sorted(stacks, key=lambda stack: stack.rank or 0))
        )

    async def _debuggers(self, request: Request, respond: Responder) -> None:
        await respond.answer(200, messages.encode(self.debug_sessions.views))

    async def _data(self, request: Request, respond: Responder) -> None:
        await respond.answer(200, messages.encode(self.supervisor.data.shown))

    def _spec(self) -> WorkloadSpec:
        if self.calls.spec is None:
            raise CallRefusedError("nothing is deployed on this pod yet")
        return self.calls.spec


def _target(path: str) -> tuple[str, str | None]:
    name, _, method = path[1:].partition("/")
    if not name or "/" in method:
        raise refusal(
            404, f"there is nothing to call at {path[:200]!r}", hint="POST /<callable>[/<method>]"
        )
    return name, method or None


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise refusal(400, f"{text[:40]!r} must be a number")
    return int(text[:9])
