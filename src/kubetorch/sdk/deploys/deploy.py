"""The deploy of one workload: scan, send new files, follow the events to *ready* or an error.

    reach the controller ─┐ (in a thread of its own)
    scan the project ─────┴─> POST deploy ──> Missing: upload, and again
                                         └──> Accepted, (Stage | DeployLog)* ──> Ready | Failed

After a controller that ends in the middle, such as a killed local service, the same deploy is sent
again, with its id. The flow is blocking; `run_async` runs it in a thread. Written as
coroutines for an event loop in the background, it would cost every program that deploys and calls
from plain threads the import of asyncio, which takes longer than a deploy without changes.

Beside the code a deploy names the installed modules that it imports, for the zygote's preload
(`find_imports`). From the deployed module through the project's own files, only imports count that
surely run when the module is imported: those at the top level, in `try` and `with` blocks and class
bodies, not those in functions, in handlers, or under any `if`. A module is named if it is installed
(it lies in a `site-packages` folder): the standard library costs little, and what lies elsewhere
may be code that the user edits, which the zygote must never have loaded. Nothing is imported here.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import os
import re
import sys
import threading
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from kubetorch._version import __version__
from kubetorch.config import environment
from kubetorch.datastore import ignore_rules, transfer
from kubetorch.datastore import scan as scanning
from kubetorch.datastore.blobs import digest_of
from kubetorch.datastore.scan import FileChangedError, Scan
from kubetorch.errors import (
    ControllerError,
    ControllerUnavailableError,
    ServiceTakenError,
    SpecError,
)
from kubetorch.lib import backoff, files, modules
from kubetorch.lib.frozen_values import FrozenValue
from kubetorch.lib.http_client import Response
from kubetorch.sdk import backend, logs, parameters, tracebacks
from kubetorch.sdk.bars import Bar
from kubetorch.sdk.calls.target import is_served, local_modules
from kubetorch.sdk.controller import Controller, deploy_events
from kubetorch.sdk.deployed_services import deployed_services
from kubetorch.sdk.deploys import attachments, origin, source
from kubetorch.sdk.deploys.source import Source
from kubetorch.sdk.logs import Screen
from kubetorch.sdk.secret import Secret
from kubetorch.sdk.transport.session import Session
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.logging import LoggingConfig
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import codecs, exceptions, frames, introspection, values, versions
from kubetorch.wire.messages import (
    Accepted,
    Deploy,
    DeployEvent,
    DeployLog,
    Failed,
    Missing,
    Ready,
    Stage,
    WorkloadView,
)


class Order(FrozenValue):
    """A deploy, as the user ordered it.

    Attributes:
        existing: Names of services; one that exists is used as it is.
        replace: True if it may replace another user's service.
        is_named: True if the user chose the name.
        callable: The identity of the callable, if that is not its file.
        on_existing: Called with a service that is used as it is.
        on_shown: Called with each line of the user's code that was shown.
    """

    source: Source
    spec: WorkloadSpec
    init_args: Mapping[str, Any] | None = None
    stream_logs: bool = True
    existing: tuple[str, ...] = ()
    secrets: Sequence[Secret] = ()
    replace: bool = False
    is_named: bool = False
    callable: str | None = None
    on_existing: Callable[[WorkloadView], object] = bool
    on_shown: Callable[[DeployLog], object] = bool


class _Bundle(FrozenValue):
    """A complete spec, and the blobs that it names."""

    spec: WorkloadSpec
    scans: tuple[Scan, ...]
    init_args: bytes | None

    def fresh(self) -> list[str]:
        """The blobs that the controller probably does not have yet."""
        argument_digests = [] if self.spec.init_args is None else [self.spec.init_args]
        return [*argument_digests, *(digest for scan in self.scans for digest in scan.fresh)]

    def packed(self, digests: Iterable[str], bar: Bar) -> Iterator[bytes]:
        """The compressed blobs; the bar shows the progress of their upload."""
        unique_digests = dict.fromkeys(digests)
        total, sent = sum(self._stream(digest)[0] for digest in unique_digests), 0
        unit, unit_bytes = ("MiB", 2**20) if total >= 2**20 else ("KiB", 2**10)

        def counted(pieces: Iterable[bytes]) -> Iterator[bytes]:
            nonlocal sent
            for piece in pieces:
                sent += len(piece)
                done, whole = (f"{size / unit_bytes:.1f}" for size in (sent, total))
                bar.update(f"uploading {done} of {whole} {unit}", sent / total)
                yield piece

        def stream(digest: str) -> tuple[int, Iterable[bytes]]:
            length, pieces = self._stream(digest)
            return length, counted(pieces)

        return transfer.compressed(unique_digests, stream)

    def _stream(self, digest: str) -> tuple[int, Iterable[bytes]]:
        if self.init_args is not None and digest == self.spec.init_args:
            return len(self.init_args), (self.init_args,)
        return next(scan for scan in self.scans if scan.has(digest)).stream(digest)


def begin(order: Order, session: Session) -> Deployment:
    spec = order.spec
    check_launchable(spec)
    _warn_of_returns(order)
    code_origin = origin.find(order.source)
    if order.callable is not None:
        code_origin = replace(code_origin, callable=order.callable)
    order = replace(
        order,
        spec=replace(
            spec,
            callable=replace(spec.callable, code=origin.code_of(order.source)),
            origin=replace(code_origin, is_named=order.is_named),
        ),
        replace=order.replace or environment.replaces(),
    )
    if spec.compute.freeze:
        order = _frozen(order, is_local=session.is_local)
    screen = backend.route(session, spec.namespace, spec.name).screen
    return Deployment(order, session, screen)


def _frozen(order: Order, *, is_local: bool) -> Order:
    """The deploy without code of this program, since the pods' image has the code.

    Pods of this machine have no image of their own, and run the project where it lies.
    """
    source = order.source.frozen()
    folder = order.source.locate().folder
    if is_local and folder is not None:
        parameters.warn(
            f"freeze=True: on this machine {order.spec.name} runs the project {folder} in place, "
            "since pods here have no image that could have it"
        )
        return order
    image_code, app = source.locate(), order.spec.callable.app
    callable_ref = replace(
        order.spec.callable,
        app=None if app is None else replace(app, folder=None),
        module=image_code.import_path,
        project=None,
        root="",
        roots=(),
        source_file=None,
        remote_dir=image_code.remote_dir,
    )
    return replace(order, source=source, spec=replace(order.spec, callable=callable_ref))


class Deployment:
    def __init__(self, order: Order, session: Session, screen: Screen) -> None:
        spec = order.spec
        self._order = order
        self._session = session
        self._lines = LaunchLines(
            screen, spec.name, spec.compute.logging, stream_logs=order.stream_logs
        )
        self._lines.on_shown = order.on_shown
        self._id = os.urandom(16).hex()
        #: Patience with a controller that cannot be reached; a local one is started again.
        self._patience = backoff.Patience(
            0.0 if session.is_local else session.transport.patience,
            first=TIMING.deploy_first_delay_seconds,
            limit=TIMING.deploy_longest_delay_seconds,
        )
        self._lock = threading.Lock()
        self._answer: Response | None = None
        self._is_cancelled = False
        self._is_accepted = False
        #: The former callable of the service, which its file does not have any more.
        self._renames = ""

    async def run_async(self) -> WorkloadView:
        """Awaitable form of `run`."""
        import asyncio  # noqa: PLC0415  # an awaiting program has loaded it

        try:
            return await asyncio.to_thread(self.run)
        except asyncio.CancelledError as interrupt:
            self.cancel()
            tracebacks.explain_interrupt(interrupt, self._interrupt_text())
            raise

    def cancel(self) -> None:
        """Stop waiting, from another thread. The controller may go on with the deploy."""
        with self._lock:
            self._is_cancelled = True
            if self._answer is not None:
                self._answer.abort()

    def run(self) -> WorkloadView:
        """Deploy, and wait for the end."""
        try:
            with self._lines.bar:
                return self._run()
        except KeyboardInterrupt as interrupt:
            tracebacks.explain_interrupt(interrupt, self._interrupt_text())
            raise

    def _interrupt_text(self) -> str:
        name = self._order.spec.name
        if not self._is_accepted:
            return f"{name} was not deployed."
        return f"The deploy of {name} goes on: kt status {name}, kt teardown {name}."

    def _run(self) -> WorkloadView:
        existing_service = self._find_existing()
        if existing_service is not None:
            return existing_service
        bar = self._lines.bar
        bar.update("looking for secrets and volumes")
        self._provide()
        bar.update("reading the project")
        bundle = self._bundle()
        deadline = (
            time.monotonic() + bundle.spec.compute.launch_timeout + TIMING.deploy_margin_seconds
        )
        bar.update("connecting")
        controller = self._session.controller()
        fresh = bundle.fresh()
        attempts_left = LIMITS.deploy_attempts
        while attempts_left:
            attempts_left -= 1
            try:
                last = self._attempt(controller, bundle, fresh, deadline)
                if isinstance(last, Ready):
                    deployed_services.note(self._session, last.workload)
                    return last.workload
                fresh = []
                controller.upload(bundle.packed(last.blobs, bar), bundle.spec.namespace)
            except ServiceTakenError as error:
                if self._renames or not self._is_renamed(error):
                    raise
                self._renames = error.callable
            except FileChangedError:
                if not attempts_left:
                    raise
                bundle = self._bundle()
                fresh = bundle.fresh()
            except ControllerUnavailableError:
                if self._is_cancelled or time.monotonic() > deadline:
                    raise
                pause = self._patience.pause()
                if pause is not None:
                    attempts_left += 1
                    time.sleep(pause)
                elif not attempts_left:
                    raise
                bar.update("waiting for the controller, which does not answer")
                controller = self._session.reconnect(controller)
        raise ControllerError(
            f"the controller lacked blobs of {bundle.spec.name} that it was sent "
            f"{LIMITS.deploy_attempts} times",
            hint="kt local status says where its log is",
        )

    def _is_renamed(self, error: ServiceTakenError) -> bool:
        """True if the service is of this project, and its file lacks its callable now."""
        code_origin = self._order.spec.origin
        is_own = (
            code_origin is not None and code_origin.name == error.project and ":" in error.callable
        )
        return is_own and not origin.is_defined(self._order.source, error.callable)

    def _find_existing(self) -> WorkloadView | None:
        """A service to use as it is: it serves calls, or gets a pod when they come."""
        order = self._order
        if not order.existing:
            return None
        service = self._session.find(order.spec.namespace, order.existing)
        if service is None or not is_served(service):
            return None
        order.on_existing(service)
        return service

    def _provide(self) -> None:
        """Provide the secrets and volumes of the workload."""
        order = self._order
        if order.secrets or order.spec.compute.volumes:
            spec = self._session.ask(
                lambda controller: attachments.provide(controller, order.spec, order.secrets)
            )
            self._order = order = replace(order, spec=spec)
        if order.spec.compute.data:
            from kubetorch.sdk.data import mounts  # noqa: PLC0415  # for deploys with data

            compute = order.spec.compute
            namespace = order.spec.namespace
            data = mounts.resolved(self._session, namespace, compute, order.secrets)
            spec = replace(order.spec, compute=replace(compute, data=data))
            self._order = replace(order, spec=spec)

    def _bundle(self) -> _Bundle:
        order = self._order
        if order.source.is_interactive and order.source.callable_object is not None:
            from kubetorch.sdk.deploys import notebook  # noqa: PLC0415  # for interactive sessions

            notebook.write_module(order.source.callable_object, order.source.interactive_file())
        location, cache = order.source.locate(), environment.cache_dir()
        compute = order.spec.compute
        copied_files = () if compute.image is None else attachments.copied_paths(compute.image)
        scans: list[Scan] = []
        preload: tuple[str, ...] = ()
        project: Scan | None = None
        if location.folder is not None:
            filter_text = environment.rsync_filters()
            filters = None if filter_text is None else ignore_rules.parse_filters(filter_text)
            if location.source_file is not None:
                copied_files += (str(location.folder / location.source_file),)
            options = scanning.Options(
                only=location.only,
                cache=cache,
                filters=filters,
                link_targets=copied_files,
                excluded_folders=environment.own_folders(),
            )
            project = scanning.scan(location.folder, options)
            if not compute.freeze:  # else it runs in place
                scans.append(project)
            if location.source_file is not None and order.spec.callable.app is None:
                entry = location.folder / location.source_file
                roots = (location.root, "", *order.spec.callable.roots)
                preload = find_imports(
                    entry, [location.folder / root for root in roots], cache=cache
                )
        tree = scans[0].digest if scans else None
        if compute.image is not None and compute.image.steps:
            image, copied = attachments.scan_copies(compute.image, cache=cache)
            compute = replace(compute, image=image)
            scans += copied
        self._warn(scans, compute)
        init_args = None
        if order.init_args is not None:
            init_args = codecs.encode_arguments(order.init_args, "init_args")
        runtime = source.describe_runtime(location.folder, preload, is_local=self._session.is_local)
        if project is not None and compute.freeze:
            runtime = replace(
                runtime, project_folder=str(location.folder), project_digest=project.digest
            )
        spec = replace(
            order.spec,
            compute=compute,
            tree=tree,
            init_args=None if init_args is None else digest_of(init_args),
            runtime=runtime,
            instance=self._id if _is_always_new(order.spec) else None,
        )
        return _Bundle(spec, tuple(scans), init_args)

    def _warn(self, scans: Iterable[Scan], compute: ComputeSpec) -> None:
        for scan in scans:
            for warning in scan.warnings:
                self._lines.warn(warning)
        target = self._order.spec.callable
        if compute.dispatch == "any" and compute.pods > 1 and target.kind == "cls":
            self._lines.warn(
                f"{target.name} has an instance in each of {compute.pods} pods, with a state of "
                'its own, and a call reaches any of them (dispatch="any")'
            )

    def _attempt(
        self, controller: Controller, bundle: _Bundle, fresh: Iterable[str], deadline: float
    ) -> Ready | Missing:
        """Send the deploy and follow its events, up to its end or to the missing blobs."""
        head = Deploy(
            id=self._id,
            spec=bundle.spec,
            protocol=versions.PROTOCOL,
            version=__version__,
            stream_logs=self._order.stream_logs,
            replace=self._order.replace,
            program=self._session.program,
            renames=self._renames,
        )
        silence = max(deadline - time.monotonic(), 1.0)
        packed = bundle.packed(fresh, self._lines.bar)
        with controller.begin_deploy(head, packed, silence=silence) as answer:
            backend.note_deploy(self._session)
            if bundle.spec.callable.kind != "app" and bundle.spec.callable.record != "none":
                backend.announce_records()
            with self._lock:
                self._answer = answer
                if self._is_cancelled:
                    answer.abort()
            try:
                # The first call needs this import, and here the program only waits.
                importlib.import_module("kubetorch.sdk.calls.caller")
                return self._follow(deploy_events(answer), bundle)
            finally:
                with self._lock:
                    self._answer = None

    def _follow(self, events: Iterable[DeployEvent], bundle: _Bundle) -> Ready | Missing:
        for event in events:
            self._patience.renew()
            if isinstance(event, (Ready, Missing)):
                return event
            if isinstance(event, Accepted):
                self._is_accepted = True
                self._lines.accepted(bundle.spec.compute.pods)
            elif isinstance(event, DeployLog):
                self._lines.log(event)
            elif isinstance(event, Stage):
                self._lines.stage(event)
            elif isinstance(event, Failed):
                modules = local_modules(bundle.spec.callable, is_script=True)
                error = exceptions.rebuild(exceptions.parse(event.failure), modules=modules)
                source.explain_missing(error, self._order.source.locate())
                raise error
        raise ControllerUnavailableError(
            f"the controller did not say how the deploy of {bundle.spec.name} ended"
        )


def _is_always_new(spec: WorkloadSpec) -> bool:
    """True if each deploy makes a new generation: an instance, a run, or forced steps."""
    steps = spec.compute.image.steps if spec.compute.image is not None else ()
    return spec.callable.kind != "fn" or any(step.force for step in steps)


# -------------------------------------------------------------- what cannot be launched


def check_launchable(spec: WorkloadSpec) -> None:
    """Refuse a service that would not run as it is declared."""
    name, compute, ref = spec.name, spec.compute, spec.callable
    if ref.kind == "cls" and compute.num_proc == "auto":
        raise SpecError(
            f'num_proc="auto" would make an unknown number of instances of the class {ref.name}',
            hint="num_proc=4 makes 4 in each pod, each with a state of its own",
        )
    if ref.app is not None and compute.num_proc is not None:
        raise SpecError(
            f"num_proc is {compute.num_proc!r}, and {name} is an app: it starts its own processes"
        )
    if ref.app is not None and ref.app.port is None and compute.concurrency is not None:
        raise SpecError(
            f"concurrency is {compute.concurrency}, and {name} is a command without a port, which "
            "nobody calls",
            hint="kt.app(..., port=...) has requests that can be bounded",
        )
    if ref.batched and compute.distribution is not None:
        method = ref.batched[0].name
        raise SpecError(
            f"{ref.name}{'.' * bool(method)}{method} is batched and {name} is distributed: a call "
            "runs on all ranks, and not with others",
            hint="leave out distribute(), or @kt.batched",
        )
    has_line = compute.concurrency_of(1) is not None or bool(ref.batched)
    if compute.max_queue is not None and not has_line:
        raise SpecError(
            f"max_queue is {compute.max_queue}, and nothing bounds how many calls of {name} run at "
            "once, so that others would wait",
            hint="kt.Compute(concurrency=N, max_queue=M)",
        )
    if ref.project is not None and compute.working_dir is not None:
        project = f"{compute.working_dir}/{ref.project}"
        for mount in compute.data:
            if f"{mount.path}/".startswith(f"{project}/"):
                raise SpecError(
                    f"data[{mount.path!r}] is {mount.key!r}, and the code of {name} lies at "
                    f"{project}",
                    hint="choose a path outside of the code",
                )
    endpoint = None if compute.endpoint is None else compute.endpoint.base_url
    if endpoint is not None and not endpoint.startswith("http://"):
        raise SpecError(
            f"{name} cannot be launched: the url of its endpoint is {endpoint!r}, and calls go to "
            "http:// alone",
            hint="give the endpoint the address that the pods have inside the cluster",
        )
    if compute.gpu_memory is not None and compute.queue is None:
        parameters.warn(
            f"gpu_memory={compute.gpu_memory!r} limits nothing: a pod of {name} gets a whole GPU. "
            'Only the KAI scheduler shares GPUs, with kt.Compute(queue="...")'
        )


def _warn_of_returns(order: Order) -> None:
    """Warn of functions whose annotation names a return value that cannot travel."""
    spec, function = order.spec, order.source.callable_object
    if function is None or codecs.usual(spec.compute.allowed_serialization) != "json":
        return
    functions = {spec.callable.name: function}
    if spec.callable.kind == "cls":
        functions = {
            f"{spec.callable.name}.{name}": member
            for name, member in vars(function).items()
            if callable(member) and not name.startswith("_")
        }
    for name, member in functions.items():
        # Annotations may be any code of the user's.
        kind = introspection.attempt(_lost_return, None, introspection.unwrapped(member))
        if kind is not None:
            parameters.warn(
                f"{name} returns a {values.name_of(kind)}, as its annotation says, which cannot "
                "travel: a call fails at its end, and its pod keeps the value for 1 h (kt.calls). "
                'kt.Compute(allowed_serialization=["pickle"]) sends it'
            )


def _lost_return(function: Callable[..., Any]) -> type | None:
    return _lost_class(typing.get_type_hints(function).get("return"))


def _lost_class(annotation: object) -> type | None:
    """The class in an annotation whose instances cannot travel."""
    if typing.get_origin(annotation) in (type, Callable):
        return None
    if isinstance(annotation, type) and values.never_travels(annotation):
        return annotation
    inner = map(_lost_class, typing.get_args(annotation))
    return next((kind for kind in inner if kind is not None), None)


# ------------------------------------------------------------------- what a deploy shows

#: Levels at which only warnings among the events are shown.
_QUIET = ("warning", "error", "critical")
#: The activity of a pod in each stage.
_STAGES = {
    "starting": "starting",
    "fetching": "fetching the code",
    "preloading": "importing libraries",
    "importing": "loading the code",
    "joining": "waiting for the other pods",
}
#: Text that differs between two events of one cause.
_VARYING = re.compile(r"\d[\d.:]*\w*")


class LaunchLines:
    """The lines of one deploy. Each is shown once, also when the events are sent again."""

    def __init__(
        self, screen: Screen, service: str, config: LoggingConfig, *, stream_logs: bool
    ) -> None:
        self._screen = screen
        self._service = service
        self._config = config
        self._stream_logs = stream_logs
        self._shown: set[DeployLog | Stage | str] = set()
        self.on_shown: Callable[[DeployLog], object] = bool
        #: The progress of the deploy.
        self.bar = Bar(service)
        self._ready, self._pods = 0, 1
        #: By pod, its activity, and the share of its image's steps that are done.
        self._activities: dict[str, tuple[str, float | None]] = {}

    def accepted(self, pods: int) -> None:
        """Show that the controller has accepted the deploy, and waits for this number of pods."""
        self._pods = pods
        self._wait()

    def log(self, line: DeployLog) -> None:
        """Show a line of the user's code while it is loaded, or of a step of the image."""
        is_wanted = logs.is_wanted(line.level, self._config.level)
        if self._stream_logs and is_wanted and self._is_new(line):
            level = line.level if line.source == "logger" else None
            show = self._screen.notice if line.source in frames.NOT_USERS else self._screen.line
            show(self._launch(line.text, level, line.time))
            self.on_shown(line)

    def stage(self, stage: Stage) -> None:
        """Show a stage of the deploy."""
        self._show(stage)
        if stage.stage == "event":
            is_wanted = self._config.include_events and self._config.level not in _QUIET
            cause = _VARYING.sub("", stage.message.replace(stage.pod or " ", ""))
            if self._stream_logs and (stage.warning or is_wanted) and self._is_new(cause):
                text = logs.of_event(self._service, stage.pod or "pod", stage.message, time.time())
                self._screen.event(text, warning=stage.warning)
        elif stage.warning and self._is_new(stage):
            self.warn(stage.message)

    def _show(self, stage: Stage) -> None:
        pod, activity, share = stage.pod or "", _STAGES.get(stage.stage, ""), None
        if stage.ready is not None and stage.pods is not None:
            self._ready, self._pods = stage.ready, stage.pods
        if stage.stage in ("data", "event", "image"):
            activity = stage.message
        if stage.step is not None and stage.steps:
            share = (stage.step - 1) / stage.steps
            step = f"{stage.step}/{stage.steps}"
            activity = f"step {step}: {activity.removesuffix(f' ({step})')}"
        self._activities.pop(pod, None)
        if activity:
            self._activities[pod] = activity, share
        if share is not None and self._is_new(activity):  # the first of many pods that run it
            self.bar.step(activity, share)
        self._wait()

    def _wait(self) -> None:
        """Report how many pods are ready, and the progress of the others."""
        words, share = [f"{self._ready} of {self._pods} pods are ready"], None
        if self._pods == 1:
            words = [] if self._activities else ["waiting for its pod"]
        if self._activities:
            # Steps of an image take longer than all other activities; among several pods the one
            # that is least far decides on the time.
            shares = {pod: done for pod, (_, done) in self._activities.items() if done is not None}
            pod = min(shares, key=shares.__getitem__) if shares else list(self._activities)[-1]
            activity, share = self._activities[pod]
            words.append(activity if share is not None or not pod else f"{pod}: {activity}")
        self.bar.update("; ".join(words), share)

    def warn(self, message: str) -> None:
        """Show a warning, in any case."""
        self._screen.notice(self._launch(message, "WARNING", time.time()))

    def _launch(self, text: str, level: str | None, timestamp: float) -> str:
        include_name = self._config.include_name
        return logs.of_launch(
            self._service, text, level=level, timestamp=timestamp, include_name=include_name
        )

    def _is_new(self, event: DeployLog | Stage | str) -> bool:
        is_new = event not in self._shown
        self._shown.add(event)
        return is_new


# --------------------------------------------------------------- what a project imports

#: Libraries that read the variables of one rank (RANK, LOCAL_RANK, those of MPI or a cluster's job)
#: when they are imported, so that a fork would inherit another rank's, …
_READ_RANK = (
    "bagua",
    "byteps",
    "colossalai",
    "deepspeed",
    "habana_frameworks",
    "horovod",
    "lightning",
    "lightning_fabric",
    "mpi4jax",
    "mpi4py",
    "nemo",
    "neuronx_distributed",
    "petsc4py",
    "pytorch_lightning",
    "slepc4py",
    "smdistributed",
    "torch_neuronx",
    "torch_xla",
    "torchmetrics",
)
#: … and those that make a CUDA context, which does not survive a fork.
_MAKE_CONTEXT = ("bitsandbytes", "cudf", "cugraph", "cuml", "rmm", "unsloth")
NOT_PRELOADED = frozenset((*_READ_RANK, *_MAKE_CONTEXT, "kubetorch"))


#: Python 3.11 has one count of the depth for all threads: parsing at once is a SystemError.
_parsing = threading.Lock()
_INSTALLED = ("site-packages", "dist-packages")


class _Import(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One import statement: `from <dots><module> import <names>`, or `import <module>`."""

    module: str
    level: int = 0
    names: list[str] = []


class _Source(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A file as it was read, and its imports."""

    size: int
    mtime_ns: int
    inode: int
    imports: list[_Import]


_decoder = msgspec.msgpack.Decoder(dict[str, _Source])


def find_imports(entry: Path, roots: Sequence[Path], *, cache: Path) -> tuple[str, ...]:
    """Names of installed modules that importing a file imports, sorted."""
    search = _Search([os.fspath(root) for root in roots], cache, os.fspath(entry))
    return search.run(os.fspath(entry))


class _Search:
    def __init__(self, roots: list[str], cache: Path, key: str) -> None:
        self._roots = roots
        self._cache = cache / f"{digest_of(key.encode())[:32]}.imports"
        self._cached_sources = self._load()
        self._read_sources: dict[str, _Source] = {}
        self._queue: list[str] = []
        self._module_names: set[str] = set()
        self._folders_by_package: dict[str, list[str] | None] = {}

    def run(self, entry: str) -> tuple[str, ...]:
        self._queue.append(entry)
        self._enqueue_packages(entry)
        while self._queue and len(self._read_sources) < LIMITS.read_files:
            path = self._queue.pop()
            if path in self._read_sources:
                continue
            source = self._source(path)
            if source is not None:
                self._read_sources[path] = source
                for item in source.imports:
                    self._follow(item, path)
        if self._read_sources != self._cached_sources:
            self._save()
        return tuple(sorted(self._module_names))

    # ---------------------------------------------------------------------------------- following

    def _enqueue_packages(self, entry: str) -> None:
        """Queue the `__init__.py` files that run before a module of a package."""
        for root in self._roots:
            if entry.startswith(f"{root}/"):
                self._follow_own(root, entry[len(root) + 1 :].split("/")[:-1], ())
                return

    def _follow(self, item: _Import, path: str) -> None:
        parts = item.module.split(".") if item.module else []
        if item.level:
            folder = path
            for _ in range(item.level):
                folder = os.path.dirname(folder)  # noqa: PTH120  # text is quicker
            self._follow_own(folder, parts, item.names)
        elif parts[0] not in sys.stdlib_module_names:
            root = self._own_root(parts[0])
            if root is not None:
                self._follow_own(root, parts, item.names)
            elif parts[0] not in NOT_PRELOADED:
                self._name(item, parts)

    def _own_root(self, top: str) -> str | None:
        """The root that has this module; a mere folder is one only if nothing else has the name."""
        for root in self._roots:
            if _is_module(f"{root}/{top}"):
                return root
        for root in self._roots:
            if os.path.isdir(f"{root}/{top}") and self._package_folders(top) is None:  # noqa: PTH112
                return root
        return None

    def _follow_own(self, folder: str, parts: list[str], names: Iterable[str]) -> None:
        """Queue the project's files that an import of `parts` in `folder` runs."""
        for part in parts:
            folder = f"{folder}/{part}"
            self._enqueue(folder)
        for name in names:
            self._enqueue(f"{folder}/{name}")

    def _enqueue(self, module: str) -> None:
        for path in (f"{module}/__init__.py", f"{module}.py"):
            if path in self._read_sources or os.path.isfile(path):  # noqa: PTH113  # text is quicker
                self._queue.append(path)
                return

    # ------------------------------------------------------------------------------------- naming

    def _name(self, item: _Import, parts: list[str]) -> None:
        package_folders = self._package_folders(parts[0])
        if package_folders is None:
            return
        self._module_names.add(item.module)
        # `from sklearn import linear_model` imports a module, `from math import sqrt` does not.
        for package_folder in package_folders:
            folder = "/".join((package_folder, *parts[1:]))
            for name in item.names:
                if _is_module(f"{folder}/{name}"):
                    self._module_names.add(f"{item.module}.{name}")

    def _package_folders(self, top: str) -> list[str] | None:
        """The folders of an installed package; `None` if it is not installed."""
        if top not in self._folders_by_package:
            self._folders_by_package[top] = _installed(top)
        return self._folders_by_package[top]

    # ------------------------------------------------------------------------------------ reading

    def _source(self, path: str) -> _Source | None:
        try:
            facts = os.stat(path)  # noqa: PTH116  # text is quicker
            cached_source = self._cached_sources.get(path)
            stamp = (facts.st_size, facts.st_mtime_ns, facts.st_ino)
            if (
                cached_source is not None
                and (cached_source.size, cached_source.mtime_ns, cached_source.inode) == stamp
            ):
                return cached_source
            content = Path(path).read_bytes()
        except OSError:
            return None
        return _Source(*stamp, imports=list(parse_imports(content)))

    def _load(self) -> dict[str, _Source]:
        try:
            return _decoder.decode(self._cache.read_bytes())
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return {}

    def _save(self) -> None:
        with suppress(OSError):
            self._cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            files.write_atomically(
                self._cache, msgspec.msgpack.encode(self._read_sources), mode=0o666
            )


def _installed(top: str) -> list[str] | None:
    spec = modules.find_spec(top)
    if spec is None:
        return None
    folders = modules.folders_of(spec)
    locations = folders or [modules.origin_of(spec) or ""]
    if not all(any(f"/{name}/" in f"{location}/" for name in _INSTALLED) for location in locations):
        return None
    return folders


def _is_module(path: str) -> bool:
    """True if there is a module or package of this name."""
    endings = ("/__init__.py", ".py", *importlib.machinery.EXTENSION_SUFFIXES)
    return any(os.path.isfile(path + ending) for ending in endings)  # noqa: PTH113


# ------------------------------------------------------------------------------------ one source


def parse_imports(content: bytes) -> Iterator[_Import]:
    """The imports that run when this source is imported; none if it has a syntax error."""
    try:
        with _parsing:
            body = ast.parse(content).body
    except (SyntaxError, ValueError, RecursionError, SystemError):
        return
    yield from _imports(body)


def _imports(body: Iterable[ast.stmt]) -> Iterator[_Import]:
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (_Import(alias.name) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            names = [alias.name for alias in statement.names if alias.name != "*"]
            yield _Import(statement.module or "", statement.level, names)
        elif isinstance(statement, ast.Try):
            yield from _imports((*statement.body, *statement.finalbody))
        elif isinstance(statement, (ast.With, ast.ClassDef)):
            yield from _imports(statement.body)
        elif isinstance(statement, ast.If) and _is_never(statement.test):
            yield from _imports(statement.orelse)


def _is_never(test: ast.expr) -> bool:
    """True if a condition is false while a module is imported: TYPE_CHECKING, or being a script."""
    if isinstance(test, ast.Compare) and isinstance(test.left, ast.Name):
        return test.left.id == "__name__"
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"
