"""What can be done with workloads: deploy, look at, delete."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Iterable, Iterator

from kubetorch.controller import checking, departures, summary
from kubetorch.controller.access import PodIdentity
from kubetorch.controller.backends.base import Backend
from kubetorch.controller.calls import Calls
from kubetorch.controller.depots import Depots
from kubetorch.controller.locks import Locks
from kubetorch.controller.progress import Progress
from kubetorch.controller.state import State, WorkloadRecord
from kubetorch.controller.summary import Summary
from kubetorch.controller.surroundings import Surroundings
from kubetorch.controller.workload import Workload
from kubetorch.errors import KubetorchError, ServiceNotFoundError, SpecError, WorkloadError
from kubetorch.lib.clock import Clock, Timer
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import tokens, versions, waits
from kubetorch.wire.messages import (
    CallReport,
    CallView,
    CancelCall,
    Deploy,
    DeployEvent,
    Missing,
    TokenView,
    WorkloadView,
)

#: Seconds that a token for calls is good for when nothing is said, and the bounds.
TOKEN_LIFETIME = 3600.0
TOKEN_LEAST = 1.0
TOKEN_MOST = 30 * 86400.0
#: Seconds after the start in which the calls of pods that are not there are given up.
SWEEP_DELAY = 30.0
#: Seconds until that is done again: what was not known then may be by now.
SWEEP_INTERVAL = 600.0
#: Deploys that a repeated request can join.
_REMEMBERED_DEPLOYS = 32

_log = logging.getLogger(__name__)


class Workloads:
    """All workloads.

    Args:
        backend: Runs their pods.
        state: Keeps their records.
        depots: Where blobs are.
        calls: Told of calls that are lost with their pods.
        clock: The time.
        secret: Secret of the installation, for tokens.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        state: State,
        depots: Depots,
        calls: Calls,
        clock: Clock,
        secret: bytes,
    ) -> None:
        self._backend = backend
        self._state = state
        self._depots = depots
        self._calls = calls
        self._clock = clock
        self._secret = secret
        self._workloads: dict[tuple[str, str], Workload] = {}
        self._locks = Locks()
        self._deploys: OrderedDict[tuple[str, str, str], Progress] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweep: Timer | None = None
        # What cannot be read, but may have pods.
        self._rejected: set[tuple[str, str]] = set()
        self._surroundings = Surroundings(
            backend=backend,
            state=state,
            clock=clock,
            on_idle=lambda workload: self._delete_soon(*workload.key),
            on_lost=lambda workload, pods: self._calls.lost(*workload.key, pods),
        )

    # ------------------------------------------------------------------------------- the service

    async def start(self) -> None:
        """Take up what an earlier controller left."""
        contents = self._state.contents()
        specs = []
        for record in contents.workloads:
            key = (record.namespace, record.name)
            generations = contents.generations.get(key, ())
            workload = Workload(record, generations, self._surroundings)
            try:
                checking.check(workload.spec, self._backend)
            except Exception as error:  # noqa: BLE001  # another version wrote it, or a user
                _log.exception("workload cannot be read workload=%s/%s", *key)
                self._state.reject_workload(*key, f"{type(error).__name__}: {error}")
                self._rejected.add(key)
            else:
                self._workloads[key] = workload
                specs.append(workload.specs)
        self._backend.watch(self._on_pods)
        self._state.observe(self)
        await self._backend.start(specs)
        for key, workload in self._workloads.items():
            try:
                workload.pods_changed()
            except Exception:  # noqa: BLE001  # one of them must not keep the others waiting
                _log.exception("workload not taken up workload=%s/%s", *key)
        # By then what is there has been seen, and agents have said what they still run.
        self._sweep = self._clock.call_later(SWEEP_DELAY, self._sweep_calls)

    def _sweep_calls(self) -> None:
        self._calls.sweep(self._may_run)
        self._sweep = self._clock.call_later(SWEEP_INTERVAL, self._sweep_calls)

    def _may_run(self, namespace: str, name: str, pod: str) -> bool:
        """Whether a call may still run in a pod, as far as anybody knows."""
        workload = self._workloads.get((namespace, name))
        if workload is None:
            return (namespace, name) in self._rejected
        if not workload.pods and self._backend.trouble(namespace, name).reason:
            return True  # its pods are not known yet
        return any(one.name == pod and departures.is_able(one) for one in workload.pods)

    async def close(self, *, pods: bool) -> None:
        """The controller stops.

        Args:
            pods: Whether the pods stop too: then nobody goes on with their deploys.
        """
        if self._sweep is not None:
            self._sweep.cancel()
        for workload in self._workloads.values():
            workload.close("the controller stops", goes_on=not pods)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def backend(self) -> Backend:
        """What runs their pods."""
        return self._backend

    @property
    def is_empty(self) -> bool:
        """Whether nothing is deployed, or being deployed or deleted."""
        return not self._workloads and not self._locks

    def __len__(self) -> int:
        return len(self._workloads)

    def specs(self) -> Iterable[WorkloadSpec]:
        """All generations whose blobs are to be kept."""
        return [spec for workload in self._workloads.values() for spec in workload.specs]

    # ------------------------------------------------------------------------------ pods' sessions

    def workload_of(self, pod: PodIdentity) -> Workload | None:
        """The workload of a pod, if there is such a pod."""
        workload = self._workloads.get((pod.namespace, pod.workload))
        return workload if workload is not None and pod.pod in workload.pod_names else None

    def is_pod(self, pod: PodIdentity) -> bool:
        """Whether there is such a pod."""
        return self.workload_of(pod) is not None

    def on_call(self, pod: PodIdentity, report: CallReport) -> None:
        """News of a spawned call."""
        self._calls.report(pod.namespace, pod.workload, pod.pod, report)

    def on_calls(self, pod: PodIdentity, ids: Collection[str]) -> None:
        """The agent of a pod knows of no other spawned calls that run."""
        self._calls.lost_by_agent(pod.namespace, pod.workload, pod.pod, ids)

    # ------------------------------------------------------------------------- for the state

    def summary(self, namespace: str, name: str) -> Summary | None:
        """How a workload is; `None` when there is none of that name."""
        workload = self._workloads.get((namespace, name))
        if workload is None or not workload.specs:
            return None
        return summary.of(workload.view(), self._clock.time())

    def on_deleted_elsewhere(self, namespace: str, name: str) -> None:
        """Somebody else deleted a workload: what it runs on goes too."""
        self._delete_soon(namespace, name)

    def _on_pods(self, namespace: str, name: str) -> None:
        workload = self._workloads.get((namespace, name))
        if workload is not None:
            workload.pods_changed_soon()

    # ----------------------------------------------------------------------------------- deploys

    def check(self, deploy: Deploy, namespace: str, name: str) -> None:
        """Refuse a deploy that cannot be understood, before anything of it is stored.

        Raises:
            VersionMismatchError: The client is too old or too new.
            SpecError: The spec is impossible.
        """
        versions.check(
            deploy.protocol,
            peer=f"this client, version {deploy.version},",
            fix_peer=versions.FIX_CLIENT,
            fix_self=versions.FIX_CONTROLLER[self._backend.name],
        )
        spec = deploy.spec
        if (spec.namespace, spec.name) != (namespace, name):
            raise SpecError(
                f"the spec is of {spec.namespace}/{spec.name}, the request for {namespace}/{name}"
            )
        checking.check(spec, self._backend)
        if (namespace, name) not in self._workloads:
            self._backend.prepare()

    async def deploy(self, deploy: Deploy) -> AsyncIterator[DeployEvent]:
        """Deploy; the events until it is over, or `Missing` alone.

        The generation goes its way when nobody listens any more.

        Raises:
            KubetorchError: It could not be stored.
        """
        async with self._locks.of((deploy.spec.namespace, deploy.spec.name)):
            # Ids are chosen by clients: one of another workload is another deploy.
            key = (deploy.spec.namespace, deploy.spec.name, deploy.id)
            progress = self._deploys.get(key)
            if progress is None:
                completeness = self._depots.of(deploy.spec.namespace).completeness
                missing = completeness.missing(deploy.spec)
                if missing:
                    return _only(Missing(blobs=tuple(missing)))
                progress = await self._deploy(deploy.spec)
                self._remember(key, progress)
        return progress.follow(logs=deploy.stream_logs)

    async def _deploy(self, spec: WorkloadSpec) -> Progress:
        key = (spec.namespace, spec.name)
        workload = self._workloads.get(key)
        if workload is None:
            record = WorkloadRecord(*key, generation=0, created=self._clock.time())
            workload = self._workloads[key] = Workload(record, (), self._surroundings)
        try:
            return await workload.deploy(spec)
        finally:
            if not workload.specs:  # its first generation could not be stored
                del self._workloads[key]

    def _remember(self, key: tuple[str, str, str], progress: Progress) -> None:
        self._deploys[key] = progress
        while len(self._deploys) > _REMEMBERED_DEPLOYS:
            self._deploys.popitem(last=False)

    # ----------------------------------------------------------------------------------- reading

    def get(self, namespace: str, name: str) -> Workload:
        """One workload.

        Raises:
            ServiceNotFoundError: There is none of that name.
        """
        workload = self._workloads.get((namespace, name))
        if workload is None or not workload.specs:
            raise ServiceNotFoundError(
                f"there is no service {name} in namespace {namespace}",
                hint=f"kt list -n {namespace} shows those that are there",
            )
        return workload

    def list(self, namespace: str | None = None) -> list[WorkloadView]:
        """All workloads, of a namespace if it is given, by name."""
        return [workload.view() for workload in self.in_namespace(namespace)]

    def in_namespace(self, namespace: str | None) -> Iterator[Workload]:
        """The workloads of a namespace, or of all, by name."""
        for key, workload in sorted(self._workloads.items()):
            if namespace in (None, key[0]) and workload.specs:
                yield workload

    def view(self, workload: Workload, subject: str) -> WorkloadView:
        """A workload as somebody sees it who may call it."""
        token = self.token(*workload.key, ttl=TOKEN_LIFETIME, subject=subject)
        return workload.view(token=token.token, token_expires=token.expires)

    def token(
        self,
        namespace: str,
        name: str,
        *,
        ttl: float,
        subject: str,
        verbs: tuple[str, ...] = (tokens.CALL,),
    ) -> TokenView:
        """A token for a workload.

        Args:
            namespace: Namespace of the workload.
            name: Its name.
            ttl: Seconds that it is good for.
            subject: Who gets it.
            verbs: What it is for, of `tokens.VERBS`.
        """
        audience = tokens.audience(namespace, name)
        now = self._clock.time()
        # Pods on this machine have this clock: none of them has to bear with another.
        issued = 0.0 if self._backend.name == "local" else now
        claims = tokens.Claims(audience, now + ttl, subject, verbs, issued)
        key = tokens.workload_key(self._secret, audience)
        return TokenView(tokens.sign(key, claims), claims.expires)

    # ---------------------------------------------------------------------------------- changing

    async def delete(self, namespace: str, name: str, *, grace: float = waits.DELETE_GRACE) -> None:
        """End a workload; returns when nothing of it is left.

        Args:
            namespace: Its namespace.
            name: Its name.
            grace: Seconds that running calls have to end.

        Raises:
            ServiceNotFoundError: There is none of that name.
        """
        key = (namespace, name)
        async with self._locks.of(key):
            workload = self.get(namespace, name)
            pods = dict.fromkeys(workload.pod_names, departures.DELETED)
            # First the record: should the controller die now, its successor ends what is left.
            self._state.delete_workload(*key)
            await self._state.flush(*key)
            try:
                await workload.delete(grace)
            finally:
                self._workloads.pop(key, None)
                self._calls.lost(*key, pods)
            _log.info("workload deleted workload=%s/%s", *key)

    def cancel_call(self, call_id: str) -> CallView:
        """Cancel a spawned call, if it still runs.

        Raises:
            ResultExpiredError: It is unknown, or forgotten.
            WorkloadError: Its pod cannot be told.
        """
        call = self._calls.get(call_id)
        if call.ended is not None:
            return call
        workload = self._workloads.get((call.namespace, call.workload))
        message = CancelCall(id=call_id, reason="cancelled by its id")
        if workload is None or not workload.send(call.pod, message):
            raise WorkloadError(
                f"pod {call.pod}, which runs the call {call_id}, has no session",
                hint="try again in a moment",
            )
        return call

    def _delete_soon(self, namespace: str, name: str) -> None:
        task = asyncio.get_running_loop().create_task(self._delete_quietly(namespace, name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _delete_quietly(self, namespace: str, name: str) -> None:
        try:
            await self.delete(namespace, name)
        except ServiceNotFoundError:
            pass
        except KubetorchError as error:
            _log.warning("workload not deleted workload=%s/%s error=%s", namespace, name, error)


async def _only(event: DeployEvent) -> AsyncIterator[DeployEvent]:
    yield event
