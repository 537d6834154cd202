"""The deploy of one workload: scan, send what is new, follow the events to *ready* or an error.

    reach the controller ─┐ (in a thread of its own)
    scan the project ─────┴─> POST deploy ──> Missing: upload, and again
                                         └──> Accepted, (Stage | DeployLog)* ──> Ready | Failed

A controller that ends in the middle, as a local service that is killed, is reached again and told
the same deploy, by its id. The flow is blocking; `run_async` runs it in a thread. Written as
coroutines for an event loop in the background, it would cost every program that deploys and calls
from plain threads the import of asyncio, which takes longer than a deploy without changes.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kubetorch._version import __version__
from kubetorch.config import environment
from kubetorch.datastore import ignoring, transfer
from kubetorch.datastore import scan as scanning
from kubetorch.datastore.blobs import digest_of
from kubetorch.datastore.scan import FileChangedError, Scan
from kubetorch.errors import ControllerError, ControllerUnavailableError
from kubetorch.lib import backoff
from kubetorch.lib.records import record
from kubetorch.sdk import services
from kubetorch.sdk.calls.target import is_served, local_modules
from kubetorch.sdk.controller import Controller, EventStream
from kubetorch.sdk.deploys import imports, launchable, runtime
from kubetorch.sdk.deploys.launch import LaunchLines
from kubetorch.sdk.deploys.source import Source
from kubetorch.sdk.logs import Screen
from kubetorch.sdk.session import Session
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import codecs, failures, versions
from kubetorch.wire.messages import (
    Deploy,
    DeployLog,
    Failed,
    Missing,
    Ready,
    Stage,
    WorkloadView,
)

if TYPE_CHECKING:
    from kubetorch.sdk.secrets.secret import Secret

#: How often a deploy is begun: the controller may go away or lack blobs, a file may change.
ATTEMPTS = 6
# First and longest pause between attempts while a controller is away, in seconds.
_PAUSES = (0.1, 2.0)
#: Seconds beyond the `launch_timeout` after which a silent controller is given up.
MARGIN = 30.0


@record
class Order:
    """What is deployed.

    Attributes:
        source: The callable.
        spec: The workload, but for what the deploy finds out: tree, runtime, init args.
        init_args: Arguments of a class's constructor.
        stream_logs: Whether lines that the code prints while it is loaded are shown.
        existing: Names of services one of which is taken instead, if it is there.
        secrets: Secrets of its compute.
    """

    source: Source
    spec: WorkloadSpec
    init_args: Mapping[str, Any] | None = None
    stream_logs: bool = True
    existing: tuple[str, ...] = ()
    secrets: Sequence[Secret] = ()


@record
class _Bundle:
    """A complete spec, and the blobs that it names.

    Attributes:
        spec: The spec.
        scans: What travels: the project, and what its image copies.
        init_args: JSON of the constructor's arguments.
    """

    spec: WorkloadSpec
    scans: tuple[Scan, ...]
    init_args: bytes | None

    def fresh(self) -> list[str]:
        """The blobs that the controller does not have yet, as far as can be told here."""
        own = [] if self.spec.init_args is None else [self.spec.init_args]
        return [*own, *(digest for scan in self.scans for digest in scan.fresh)]

    def packed(self, digests: Iterable[str]) -> Iterator[bytes]:
        """Blobs as they travel.

        Raises:
            FileChangedError: A file has another content by now.
        """
        return transfer.compressed(dict.fromkeys(digests), self._stream)

    def _stream(self, digest: str) -> tuple[int, Iterable[bytes]]:
        if self.init_args is not None and digest == self.spec.init_args:
            return len(self.init_args), (self.init_args,)
        for scan in self.scans:
            if scan.has(digest):
                return scan.stream(digest)
        raise AssertionError(f"no blob {digest} belongs to this deploy")


def begin(order: Order, session: Session) -> Deployment:
    """A deploy to a controller.

    Raises:
        SpecError: The service cannot be launched.
    """
    spec = order.spec
    launchable.check(spec.name, spec.compute)
    if spec.compute.freeze:
        order = _frozen(order)
    screen = services.route(session, spec.namespace, spec.name).screen
    return Deployment(order, session, screen)


def _frozen(order: Order) -> Order:
    """The same deploy, without code of this program: the pods' image has it."""
    source = order.source.frozen()
    there, app = source.locate(), order.spec.callable.app
    callable_ref = replace(
        order.spec.callable,
        app=None if app is None else replace(app, folder=None),
        module=there.import_path,
        project=None,
        root="",
        roots=(),
        source_file=None,
        remote_dir=there.remote_dir,
    )
    return replace(order, source=source, spec=replace(order.spec, callable=callable_ref))


class Deployment:
    """One deploy, under way.

    Args:
        order: What is deployed.
        session: The way to the controller.
        screen: Where lines go.
    """

    def __init__(self, order: Order, session: Session, screen: Screen) -> None:
        spec = order.spec
        self._order = order
        self._session = session
        self._lines = LaunchLines(
            screen, spec.name, spec.compute.logging, stream_logs=order.stream_logs
        )
        self._id = os.urandom(16).hex()
        #: For a controller that is away, or cannot be reached; one of this machine is begun again.
        self._patience = backoff.Patience(
            0.0 if session.is_local else session.way.patience, first=_PAUSES[0], limit=_PAUSES[1]
        )
        self._lock = threading.Lock()
        self._events: EventStream | None = None
        self._is_cancelled = False

    async def run_async(self) -> WorkloadView:
        """Deploy, and wait for the end.

        Raises:
            KubetorchError: It failed.
            Exception: What the user's code raised while it was loaded.
        """
        import asyncio  # noqa: PLC0415  # loaded already by whoever awaits

        try:
            return await asyncio.to_thread(self.run)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Stop waiting, from another thread. The controller may go on with the deploy."""
        with self._lock:
            self._is_cancelled = True
            if self._events is not None:
                self._events.abort()

    def run(self) -> WorkloadView:
        """Deploy, and wait for the end.

        Raises:
            KubetorchError: It failed.
            Exception: What the user's code raised while it was loaded.
        """
        found = self._find_existing()
        if found is not None:
            return found
        self._provide()
        bundle = self._bundle()
        deadline = time.monotonic() + bundle.spec.compute.launch_timeout + MARGIN
        controller = self._session.controller()
        fresh = bundle.fresh()
        attempts_left = ATTEMPTS
        while attempts_left:
            attempts_left -= 1
            try:
                last = self._attempt(controller, bundle, fresh, deadline)
                if isinstance(last, Ready):
                    return last.workload
                fresh = []
                controller.upload(bundle.packed(last.blobs), bundle.spec.namespace)
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
                controller = self._session.reconnect(controller)
        raise ControllerError(
            f"the controller lacked blobs of {bundle.spec.name} that it was sent {ATTEMPTS} times",
            hint="kt local status says where its log is",
        )

    def _find_existing(self) -> WorkloadView | None:
        """A service to take as it is: one that serves calls, or gets a pod when they come."""
        order = self._order
        if not order.existing:
            return None
        found = self._session.find(order.spec.namespace, order.existing)
        return found if found is not None and is_served(found) else None

    def _provide(self) -> None:
        """Have the secrets and volumes that the workload is to see."""
        order = self._order
        if order.secrets or order.spec.compute.volumes:
            from kubetorch.sdk.deploys import provisioning  # noqa: PLC0415  # few workloads have some

            spec = self._session.ask(
                lambda asked: provisioning.provide(asked, order.spec, order.secrets)
            )
            self._order = replace(order, spec=spec)

    def _bundle(self) -> _Bundle:
        order = self._order
        order.source.write()
        where, cache = order.source.locate(), environment.cache_dir()
        scans: list[Scan] = []
        preload: tuple[str, ...] = ()
        if where.folder is not None:
            given = environment.rsync_filters()
            filters = None if given is None else ignoring.parse_filters(given)
            options = scanning.Options(only=where.only, cache=cache, filters=filters)
            scans.append(scanning.scan(where.folder, options))
            if where.source_file is not None and order.spec.callable.app is None:
                entry = where.folder / where.source_file
                roots = (where.root, "", *order.spec.callable.roots)
                preload = imports.find(entry, [where.folder / root for root in roots], cache=cache)
        compute, tree = order.spec.compute, scans[0].digest if scans else None
        if compute.image is not None and compute.image.steps:
            from kubetorch.sdk.deploys import copies  # noqa: PLC0415  # few programs have any

            image, copied = copies.scan(compute.image, cache=cache)
            compute = replace(compute, image=image)
            scans += copied
        for scan in scans:
            for warning in scan.warnings:
                self._lines.warn(warning)
        init_args = None
        if order.init_args is not None:
            (segment,) = codecs.encode("json", order.init_args)
            init_args = bytes(segment)
        spec = replace(
            order.spec,
            compute=compute,
            tree=tree,
            init_args=None if init_args is None else digest_of(init_args),
            runtime=runtime.describe(where.folder, preload, is_local=self._session.is_local),
            instance=self._id if _is_always_new(order.spec) else None,
        )
        return _Bundle(spec, tuple(scans), init_args)

    def _attempt(
        self, controller: Controller, bundle: _Bundle, fresh: Iterable[str], deadline: float
    ) -> Ready | Missing:
        """Send the deploy and follow its events, up to its end or to what is missing."""
        head = Deploy(
            id=self._id,
            spec=bundle.spec,
            protocol=versions.PROTOCOL,
            version=__version__,
            stream_logs=self._order.stream_logs,
        )
        silence = max(deadline - time.monotonic(), 1.0)
        with controller.deploy(head, bundle.packed(fresh), silence=silence) as events:
            with self._lock:
                self._events = events
                if self._is_cancelled:
                    events.abort()
            try:
                # What the first call needs, while there is nothing to do but wait.
                importlib.import_module("kubetorch.sdk.calls.invoke")
                return self._follow(events, bundle)
            finally:
                with self._lock:
                    self._events = None

    def _follow(self, events: EventStream, bundle: _Bundle) -> Ready | Missing:
        for event in events:
            self._patience.renew()
            if isinstance(event, (Ready, Missing)):
                return event
            if isinstance(event, DeployLog):
                self._lines.log(event)
            elif isinstance(event, Stage):
                self._lines.stage(event)
            elif isinstance(event, Failed):
                modules = local_modules(bundle.spec.callable, is_script=True)
                error = failures.rebuild(failures.parse(event.failure), modules=modules)
                if isinstance(error, ModuleNotFoundError):
                    from kubetorch.sdk.deploys import unsent  # noqa: PLC0415  # for mistakes only

                    unsent.explain(error, self._order.source.locate())
                raise error
        raise ControllerUnavailableError(
            f"the controller did not say how the deploy of {bundle.spec.name} ended"
        )


def _is_always_new(spec: WorkloadSpec) -> bool:
    """Whether each deploy is one of its own: an instance, a run, or forced steps."""
    steps = spec.compute.image.steps if spec.compute.image is not None else ()
    return spec.callable.kind != "fn" or any(step.force for step in steps)
