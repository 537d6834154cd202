"""Which pods belong to a workload: pods whose owners lead to an applied object; which must end.

pod ──► ReplicaSet ──► Deployment, which Kubetorch applied for this very workload

Any user can write labels and owner references. So each owner is read by its name, and has to have
the uid that the reference below it names. The answer for an owner never changes.

Pods that must not have their mounts are refused: an event of each says why, and the pod ends. Its
owner makes another pod at once, which may be refused as well. So the more pods of a workload were
refused since its apply, the later the next one ends; until then it gets no key and no code.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import NamedTuple

from kubetorch.controller.backends.kubernetes.apply import is_applied
from kubetorch.controller.backends.kubernetes.launch_failures.snapshot import controller_of
from kubetorch.controller.backends.kubernetes.objects import identity
from kubetorch.controller.backends.kubernetes.pods import Key
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.errors import (
    KubernetesConflictError,
    KubernetesForbiddenError,
    KubernetesNotFoundError,
    KubetorchError,
)
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import PODS, Object, Ref
from kubetorch.lib import backoff
from kubetorch.lib.tasks import cancel_all
from kubetorch.manifests.kinds import Manifest

#: The reason in the events of refused pods.
EVENT_REASON = "MountRefused"
_MESSAGE_LIMIT = 1024

_log = logging.getLogger(__name__)


class PodOwners:
    def __init__(
        self,
        client: Client,
        owner: Callable[[str, str], Manifest | None],
        pods: Callable[[Key], Mapping[str, Object]],
        on_resolved: Callable[[Key], None],
    ) -> None:
        self._client = client
        self._owner = owner
        self._pods = pods
        self._on_resolved = on_resolved
        # Whether an owner leads to the applied object, by workload and uid of the owner. `None`:
        # the owner, or one above it, does not exist any more.
        self._ownership: dict[Key, dict[str, bool | None]] = {}
        self._lookups: dict[tuple[Key, str], asyncio.Task[None]] = {}

    def belongs(self, key: Key, pod: Object, main: Manifest) -> bool | None:
        """True if a pod belongs to a workload with this main object; `None` if not known yet.

        Looks the owner up in the background, and calls `on_resolved` then.
        """
        owner = controller_of(pod)
        if owner is None:
            is_main = main["kind"] == "Pod" and pod["metadata"]["name"] == main["metadata"]["name"]
            return is_main and is_applied(pod, self._owner(*key))
        lookup_key = (key, str(owner["uid"]))
        ownership = self._ownership.get(key, {})
        if lookup_key[1] not in ownership and lookup_key not in self._lookups:
            lookup = self._resolve(lookup_key, owner, identity(main))
            self._lookups[lookup_key] = asyncio.create_task(lookup, name=f"owner of {key[1]}")
        return ownership.get(lookup_key[1])

    def forget_foreign_owners(self, key: Key) -> None:
        """Look foreign owners up once more, since other objects were applied for a workload."""
        ownership = self._ownership.get(key, {})
        self._ownership[key] = {uid: is_ours for uid, is_ours in ownership.items() if is_ours}
        for lookup_key in [lookup_key for lookup_key in self._lookups if lookup_key[0] == key]:
            self._lookups.pop(lookup_key).cancel()

    def forget(self, key: Key) -> None:
        self.forget_foreign_owners(key)
        del self._ownership[key]

    async def wait_until_resolved(self, key: Key) -> None:
        """Wait for the lookups of a workload, at most for `owner_lookup_seconds`."""
        tasks = [task for lookup_key, task in self._lookups.items() if lookup_key[0] == key]
        if tasks:
            await asyncio.wait(tasks, timeout=TIMING.owner_lookup_seconds)

    async def close(self) -> None:
        await cancel_all(self._lookups.values())

    async def _resolve(
        self, lookup_key: tuple[Key, str], owner: Object, main: tuple[str, str, str]
    ) -> None:
        is_ours: bool | None = False
        pauses = backoff.jittered(
            first=TIMING.owner_first_delay_seconds, limit=TIMING.owner_longest_delay_seconds
        )
        for pause in pauses:
            try:
                is_ours = await self._leads_to_main(lookup_key[0], owner, main)
                break
            except KubernetesForbiddenError as error:
                _log.warning(
                    "pods refused workload=%s/%s since their owner %s cannot be read: %s; the "
                    "chart's rbac.extraRules can allow it",
                    *(*lookup_key[0], owner["kind"], error),
                )
                break
            except KubetorchError as error:
                _log.info("owner not known yet workload=%s/%s error=%s", *lookup_key[0], error)
                await asyncio.sleep(pause)
        del self._lookups[lookup_key]
        # A CronJob makes a new owner for each run: owners without pods are forgotten.
        owners = [controller_of(pod) for pod in self._pods(lookup_key[0]).values()]
        alive = {reference["uid"] for reference in owners if reference is not None}
        ownership = self._ownership.get(lookup_key[0], {})
        remaining_ownership = {uid: belongs for uid, belongs in ownership.items() if uid in alive}
        self._ownership[lookup_key[0]] = {**remaining_ownership, lookup_key[1]: is_ours}
        self._on_resolved(lookup_key[0])

    async def _leads_to_main(
        self, key: Key, owner: Object, main: tuple[str, str, str]
    ) -> bool | None:
        """True if an owner is the applied main object, or is below it; `None` if one is missing."""
        for _ in range(LIMITS.pod_owners):
            try:
                resource = await self._client.discovery.resource_of(owner)
                live_object = await self._client.get(Ref(resource, owner["name"], key[0]))
            except KubernetesNotFoundError:
                return None
            if live_object["metadata"].get("uid") != owner["uid"]:
                return None
            is_main = identity({**owner, "metadata": {"name": owner["name"]}}) == main
            if is_main and is_applied(live_object, self._owner(*key)):
                return True
            upper_owner = controller_of(live_object)
            if upper_owner is None:
                return False
            owner = upper_owner
        return False


class _RefusedPod(NamedTuple):
    key: Key
    reason: str
    ending: asyncio.Task[None]


class RefusedPods:
    def __init__(self, client: Client, now: Callable[[], float]) -> None:
        self._client = client
        self._now = now
        self._counts: Counter[Key] = Counter()
        # By the uid of the pod.
        self._refused: dict[str, _RefusedPod] = {}

    def has(self, pod: Object) -> bool:
        return pod["metadata"]["uid"] in self._refused

    def reason(self, key: Key) -> str:
        """Why a workload lacks pods: a refused pod has not ended yet."""
        reasons = (pod.reason for pod in self._refused.values() if pod.key == key)
        return next(reasons, "")

    def end(self, key: Key, pod: Object, error: KubetorchError) -> None:
        """End a pod; the more pods of its workload were refused before, the later."""
        if self.has(pod):
            return
        pause = min(
            TIMING.refused_pod_delay_step_seconds * self._counts[key],
            TIMING.refused_pod_longest_delay_seconds,
        )
        self._counts[key] += 1
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        _log.warning("pod refused workload=%s/%s pod=%s error=%s", *key, name, error)
        ending = asyncio.create_task(self._end(pod, error, pause), name=f"end {name}")
        self._refused[uid] = _RefusedPod(key, f"pod {name} is refused: {error.message}", ending)

    def forget_pod(self, pod: Object) -> None:
        refused_pod = self._refused.pop(pod["metadata"].get("uid"), None)
        if refused_pod is not None:
            refused_pod.ending.cancel()

    def forget(self, key: Key) -> None:
        """Forget the refusals of a workload that is applied anew, or deleted."""
        del self._counts[key]

    async def close(self) -> None:
        await cancel_all([refused_pod.ending for refused_pod in self._refused.values()])

    async def _end(self, pod: Object, error: KubetorchError, pause: float) -> None:
        metadata = pod["metadata"]
        ref = Ref(PODS, metadata["name"], metadata["namespace"])
        try:
            await self._client.create(self._event(metadata, error))
        except KubetorchError as failure:
            _log.warning("event not written pod=%s error=%s", ref.name, failure)
        await asyncio.sleep(pause)
        try:
            await self._client.delete(ref, preconditions={"uid": metadata["uid"]})
        except (KubernetesNotFoundError, KubernetesConflictError):
            return
        except KubetorchError as failure:
            _log.warning("refused pod not ended pod=%s error=%s", ref.name, failure)

    def _event(self, pod_metadata: Object, error: KubetorchError) -> Object:
        time = datetime.fromtimestamp(self._now(), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        regarding = {part: pod_metadata[part] for part in ("name", "namespace", "uid")}
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"refused-{pod_metadata['uid']}",
                "namespace": pod_metadata["namespace"],
            },
            "involvedObject": {"apiVersion": "v1", "kind": "Pod", **regarding},
            "reason": EVENT_REASON,
            "message": str(error)[:_MESSAGE_LIMIT],
            "type": "Warning",
            "source": {"component": "kubetorch-controller"},
            "firstTimestamp": time,
            "lastTimestamp": time,
            "count": 1,
        }
