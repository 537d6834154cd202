"""All workloads of a controller: deploy, read and delete them."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import astuple
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from kubetorch.controller import views
from kubetorch.controller.access import NO_GRANT, Grant, PodIdentity
from kubetorch.controller.backends.base import Backend
from kubetorch.controller.blobs import BlobStores
from kubetorch.controller.calls import Calls
from kubetorch.controller.deploys import DeployProgress
from kubetorch.controller.ownership import check_owner
from kubetorch.controller.state import State, Summary, WorkloadRecord
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.controller.workload import Workload, WorkloadServices
from kubetorch.datastore import blobs
from kubetorch.errors import KubetorchError, ServiceNotFoundError, SpecError, WorkloadError
from kubetorch.lib.clock import Clock, Timer
from kubetorch.lib.tasks import cancel_all, start_task
from kubetorch.manifests import desired_pods, rendering
from kubetorch.manifests.desired_pods import Attached
from kubetorch.manifests.kinds import Manifest
from kubetorch.specs import autoscaling, names, quantity
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.image import CopyStep
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import messages, tokens, versions
from kubetorch.wire import tuning as wire_tuning

#: By namespace and name of a secret or volume: the workloads that use it.
Users = dict[tuple[str, str], tuple[str, ...]]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class Workloads:
    def __init__(
        self,
        *,
        backend: Backend,
        state: State,
        blob_stores: BlobStores,
        calls: Calls,
        clock: Clock,
        secret: bytes,
    ) -> None:
        self.backend = backend
        self._state = state
        self._blob_stores = blob_stores
        self._calls = calls
        self._clock = clock
        self._secret = secret
        self._workloads: dict[tuple[str, str], Workload] = {}
        # By workload: a lock that allows one change at a time, while a change holds it or waits.
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._deploys: OrderedDict[tuple[str, str, str], DeployProgress] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweep_timer: Timer | None = None
        # By workload that stopped by itself lately: why.
        self._stop_reasons: OrderedDict[tuple[str, str], str] = OrderedDict()
        # Workloads that cannot be read, but may have pods.
        self._rejected: set[tuple[str, str]] = set()
        #: Ends what belongs to a service that was torn down; returns how many keys that were.
        self.on_torn_down: Callable[[str, str], Awaitable[int]] = _no_keys
        self._services = WorkloadServices(
            backend=backend,
            state=state,
            clock=clock,
            on_idle=lambda workload: self._delete_soon(*workload.key),
            on_notice=self._announce,
            on_lost=lambda workload, pods: self._calls.lost(*workload.key, pods),
        )

    # ------------------------------------------------------------------------------- the service

    async def start(self) -> None:
        """Adopt the workloads that an earlier controller left."""
        contents = self._state.contents()
        specs = []
        for record in contents.workloads:
            key = (record.namespace, record.name)
            generations = contents.generations.get(key, ())
            usable_generations = tuple(
                generation
                for generation in generations
                if generation.number == record.generation or self._is_possible(generation.spec)
            )
            workload = Workload(record, usable_generations, self._services)
            try:
                _check_spec(workload.spec, self.backend)
            except Exception as error:  # noqa: BLE001  # a user may have written it
                _log.exception("workload cannot be read workload=%s/%s", *key)
                self._state.reject_workload(*key, f"{type(error).__name__}: {error}")
                self._rejected.add(key)
            else:
                self._workloads[key] = workload
                specs.append(workload.specs)
        for workload in self._workloads.values():
            await workload.adopt_scaling()
        self.backend.watch(self._on_pods)
        self._state.observe(self)
        await self.backend.start(specs)
        for key, workload in self._workloads.items():
            self._guarded(key, workload.adopted, None)
        # By then pods are known, and agents have reported the calls that they still run.
        self._sweep_timer = self._clock.call_later(
            TIMING.call_sweep_delay_seconds, self._sweep_calls
        )

    def _is_possible(self, spec: WorkloadSpec) -> bool:
        """True if an earlier generation, which a user may have edited, can be served again."""
        try:
            _check_spec(spec, self.backend)
        except Exception as error:  # noqa: BLE001  # as for the wanted one
            _log.warning("generation dropped workload=%s/%s: %s", spec.namespace, spec.name, error)
            return False
        return True

    def _guarded(self, key: tuple[str, str], action: Callable[[], _T], otherwise: _T) -> _T:
        """Call a function of one workload; its errors are logged and do not concern the others."""
        try:
            return action()
        except Exception:  # noqa: BLE001  # the other workloads go on
            _log.exception("workload failed workload=%s/%s", *key)
            return otherwise

    def _sweep_calls(self) -> None:
        def may_run(namespace: str, name: str, pod: str) -> bool:
            check = partial(self._may_run, namespace, name, pod)
            return self._guarded((namespace, name), check, otherwise=True)

        self._calls.sweep(may_run)
        self._sweep_timer = self._clock.call_later(
            TIMING.call_sweep_interval_seconds, self._sweep_calls
        )

    def _may_run(self, namespace: str, name: str, pod: str) -> bool:
        workload = self._workloads.get((namespace, name))
        if workload is None:
            return (namespace, name) in self._rejected
        if not workload.pods and self.backend.trouble(namespace, name).reason:
            return True  # its pods are not known yet
        return any(
            pod_status.name == pod and pod_status.may_run_calls for pod_status in workload.pods
        )

    async def close(self, *, pods: bool) -> None:
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for key, workload in self._workloads.items():
            stop = partial(workload.close, "the controller stops", goes_on=not pods)
            self._guarded(key, stop, None)
        await cancel_all(self._tasks)

    @property
    def is_empty(self) -> bool:
        """True if nothing is deployed, or being deployed or deleted."""
        return not self._workloads and not self._locks

    def __len__(self) -> int:
        return len(self._workloads)

    def has(self, namespace: str, name: str) -> bool:
        return (namespace, name) in self._workloads

    def find(self, namespace: str, name: str) -> Workload | None:
        return self._workloads.get((namespace, name))

    def specs(self) -> Iterable[WorkloadSpec]:
        """The specs of all stored generations, whose blobs are kept."""
        return [spec for workload in self._workloads.values() for spec in workload.specs]

    # ------------------------------------------------------------------------------ pods' sessions

    def workload_of(self, pod: PodIdentity) -> Workload | None:
        workload = self._workloads.get((pod.namespace, pod.workload))
        return workload if workload is not None and pod.pod in workload.pod_names else None

    def on_call(self, pod: PodIdentity, report: messages.CallReport) -> None:
        if not self._calls.report(pod.namespace, pod.workload, pod.pod, report):
            return
        workload = self.workload_of(pod)
        code = None if workload is None else workload.code_of(report.generation)
        if report.record is not None and code is not None:
            self._calls.replays.add(pod.namespace, pod.workload, pod.pod, report, *code)

    def on_calls(self, pod: PodIdentity, ids: Collection[str]) -> None:
        """Fail the spawned calls of a pod that its agent does not name among the running ones."""
        self._calls.lost_by_agent(pod.namespace, pod.workload, pod.pod, ids)

    # ------------------------------------------------------------------------- for the state

    def summary(self, namespace: str, name: str) -> Summary | None:
        workload = self._workloads.get((namespace, name))
        if workload is None or not workload.specs:
            return None
        return views.summary(workload.view(), self._clock.time())

    def on_deleted_elsewhere(self, namespace: str, name: str) -> None:
        self._delete_soon(namespace, name)

    def _on_pods(self, namespace: str, name: str) -> None:
        workload = self._workloads.get((namespace, name))
        if workload is not None:
            self._guarded((namespace, name), workload.pods_changed_soon, None)

    # ----------------------------------------------------------------------------------- deploys

    def check(self, deploy: messages.Deploy, namespace: str, name: str) -> None:
        """Refuse an impossible deploy, before anything of it is stored."""
        versions.check(
            deploy.protocol,
            peer=f"this client, version {deploy.version},",
            fix_peer=versions.FIX_CLIENT,
            fix_self=versions.FIX_CONTROLLER[self.backend.name],
        )
        spec = deploy.spec
        if (spec.namespace, spec.name) != (namespace, name):
            raise SpecError(
                f"the spec is of {spec.namespace}/{spec.name}, the request for {namespace}/{name}"
            )
        _check_spec(spec, self.backend)
        if (namespace, name) not in self._workloads:
            self.backend.prepare()

    def check_owner(self, deploy: messages.Deploy, creator: messages.Creator) -> str:
        """Refuse a deploy over another creator's service; returns what it replaces, in words."""
        workload = self._workloads.get((deploy.spec.namespace, deploy.spec.name))
        if workload is None or not workload.specs:
            return ""
        use = workload.use(deploy.program)
        return check_owner(workload.spec, workload.creator, deploy, creator, use)

    async def deploy(
        self, deploy: messages.Deploy, creator: messages.Creator, grant: Grant = NO_GRANT
    ) -> AsyncIterator[messages.DeployEvent]:
        """Deploy; returns the events until the deploy is over, or `Missing` alone.

        The deploy goes on when no client follows the events any more.
        """
        replaced = ""
        workload_key = (deploy.spec.namespace, deploy.spec.name)
        async with self._locks.setdefault(workload_key, asyncio.Lock()):
            # Clients choose the ids: the same id of another workload is another deploy.
            key = (*workload_key, deploy.id)
            progress = self._deploys.get(key)
            if progress is None:
                replaced = self.check_owner(deploy, creator)
                store = self._blob_stores.of(deploy.spec.namespace)
                with store.keep(deploy.spec):
                    missing = await store.missing(deploy.spec)
                    if missing:
                        return _after(messages.Missing(blobs=tuple(missing)))
                    progress = self._deploys[key] = await self._deploy(deploy.spec, grant)
                self._workloads[workload_key].opened_by(deploy.program)
                while len(self._deploys) > LIMITS.remembered_deploys:
                    self._deploys.popitem(last=False)
        events = progress.follow(logs=deploy.stream_logs)
        return (
            _after(messages.Stage("replaced", replaced, warning=True), events)
            if replaced
            else events
        )

    async def _deploy(self, spec: WorkloadSpec, grant: Grant) -> DeployProgress:
        key = (spec.namespace, spec.name)
        workload = self._workloads.get(key)
        if workload is None:
            record = WorkloadRecord(*key, generation=0, created=self._clock.time())
            workload = self._workloads[key] = Workload(record, (), self._services)
            self._stop_reasons.pop(key, None)
        try:
            return await workload.deploy(spec, grant)
        finally:
            if not workload.specs:  # its first generation could not be stored
                del self._workloads[key]

    # ----------------------------------------------------------------------------------- reading

    def get(self, namespace: str, name: str) -> Workload:
        workload = self._workloads.get((namespace, name))
        if workload is None or not workload.specs:
            reason = self._stop_reasons.get((namespace, name), "")
            if reason:
                raise stopped(name, reason)
            raise ServiceNotFoundError(
                f"there is no service {name} in namespace {namespace}",
                hint=f"kt list -n {namespace} shows the services",
            )
        return workload

    def list(self, namespace: str | None = None) -> list[messages.WorkloadView]:
        workload_views = (
            self._guarded(workload.key, workload.view, None)
            for workload in self.in_namespace(namespace)
        )
        return [view for view in workload_views if view is not None]

    def in_namespace(self, namespace: str | None) -> Iterator[Workload]:
        """The workloads of a namespace, or of all, by name."""
        for key, workload in sorted(self._workloads.items()):
            if namespace in (None, key[0]) and workload.specs:
                yield workload

    def token(
        self,
        namespace: str,
        name: str,
        *,
        ttl: float,
        subject: str,
        verbs: tuple[str, ...] = (tokens.CALL,),
    ) -> messages.TokenView:
        audience = tokens.audience(namespace, name)
        now = self._clock.time()
        # Pods on this machine have this clock: their tokens need no tolerance.
        issued = 0.0 if self.backend.name == "local" else now
        claims = tokens.Claims(audience, now + ttl, subject, verbs, issued)
        key = tokens.workload_key(self._secret, audience)
        return messages.TokenView(tokens.sign(key, claims), claims.expires)

    def data_token(self, namespace: str, name: str) -> str:
        """A token for the blobs that pods of a workload publish."""
        ttl, verbs = TIMING.data_token_seconds, (tokens.DATA,)
        return self.token(namespace, name, ttl=ttl, subject="data", verbs=verbs).token

    def users_of_secrets(self, namespace: str | None) -> Users:
        """By secret: the workloads that see it, of a namespace or of all."""
        return self._users(namespace, lambda attached: attached.all_secrets)

    def users_of_volumes(self, namespace: str | None) -> Users:
        return self._users(namespace, lambda attached: [claim.claim for claim in attached.claims])

    def _users(self, namespace: str | None, used: Callable[[Attached], Iterable[str]]) -> Users:
        users: Users = {}
        for workload in self.in_namespace(namespace):
            where, name = workload.key
            attached = _attached(workload.spec, rendering.of_workload(workload.spec))
            for used_name in dict.fromkeys(used(attached)):
                users[where, used_name] = (*users.get((where, used_name), ()), name)
        return users

    # ---------------------------------------------------------------------------------- changing

    async def delete(
        self, namespace: str, name: str, *, grace: float = wire_tuning.TIMING.teardown_grace_seconds
    ) -> messages.Teardown:
        """Delete a workload, and the keys that belong to it."""
        key = (namespace, name)
        async with self._locks.setdefault(key, asyncio.Lock()):
            workload = self.get(namespace, name)
            torn_down = messages.Ending(reason="Deleted", message="its service was torn down")
            pods = dict.fromkeys(workload.pod_names, torn_down)
            # First the record: should the controller die now, its successor ends the pods.
            self._state.delete_workload(*key)
            await self._state.flush(*key)
            try:
                remaining_objects = tuple(await workload.delete(grace))
            finally:
                self._workloads.pop(key, None)
                if workload.stop_reason:
                    self._stop_reasons[key] = workload.stop_reason
                    while len(self._stop_reasons) > LIMITS.remembered_deploys:
                        self._stop_reasons.popitem(last=False)
                self._calls.lost(*key, pods)
            keys = 0
            try:
                keys = await self.on_torn_down(*key)
            except (KubetorchError, OSError) as error:  # the workload is gone all the same
                _log.warning("keys not deleted workload=%s/%s error=%s", *key, error)
            _log.info(
                "workload deleted workload=%s/%s left=%s keys=%s", *key, remaining_objects, keys
            )
            return messages.Teardown(deleted=name, remaining=remaining_objects, keys=keys)

    def cancel_call(self, call_id: str) -> messages.CallView:
        call = self._calls.get(call_id)
        if call.ended is not None:
            return call
        workload = self._workloads.get((call.namespace, call.workload))
        message = messages.CancelCall(id=call_id, reason="cancelled by its id")
        if workload is None or not workload.send(call.pod, message):
            raise WorkloadError(
                f"pod {call.pod}, which runs the call {call_id}, has no session",
                hint="try again in a moment",
            )
        return call

    def _delete_soon(self, namespace: str, name: str) -> None:
        start_task(self._delete_quietly(namespace, name), self._tasks)

    def _announce(self, workload: Workload, reason: str, text: str) -> None:
        start_task(self._announce_quietly(workload.key, reason, text), self._tasks)

    async def _announce_quietly(self, key: tuple[str, str], reason: str, text: str) -> None:
        try:
            await self.backend.announce(*key, reason, text)
        except KubetorchError as error:
            _log.warning("event not written workload=%s/%s error=%s", *key, error)

    async def _delete_quietly(self, namespace: str, name: str) -> None:
        try:
            await self.delete(namespace, name)
        except ServiceNotFoundError:
            pass
        except KubetorchError as error:
            _log.warning("workload not deleted workload=%s/%s error=%s", namespace, name, error)


def stopped(name: str, reason: str) -> ServiceNotFoundError:
    """The error of a caller that comes after a service has stopped by itself."""
    error = ServiceNotFoundError(
        f"the service {name} has stopped: {reason}", hint="the next .to() starts it again"
    )
    error.reason = reason
    return error


async def _no_keys(namespace: str, name: str) -> int:
    """The number of keys of a service, without a data store."""
    return 0


async def _after(
    first: messages.DeployEvent, events: AsyncIterator[messages.DeployEvent] | None = None
) -> AsyncIterator[messages.DeployEvent]:
    yield first
    if events is not None:
        async for event in events:
            yield event


def _attached(spec: WorkloadSpec, manifest: Manifest) -> Attached:
    """The secrets and volumes that the pods of a workload see."""
    path = spec.compute.pod_template_path
    return desired_pods.read(manifest, pod_template_path=path).attached


def _check_spec(spec: WorkloadSpec, backend: Backend) -> None:
    """Refuse an impossible spec: of a deploy, or one that a user wrote by hand."""
    compute = spec.compute
    for label in (spec.namespace, spec.name):
        if names.clean(label) != label or len(label) > names.SERVICE_CHARACTERS:
            raise SpecError(f"{label!r} is no name: lower-case letters, digits and '-'")
    _check_texts(spec)
    _check_numbers(compute)
    mounted = len(compute.secrets) + len(compute.volumes)
    if mounted > LIMITS.mounted_stores:
        raise SpecError(
            f"it has {mounted} secrets and volumes; {LIMITS.mounted_stores} are allowed",
            hint="one secret has many values, and one volume many folders",
        )
    if compute.inactivity_ttl is not None:
        quantity.seconds(compute.inactivity_ttl)
    steps = compute.image.steps if compute.image is not None else ()
    copied = (step.digest for step in steps if isinstance(step, CopyStep))
    for digest in (spec.tree, spec.init_args, *copied):
        if digest is not None and not blobs.is_digest(digest):
            raise SpecError(
                f"{digest!r} names no code or arguments: a digest has 64 lower-case hex digits"
            )
    manifest = rendering.of_workload(spec)
    _attached(spec, manifest)  # lists of secrets and volumes read it
    namespace = manifest["metadata"]["namespace"]
    if namespace != spec.namespace:
        # Rights are checked for the namespace of the service.
        raise SpecError(
            f"the object of {spec.name} would be in namespace {namespace!r}, and the service is "
            f"in {spec.namespace!r}",
            hint=f"leave metadata.namespace out of service_template, or deploy in {namespace}",
        )
    backend.check(spec)


def _check_numbers(compute: ComputeSpec) -> None:
    if not 1 <= compute.replicas <= 10_000:
        raise SpecError(f"replicas is {compute.replicas}; it must be 1 or more")
    if compute.distribution is not None:
        compute.distribution.check()
    if compute.autoscaling is not None:
        autoscaling.check(compute.autoscaling)
    if not compute.pods <= 10_000:
        raise SpecError(f"workers is {compute.pods}; 10,000 are the most")
    if compute.launch_timeout <= 0:
        raise SpecError(f"launch_timeout is {compute.launch_timeout}; it must be above 0")


def _check_texts(spec: WorkloadSpec) -> None:
    """Refuse names of users, projects and callables that terminals could not show."""
    origin = spec.origin
    for text in (spec.username, *(() if origin is None else astuple(origin))):
        if isinstance(text, str) and not (
            len(text) <= LIMITS.origin_text_characters and text.isprintable()
        ):
            raise SpecError(
                f"{text[:80]!r} is no name of a user, a project or a callable: it has "
                f"{len(text):,} characters, of which {LIMITS.origin_text_characters:,} are "
                "allowed, all printable"
            )
