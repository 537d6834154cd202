"""The owner of a pod's workers: carries out what `kubetorch.pod.reload` decides.

Supervisor ── GenerationLoader ──┬── ProjectCode            the project: blobs, slots, its files in
                                 │                          the working directory
                                 ├── Images                 the steps of the image
                                 ├── WorkerHost or AppHost  a worker, one for each rank, or an app
                                 └── framework_nodes        the node of Ray or Monarch beside ranks
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kubetorch.datastore import trees
from kubetorch.datastore.blobs import BlobStore
from kubetorch.datastore.slots import CodeSlots, Slot
from kubetorch.errors import (
    CallableNotFoundError,
    CallRefusedError,
    DataStoreError,
    KubetorchError,
    ResourceNotAvailableError,
    StartupError,
)
from kubetorch.lib import deadlines, sockets
from kubetorch.lib.changes import Changes
from kubetorch.lib.tasks import cancel_all, start_task
from kubetorch.pod import environment, framework_nodes, rank_environment, reload
from kubetorch.pod.apps.process import AppHost, AppProcess
from kubetorch.pod.calls import Calls
from kubetorch.pod.data import DataMounts
from kubetorch.pod.environment import Interpreters, Prepared
from kubetorch.pod.filesystem import PodFilesystem
from kubetorch.pod.framework_nodes import MonarchNode, Node, RayNode
from kubetorch.pod.image.preparation import Images
from kubetorch.pod.logs import Line
from kubetorch.pod.membership import Membership
from kubetorch.pod.peers import Peers
from kubetorch.pod.rank_calls import RankGroup
from kubetorch.pod.session import Session
from kubetorch.pod.transfers import Transfers
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.pod.worker_process.pool import WorkerPool
from kubetorch.pod.worker_process.worker import LoadFailed, Worker, WorkerHost, WorkerSpec
from kubetorch.pod.worker_process.zygotes import ZygoteSpec
from kubetorch.specs.data import DataMount
from kubetorch.specs.distribution import SINGLE_CONTROLLER
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import exceptions
from kubetorch.wire.messages import LogReport, Observed, Reload, StageReport, World
from kubetorch.wire.podenv import PodEnv

_log = logging.getLogger(__name__)


class ProjectCode:
    """The projects of generations: their blobs, and the slots that workers import them from."""

    def __init__(self, root: Path, working_dir: Path, store: BlobStore, blobs: Transfers) -> None:
        self._slots = CodeSlots(root / "code")
        # Entries of the working directory that hide the project's, as far as they were reported.
        self._hidden_entries: list[str] = []
        self._working_dir = working_dir
        self._store = store
        self._blobs = blobs

    async def fetch(self, spec: WorkloadSpec, on_wait: Callable[[str], object]) -> str | None:
        """Fetch all blobs of a generation; returns the arguments of its constructor."""
        arguments = [] if spec.init_args is None else [spec.init_args]
        await self._blobs.fetch([*spec.trees, *arguments], on_wait)
        for digest in spec.trees:
            tree = await asyncio.to_thread(self._tree, digest)
            await self._blobs.fetch(tree.digests(), on_wait)
        if spec.init_args is None:
            return None
        return (await asyncio.to_thread(self._store.read, spec.init_args)).decode()

    def hurry(self) -> None:
        """Fetch again at once: a deploy may have brought blobs that the controller did not have."""
        self._blobs.hurry()

    async def materialise(self, spec: WorkloadSpec) -> Slot | None:
        """A code slot with the project in it, held for one worker."""
        if spec.runtime.project_folder is not None:
            return self._slots.in_place(Path(spec.runtime.project_folder))
        if spec.tree is None or spec.callable.project is None:
            return None
        digest, project = spec.tree, spec.callable.project
        update = asyncio.ensure_future(
            asyncio.to_thread(
                lambda: self._slots.update(self._tree(digest), self._store.stream, project)
            )
        )
        try:
            return await asyncio.shield(update)
        except asyncio.CancelledError:
            # The thread goes on, and holds a slot that no worker will use.
            update.add_done_callback(self._release_unused)
            raise

    def release(self, slot: Slot | None) -> None:
        if slot is not None:
            self._slots.release(slot)

    async def show(self, slot: Slot | None) -> str:
        """Show the project in the working directory; returns a warning for the user, or ""."""
        if slot is None:
            return ""
        try:
            hidden_entries = await asyncio.to_thread(self._slots.show, slot, self._working_dir)
        except DataStoreError as error:
            return f"relative paths do not find the project: {error.message}"
        is_new, self._hidden_entries = hidden_entries != self._hidden_entries, hidden_entries
        if not (hidden_entries and is_new):
            return ""
        hidden_count = len(hidden_entries) - LIMITS.warned_names
        more = f" and {hidden_count} more" if hidden_count > 0 else ""
        names = ", ".join(hidden_entries[: LIMITS.warned_names])
        return (
            f"the working directory {self._working_dir} has {names}{more} of its own: "
            "relative paths find these, and not those of the project"
        )

    def visible_path(self, slot: Slot | None, path: str) -> str:
        """The path of a project's file in the working directory, which is the same in every pod."""
        if slot is None or not Path(path).is_relative_to(slot.path):
            return path
        return str(self._working_dir / slot.path.name / Path(path).relative_to(slot.path))

    def prune(self, keep: Iterable[WorkloadSpec]) -> None:
        """Delete the blobs of all other generations."""
        needed: set[str] = set()
        for spec in keep:
            needed.update(spec.trees if spec.init_args is None else (*spec.trees, spec.init_args))
            for tree in spec.trees:
                if self._store.has(tree):
                    needed.update(self._tree(tree).digests())
        for blob in self._store.iterate():
            if blob.digest not in needed:
                self._store.delete(blob.digest)
        self._store.sweep()

    def _release_unused(self, update: asyncio.Future[Slot]) -> None:
        if not update.cancelled() and update.exception() is None:
            self.release(update.result())

    def _tree(self, digest: str) -> trees.Tree:
        return trees.decode(self._store.read(digest))


class Serving(msgspec.Struct):
    """A loaded worker or a running app, with its code slot and its framework's node."""

    process: Worker | WorkerPool | RankGroup | AppProcess
    spec: WorkloadSpec
    slot: Slot | None
    loaded: float
    node: Node | None = None


def _needs_operator(spec: WorkloadSpec) -> bool:
    """True if KubeRay has to run Ray, as a manifest of the user might have it otherwise."""
    compute = spec.compute
    is_ray = compute.distribution is not None and compute.distribution.distribution_type == "ray"
    return is_ray and compute.manifest is None


class GenerationLoader(msgspec.Struct, eq=False, kw_only=True, dict=True):
    """Loads generations: the files, the image, then a worker or an app."""

    pod: PodEnv
    environ: Mapping[str, str]
    host: WorkerHost
    apps: AppHost
    code: ProjectCode
    images: Images
    session: Session
    membership: Membership
    peers: Peers
    incarnation: str
    on_line: Callable[[Line, int], None]

    def __post_init__(self) -> None:
        # Held while blobs are fetched, used, or deleted.
        self._store_lock = asyncio.Lock()
        self._pruning: asyncio.Task[None] | None = None
        #: The interpreter and the environment of the latest generation.
        self.prepared: Prepared | None = None
        #: The world of the processes that are being started.
        self.joining_world: World | None = None
        # The node that outlived its processes, and the epoch of its world.
        self._lasting_node: tuple[Node, int] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        # Checked before any step of an image could install Ray.
        self._lacks_ray = framework_nodes.lacks_ray(self.environ)

    async def load_worker(self, generation: int, spec: WorkloadSpec, *, is_first: bool) -> Serving:
        loop = asyncio.get_running_loop()
        preparing: asyncio.Task[Prepared] | None = None
        slot: Slot | None = None
        self.joining_world = None
        distribution = spec.compute.distribution
        if _needs_operator(spec) and self._lacks_ray:
            raise ResourceNotAvailableError(
                f"the image of pod {self.pod.pod} has no Ray: KubeRay starts Ray with the "
                "container, before any step of the image runs",
                hint='use an image that has Ray and bash, such as kt.images.ray("2.53.0")',
            )
        try:
            if not self.images.needs_project(generation, spec):
                preparing = loop.create_task(self._prewarm(generation, spec, is_first=is_first))
            slot, init_args = await self._fetch_code(generation, spec)
            if preparing is None:  # steps find the project as it will be
                preparing = loop.create_task(self._prewarm(generation, spec, is_first=is_first))
            worker_spec = environment.worker_spec(
                generation,
                spec,
                pod=self.pod,
                prepared=await preparing,
                code=slot.path if slot is not None else None,
                init_args=init_args,
            )
            process: Worker | WorkerPool | RankGroup
            node = None
            if distribution is None:
                await self._reuse_node()
                worker_spec = replace(worker_spec, own_env=self._pool_environ(spec))
                process = await self._start_processes(worker_spec, spec)
            else:
                process, node = await self._start_ranks(worker_spec, spec, slot)
        except BaseException:
            if preparing is not None:
                preparing.cancel()
            self.code.release(slot)
            raise
        return Serving(process, spec, slot, time.monotonic(), node)

    async def _start_processes(
        self, worker_spec: WorkerSpec, spec: WorkloadSpec
    ) -> Worker | WorkerPool:
        """The processes of this pod that run calls side by side."""
        count = environment.process_count(spec.compute, self.pod, worker_spec.env)
        shares = [
            rank_environment.devices_of(spec.compute, local, count, worker_spec.env)
            for local in range(count)
        ]
        specs = [
            replace(worker_spec, own_env={**worker_spec.own_env, **devices}) for devices in shares
        ]
        workers = await self._start_workers(specs, spec)
        return workers[0] if count == 1 else WorkerPool(workers)

    async def start_again(self, worker_spec: WorkerSpec, spec: WorkloadSpec) -> Worker:
        """Start a process that replaces one that ended."""
        [worker] = await self._start_workers([worker_spec], spec)
        return worker

    async def _start_ranks(
        self, worker_spec: WorkerSpec, spec: WorkloadSpec, slot: Slot | None
    ) -> tuple[RankGroup, Node | None]:
        """Start the ranks of this pod, once the world of the generation is formed."""
        self._on_stage(worker_spec.generation, "joining", "the world of its pods")
        timeout = float(spec.compute.launch_timeout)
        try:
            async with deadlines.timeout(timeout):
                world = self.joining_world = await self.membership.wait_for_world(
                    worker_spec.generation
                )
        except TimeoutError:
            raise StartupError(
                f"the pods of this service were not all there within {timeout:.0f} s",
                hint="kt status shows the pods that are missing",
            ) from None
        distribution = spec.compute.distribution
        assert distribution is not None
        nodes = [
            node
            for node, member in enumerate(world.members)
            if member.pod == self.pod.pod and member.incarnation in ("", self.incarnation)
        ]
        specs = []
        for node, local in itertools.product(nodes, range(world.processes)):
            rank_env = rank_environment.rank_environ(
                spec.compute, world, node, local, worker_spec.env
            )
            if (
                distribution.distribution_type == "ray"
                and framework_nodes.KUBERAY_START_COMMAND in self.environ
            ):
                paths = [self.code.visible_path(slot, path) for path in worker_spec.sys_path]
                rank_env |= framework_nodes.ray_job_environ(paths, worker_spec.env)
            rank = rank_environment.rank_of(world, node, local)
            if distribution.threads is not None:
                worker_spec = replace(worker_spec, threads=distribution.threads, may_wait=True)
            specs.append(replace(worker_spec, own_env=rank_env, rank=rank))
        own_node = await self._reuse_node(world.epoch)
        if own_node is None and nodes and distribution.distribution_type in SINGLE_CONTROLLER:
            own_node = await self._start_node(worker_spec, spec, world, nodes[0])
        try:
            workers = await self._start_workers(specs, spec)
        except BaseException:
            if own_node is not None:
                await self._end_node(own_node)
            raise
        group = RankGroup(
            world,
            nodes[0] if nodes else None,
            workers,
            generation=worker_spec.generation,
            membership=self.membership,
            peers=self.peers,
            compute=spec.compute,
        )
        return group, own_node

    async def _start_node(
        self, worker_spec: WorkerSpec, spec: WorkloadSpec, world: World, node: int
    ) -> Node | None:
        """Start the framework's node beside the workers, unless an operator has started it."""
        distribution = spec.compute.distribution
        assert distribution is not None
        kind = distribution.distribution_type
        self._on_stage(worker_spec.generation, "joining", f"the {kind.title()} cluster of its pods")
        timeout = float(spec.compute.launch_timeout)
        if framework_nodes.KUBERAY_START_COMMAND in self.environ:
            if _needs_operator(spec):
                await framework_nodes.wait_until_joined(self.environ, timeout)
            return None
        paths = [*worker_spec.sys_path, *worker_spec.env.get("PYTHONPATH", "").split(os.pathsep)]
        env = {**worker_spec.env, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        framework_node: RayNode | MonarchNode
        if kind == "ray":
            framework_node = RayNode(worker_spec.python, env, _log.debug)
            starting = framework_node.start(world, node)
        else:
            on_line = functools.partial(self._on_node_line, worker_spec.generation)
            framework_node = MonarchNode(worker_spec.python, env, on_line)
            addresses = rank_environment.monarch_hosts(world, distribution.port)
            starting = framework_node.start(addresses, node)
        try:
            async with deadlines.timeout(timeout):
                await starting
        except TimeoutError:
            reason = framework_node.delay_reason
            await self._end_node(framework_node)
            raise StartupError(
                f"the {kind.title()} node of this pod did not start within {timeout:.0f} s:\n"
                f"{reason}",
                hint="kt.Compute(launch_timeout=...) gives it more time",
            ) from None
        except BaseException:
            await self._end_node(framework_node)
            raise
        return framework_node

    def keep_node(self, node: Node, world: World) -> None:
        """Keep the node of a world whose processes ended, for the processes that replace them."""
        self._lasting_node = node, world.epoch

    async def _reuse_node(self, epoch: int = 0) -> Node | None:
        """The node that was kept of this world; the node of another world is ended."""
        if self._lasting_node is None:
            return None
        (node, node_epoch), self._lasting_node = self._lasting_node, None
        if node_epoch == epoch and node.is_alive:
            return node
        await self._end_node(node)
        return None

    async def _end_node(self, node: Node) -> None:
        """End a node, also if the caller is cancelled."""
        await asyncio.shield(start_task(node.kill(), self._ending))

    def _on_node_line(self, generation: int, text: str) -> None:
        """Handle a line of a host, whose actors print to its output."""
        self.on_line(Line(text, "stdout", None, time.time(), None), generation)

    async def _start_workers(self, specs: Sequence[WorkerSpec], spec: WorkloadSpec) -> list[Worker]:
        """Start and load all workers at the same time; if one fails, all are ended."""
        workers: list[Worker] = []

        async def start(worker_spec: WorkerSpec) -> Worker:
            worker = await self.host.start(
                worker_spec,
                lambda stage, message: self._on_stage(worker_spec.generation, stage, message),
            )
            workers.append(worker)
            self._on_stage(worker_spec.generation, "importing", "")
            await worker.load(float(spec.compute.launch_timeout))
            return worker

        tasks = [asyncio.ensure_future(start(worker_spec)) for worker_spec in specs]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            await cancel_all(tasks)
            await asyncio.shield(asyncio.gather(*(worker.kill() for worker in workers)))
            raise

    def _pool_environ(self, spec: WorkloadSpec) -> dict[str, str]:
        """Variables of a pool of replicas, as far as the controller has reported its members."""
        members = self.membership.members
        ordinals = [member.ordinal for member in members if member.pod == self.pod.pod]
        if spec.compute.broadcast is None or not ordinals:
            return {}
        return rank_environment.pool_environ(spec.compute, ordinals[0], members)

    def _own_port(self, spec: WorkloadSpec) -> int | None:
        """A port for the app of this pod alone, where its siblings share the ports of a machine."""
        app = spec.callable.app
        is_shared = self.pod.backend == "local" and spec.compute.pods > 1
        return sockets.choose(()) if app is not None and app.port and is_shared else None

    async def load_app(
        self, generation: int, spec: WorkloadSpec, *, make_room: Callable[[], Awaitable[None]]
    ) -> Serving:
        """Start an app, and wait until it serves; an app without a port only has to run."""
        slot: Slot | None = None
        app: AppProcess | None = None
        await self._reuse_node()
        try:
            slot, _ = await self._fetch_code(generation, spec)
            prepared = await self._prepare(generation, spec)
            await make_room()
            app_run = environment.app_run(
                generation,
                spec,
                pod=self.pod,
                prepared=prepared,
                code=slot.path if slot is not None else None,
                own_port=self._own_port(spec),
            )
            self._on_stage(generation, "starting", app_run.app.command)
            app = await self.apps.start(app_run)
            await app.wait_until_serving(environment.health_timeout(spec))
        except BaseException:
            if app is not None:
                await asyncio.shield(app.kill())
            self.code.release(slot)
            raise
        return Serving(app, spec, slot, time.monotonic())

    async def _fetch_code(
        self, generation: int, spec: WorkloadSpec
    ) -> tuple[Slot | None, str | None]:
        """Fetch the project into a slot; returns also the arguments of a class's constructor."""
        async with self._store_lock:
            self._on_stage(generation, "fetching", "")
            init_args = await self.code.fetch(
                spec, lambda reason: self._on_stage(generation, "fetching", f"waits: {reason}")
            )
            slot = await self.code.materialise(spec)
        try:  # before any code of the project runs
            warning = await self.code.show(slot)
        except BaseException:
            self.code.release(slot)
            raise
        if warning:
            self._on_stage(generation, "fetching", warning, is_warning=True)
        return slot, init_args

    async def _prepare(self, generation: int, spec: WorkloadSpec) -> Prepared:
        if spec.runtime.umask is not None:
            # For apps, shells and steps too, which inherit it; the folder of the pod is private.
            os.umask(spec.runtime.umask & 0o077)
        environ = environment.program_environ(self.environ, spec)
        self.prepared = await self.images.prepare(generation, spec, environ)
        return self.prepared

    async def _prewarm(self, generation: int, spec: WorkloadSpec, *, is_first: bool) -> Prepared:
        """Run the image's steps; then preload the modules that the project imports."""
        prepared = await self._prepare(generation, spec)
        preload = spec.runtime.preload
        if is_first and preload:
            self._on_stage(generation, "preloading", ", ".join(preload))
        await self.host.prewarm(
            ZygoteSpec(prepared.python, prepared.env, prepared.sys_path, preload)
        )
        return prepared

    def _on_stage(
        self, generation: int, stage: str, message: str, *, is_warning: bool = False
    ) -> None:
        self.session.report_stage(StageReport(generation, stage, message, is_warning))

    # -------------------------------------------------------------------------------- afterwards

    def prune_later(self, keep: Callable[[], list[WorkloadSpec]]) -> None:
        """Delete blobs of older generations, once the deploy that waits for this one is done."""
        self._stop_pruning()
        self._pruning = asyncio.get_running_loop().create_task(self._prune(keep))

    async def close(self) -> None:
        self._stop_pruning()
        await self._reuse_node()
        await asyncio.gather(*self._ending)
        await self.host.close()
        await self.images.close()

    def _stop_pruning(self) -> None:
        if self._pruning is not None:
            self._pruning.cancel()

    async def _prune(self, keep: Callable[[], list[WorkloadSpec]]) -> None:
        await asyncio.sleep(TIMING.blob_prune_delay_seconds)
        async with self._store_lock:
            await asyncio.to_thread(self.code.prune, keep())


class Supervisor(msgspec.Struct, eq=False, kw_only=True, dict=True):
    """Brings the pod to the generation that the controller wants, and keeps it there."""

    pod: PodEnv
    interpreters: Interpreters
    loader: GenerationLoader
    project: ProjectCode
    apps: AppHost
    calls: Calls
    session: Session
    membership: Membership
    filesystem: PodFilesystem
    data: DataMounts

    def __post_init__(self) -> None:
        #: Notified of every change of the served generation.
        self.changes = Changes()
        self._machine = reload.Reconciler()
        self._specs: dict[int, WorkloadSpec] = {}
        self._failure: exceptions.Failure | None = None
        self._loading: asyncio.Task[None] | None = None
        self._loaded: Serving | None = None
        self._serving: Serving | None = None
        self._draining: dict[asyncio.Task[None], Worker | WorkerPool | RankGroup | AppProcess] = {}
        # A task for each process of a pool that is being replaced.
        self._replacing: set[asyncio.Task[None]] = set()
        self._restart: asyncio.TimerHandle | None = None
        self._is_closing = False
        # Why the process of a generation is gone, until the next one serves.
        self._loss_reasons: dict[int, str] = {}

    # ------------------------------------------------------------------------------------ state

    @property
    def generation(self) -> int:
        """The generation that serves calls; 0 if none serves."""
        return self._machine.serving if self._machine.has_worker else 0

    @property
    def is_starting(self) -> bool:
        """True if the pod has served no generation yet, and may still."""
        machine = self._machine
        may_load = machine.loading is not None or self._failure is None
        return not machine.serving and may_load and not self._is_closing

    @property
    def restarts(self) -> int:
        return self._machine.restarts

    @property
    def workers(self) -> int:
        return len(self._draining) + (self._serving is not None)

    @property
    def serves_app(self) -> bool:
        """True if the served workload, or the next one, is an app."""
        spec = self._specs.get(self._machine.loading or self._machine.serving)
        return spec is not None and spec.callable.app is not None

    @property
    def code(self) -> Path | None:
        serving = self._serving
        return serving.slot.path if serving is not None and serving.slot is not None else None

    def shell_environment(self) -> tuple[str, Mapping[str, str]]:
        """A worker's working directory and environment, for shells in the pod."""
        spec = self._specs.get(max(self._specs, default=0))
        if spec is None:
            raise CallRefusedError(f"pod {self.pod.pod} is being started", hint="try again")
        with contextlib.suppress(OSError):  # the shell reports that the folder is missing
            self._make_working_dir()
        prepared = self.loader.prepared or environment.before_image_steps(
            self.loader.environ, self.pod, spec
        )
        env = environment.shell_environ(prepared, spec, self.pod, self.code)
        return self.pod.working_dir, env

    # ----------------------------------------------------------------------------------- events

    def on_reload(self, message: Reload) -> None:
        self._specs[message.generation] = message.spec
        if message.replaces is not None:
            self._loss_reasons.setdefault(message.generation, message.replaces)
        for generation in list(self._specs):
            if generation not in (message.generation, self._machine.serving):
                del self._specs[generation]
        self._handle(reload.Requested(message.generation))
        self.project.hurry()

    def on_line(self, line: Line, generation: int) -> None:
        """Send a line of a loading worker or app to the deploy that waits for it."""
        if line.call is None and generation == self._machine.loading:
            self.session.report_line(
                LogReport(
                    generation=generation,
                    text=line.text,
                    source=line.source,
                    level=line.level,
                    time=line.time,
                )
            )

    def on_exit(self, worker: Worker, error: KubetorchError) -> None:
        _log.warning("worker ended pid=%s error=%s", worker.pid, error.message)
        process: Worker | WorkerPool | RankGroup = worker
        had_calls = self.calls.lost_with == worker.pid
        group = self._serving.process if self._serving is not None else None
        if isinstance(group, RankGroup) and worker in group.workers:
            group.abort(worker)
            process, had_calls = group, group.had_calls
        if isinstance(group, WorkerPool) and group.remove(worker):
            if group.workers and not self._is_closing:
                self._replace_later(group, worker, error.message, had_calls=had_calls)
                return
            process = group
        self._on_death(process, error.message, had_calls=had_calls)

    def _replace_later(
        self, pool: WorkerPool, worker: Worker, why: str, *, had_calls: bool
    ) -> None:
        if had_calls:
            pool.deaths = 0
        start_task(self._replace(pool, worker, why), self._replacing)

    async def _replace(self, pool: WorkerPool, worker: Worker, why: str) -> None:
        """Start a process of a pool again, as long as the pool serves."""
        while (serving := self._serving) is not None and serving.process is pool:
            delays = TIMING.restart_delays_seconds
            delay = delays[min(pool.deaths, len(delays) - 1)]
            pool.deaths += 1
            await asyncio.sleep(delay)
            try:
                successor = await self.loader.start_again(worker.spec, serving.spec)
            except (LoadFailed, KubetorchError) as error:
                _log.warning("a process of a pool is not started again error=%s", error)
                continue
            if self._serving is serving and pool.workers:
                pool.add(successor)
                self.calls.note_replacement(why)
            else:
                await successor.kill()
            return

    def on_members(self) -> None:
        """Start new processes if the controller has formed a new world."""
        group = self._serving.process if self._serving is not None else None
        generation = self._machine.loading or self._machine.serving
        world = self.membership.world_of(generation)
        if world is None:
            return
        current_world = group.world if isinstance(group, RankGroup) else None
        if self._machine.loading is not None:
            current_world = self.loader.joining_world
        if current_world is not None and world.epoch > current_world.epoch:
            self._handle(reload.WorldFormed(generation))

    def on_app_exit(self, app: AppProcess) -> None:
        self._on_death(app, app.ending, had_calls=False)

    def _on_death(
        self, process: Worker | WorkerPool | RankGroup | AppProcess, why: str, *, had_calls: bool
    ) -> None:
        serving = self._serving
        if serving is None or serving.process is not process or self._is_closing:
            return
        self._serving = None
        self._loss_reasons[process.generation] = why
        self.project.release(serving.slot)
        if serving.node is not None and isinstance(process, RankGroup):
            self.loader.keep_node(serving.node, process.world)
        lived = time.monotonic() - serving.loaded
        self._handle(reload.Died(process.generation, lived, had_calls))

    async def close(self, grace: float) -> None:
        """End all workers; calls have ended already, or are lost."""
        self._is_closing = True
        if self._restart is not None:
            self._restart.cancel()
        if self._loading is not None:
            await cancel_all([self._loading])
        await cancel_all(self._replacing)
        if self._serving is not None:
            await self._serving.process.drain(grace)
        await cancel_all(self._draining)
        if self._serving is not None and self._serving.node is not None:
            await self._serving.node.kill()
        await self.loader.close()
        await self.data.close()

    # ---------------------------------------------------------------------------------- effects

    def _handle(self, event: reload.Event) -> None:
        for effect in self._machine.handle(event):
            self._apply(effect)
        self.changes.notify()

    def _apply(self, effect: reload.Effect) -> None:
        match effect:
            case reload.Load(generation):
                loop = asyncio.get_running_loop()
                self._loading = loop.create_task(self._load(generation))
            case reload.Abandon():
                if self._loading is not None:
                    self._loading.cancel()
            case reload.Switch():
                self._switch()
            case reload.Hold(generation):
                self.calls.hold(self._specs[generation])
                self.apps.hold()
            case reload.Refuse(generation):
                self.calls.refuse(self._refusal(generation))
                self.apps.refuse(self._refusal(generation))
            case reload.Restart(generation, delay):
                due = reload.RestartDue(generation)
                loop = asyncio.get_running_loop()
                self._restart = loop.call_later(delay, self._handle, due)
            case reload.Report(generation, serving, is_failure):
                failure = self._failure.to_message() if is_failure and self._failure else None
                self.session.report_observed(
                    Observed(generation=generation, serving=serving, failure=failure)
                )

    def _switch(self) -> None:
        loaded, self._loaded = self._loaded, None
        assert loaded is not None
        previous, self._serving = self._serving, loaded
        loss_reason = self._loss_reasons.get(loaded.process.generation)
        self._loss_reasons.clear()
        if isinstance(loaded.process, AppProcess):
            self.apps.serve(loaded.process)
            self.calls.hold(loaded.spec)
            self.calls.refuse(
                CallableNotFoundError(
                    f"{loaded.spec.name} is an app, which has no callable",
                    hint="its own routes are below /http/",
                )
            )
        else:
            self.apps.hold()
            self.calls.serve(loaded.spec, loaded.process, loss_reason)
        if previous is not None:
            self._drain(previous)
        self.loader.prune_later(lambda: list(self._specs.values()))

    def _drain(self, old: Serving) -> None:
        while len(self._draining) >= LIMITS.draining_generations:
            oldest = next(iter(self._draining))
            self._draining.pop(oldest)
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(self._drain_and_release(old))
        self._draining[task] = old.process
        task.add_done_callback(lambda task: self._draining.pop(task, None))

    async def _drain_and_release(self, old: Serving) -> None:
        try:
            if isinstance(old.process, RankGroup):
                await asyncio.sleep(TIMING.late_rank_call_seconds)
            await old.process.drain(TIMING.generation_drain_seconds)
        finally:
            # Also if this task is cancelled: then calls that still run are lost.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(old.process.kill())
                if old.node is not None:
                    await asyncio.shield(old.node.kill())
            self.project.release(old.slot)

    def _refusal(self, generation: int) -> KubetorchError:
        failure = self._failure
        if failure is None:
            return CallRefusedError(f"generation {generation} could not be loaded")
        error = CallRefusedError(
            f"generation {generation} could not be loaded: {failure.error_type}: {failure.message}",
            hint="deploy it again once that is put right",
        )
        error.remote_traceback = failure.traceback or None
        return error

    # ---------------------------------------------------------------------------------- loading

    async def _load(self, generation: int) -> None:
        try:
            await asyncio.to_thread(self._make_working_dir)
            if not self._machine.serving:
                await self._report_denials(generation)
            spec = await self.interpreters.choose(self._specs[generation])
            await self.data.prepare(spec, functools.partial(self._report_data, generation))
            loaded = await self._load_process(generation, spec)
        except LoadFailed as error:
            self._failure = error.failure
        except Exception as error:  # noqa: BLE001  # an agent that lives can be deployed to again
            if not isinstance(error, KubetorchError):
                _log.exception("load failed generation=%s", generation)
            self._failure = exceptions.describe_refusal(error, pod_name=self.pod.pod)
        else:
            self._loaded = loaded
            self._handle(reload.Loaded(generation))
            return
        _log.info("load failed generation=%s error=%s", generation, self._failure.message)
        self._handle(reload.Failed(generation))

    async def _report_denials(self, generation: int) -> None:
        """Report paths that the pod does not have, or cannot use."""
        warnings = [self.filesystem.warning] if self.filesystem.warning else []
        if self.filesystem.is_container:
            spec = self._specs[generation]
            warnings += await asyncio.to_thread(environment.denials, spec, self.pod)
        for text in warnings:
            self.session.report_stage(StageReport(generation, "starting", text, warning=True))

    def _report_data(self, generation: int, text: str) -> None:
        self.session.report_stage(StageReport(generation, "data", f"fetching {text}"))

    async def refresh_data(self) -> list[DataMount]:
        """Fetch anew what keys hold that the served generation declares."""
        spec = self._specs.get(self._machine.serving)
        if spec is None:
            raise CallRefusedError(f"pod {self.pod.pod} is being started", hint="try again")
        return await self.data.refresh(spec)

    def _make_working_dir(self) -> None:
        """Make the working directory, which user code may have removed."""
        Path(self.pod.working_dir).mkdir(parents=True, exist_ok=True)

    async def _load_process(self, generation: int, spec: WorkloadSpec) -> Serving:
        try:
            if spec.callable.app is not None:
                make_room = functools.partial(self._make_room, generation)
                return await self.loader.load_app(generation, spec, make_room=make_room)
            is_first = not self._machine.serving
            await self._leave_world(generation)
            return await self.loader.load_worker(generation, spec, is_first=is_first)
        except BaseException:
            if self._serving is not None:
                await asyncio.shield(self.project.show(self._serving.slot))
            raise

    async def _leave_world(self, generation: int) -> None:
        """End the processes of an earlier world of the generation: their memory is needed."""
        previous = self._serving
        if previous is None or not isinstance(previous.process, RankGroup):
            return
        if previous.process.generation == generation:
            self._serving = None
            try:
                await asyncio.shield(previous.process.kill())
                if previous.node is not None:
                    await asyncio.shield(previous.node.kill())
            finally:
                self.project.release(previous.slot)

    async def _make_room(self, generation: int) -> None:
        """End the app that serves."""
        previous = self._serving
        if previous is not None and isinstance(previous.process, AppProcess):
            self._serving = None
            self._handle(reload.Stopped(generation))
            try:
                await previous.process.drain(TIMING.generation_drain_seconds)
            finally:
                await asyncio.shield(previous.process.kill())
                self.project.release(previous.slot)
