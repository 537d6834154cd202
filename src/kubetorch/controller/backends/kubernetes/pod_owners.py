"""Which pods are a workload's: those that an object of its controller has made; and which must end.

pod ──► ReplicaSet ──► Deployment, applied here for this very workload

Labels are anybody's to write, and so are names of owners: each is looked up by its name, and has to
have the identity that is named below it. What is once known of an owner stays so.

Pods that must not have what they have mounted end, and an event of each says why. Whatever made a
pod makes another one at once, which may be refused as well. So the more of a workload were refused
since it was applied, the later the next one ends; until then it has no key and no code.
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

#: Objects between a pod and what was applied, at most: a worker of a LeaderWorkerSet has four.
DEPTH = 8
#: Seconds that a controller which starts waits to know whose the pods of a workload are.
SETTLING = 2.0
# Seconds until an owner is looked up again whose server did not answer: at first, and at most.
_AGAIN = (0.5, 15.0)
#: The reason of the events.
REASON = "MountRefused"
#: Seconds that each pod of a workload waits longer than the one before, and the most.
PAUSE, LONGEST = 2.0, 300.0
_MESSAGE_LIMIT = 1024

_log = logging.getLogger(__name__)


class PodOwners:
    def __init__(
        self,
        client: Client,
        owner: Callable[[str, str], Manifest | None],
        pods: Callable[[Key], Mapping[str, Object]],
        on_known: Callable[[Key], None],
    ) -> None:
        self._client = client
        self._owner = owner
        self._pods = pods
        self._on_known = on_known
        # By workload and identity of an owner; `None`: it is gone.
        self._known: dict[Key, dict[str, bool | None]] = {}
        self._looking: dict[tuple[Key, str], asyncio.Task[None]] = {}

    def is_made(self, key: Key, pod: Object, main: Manifest) -> bool | None:
        """True if a pod belongs to the workload that an object is applied for; `None`: unknown."""
        owner = controller_of(pod)
        if owner is None:
            is_main = main["kind"] == "Pod" and pod["metadata"]["name"] == main["metadata"]["name"]
            return is_main and is_applied(pod, self._owner(*key))
        at = (key, str(owner["uid"]))
        known = self._known.get(key, {})
        if at[1] not in known and at not in self._looking:
            look = self._look(at, owner, identity(main))
            self._looking[at] = asyncio.create_task(look, name=f"owner of {key[1]}")
        return known.get(at[1])

    def look_again(self, key: Key) -> None:
        """Other objects are applied for a workload: who was none of its owners may be one now."""
        known = self._known.get(key, {})
        self._known[key] = {uid: is_ours for uid, is_ours in known.items() if is_ours}
        for at in [at for at in self._looking if at[0] == key]:
            self._looking.pop(at).cancel()

    def forget(self, key: Key) -> None:
        self.look_again(key)
        del self._known[key]

    async def settle(self, key: Key) -> None:
        """Wait until what is looked up for a workload is known; not for a server that is away."""
        tasks = [task for at, task in self._looking.items() if at[0] == key]
        if tasks:
            await asyncio.wait(tasks, timeout=SETTLING)

    async def close(self) -> None:
        await cancel_all(self._looking.values())

    async def _look(self, at: tuple[Key, str], owner: Object, main: tuple[str, str, str]) -> None:
        is_ours: bool | None = False
        pauses = backoff.jittered(backoff.exponential(first=_AGAIN[0], limit=_AGAIN[1]))
        for pause in pauses:
            try:
                is_ours = await self._leads(at[0], owner, main)
                break
            except KubernetesForbiddenError as error:
                _log.warning(
                    "pods refused workload=%s/%s since their owner %s cannot be read: %s; the "
                    "chart's rbac.extraRules can allow it",
                    *(*at[0], owner["kind"], error),
                )
                break
            except KubetorchError as error:
                _log.info("owner not known yet workload=%s/%s error=%s", *at[0], error)
                await asyncio.sleep(pause)
        del self._looking[at]
        # A CronJob has another owner for each run: those without pods are forgotten.
        owners = [controller_of(pod) for pod in self._pods(at[0]).values()]
        alive = {one["uid"] for one in owners if one is not None}
        known = self._known.get(at[0], {})
        kept = {uid: is_known for uid, is_known in known.items() if uid in alive}
        self._known[at[0]] = {**kept, at[1]: is_ours}
        self._on_known(at[0])

    async def _leads(self, key: Key, owner: Object, main: tuple[str, str, str]) -> bool | None:
        """True if an owner was applied, or made by an applied object; `None`: an owner is gone."""
        for _ in range(DEPTH):
            try:
                resource = await self._client.discovery.resource_of(owner)
                found = await self._client.get(Ref(resource, owner["name"], key[0]))
            except KubernetesNotFoundError:
                return None
            if found["metadata"].get("uid") != owner["uid"]:
                return None
            is_main = identity({**owner, "metadata": {"name": owner["name"]}}) == main
            if is_main and is_applied(found, self._owner(*key)):
                return True
            above = controller_of(found)
            if above is None:
                return False
            owner = above
        return False


class _Refused(NamedTuple):
    key: Key
    reason: str
    ending: asyncio.Task[None]


class RefusedPods:
    def __init__(self, client: Client, now: Callable[[], float]) -> None:
        self._client = client
        self._now = now
        self._counts: Counter[Key] = Counter()
        # By the identity of the pod.
        self._refused: dict[str, _Refused] = {}

    def has(self, pod: Object) -> bool:
        return pod["metadata"]["uid"] in self._refused

    def reason(self, key: Key) -> str:
        """Why a workload has no pods in place of those that are refused and not gone yet."""
        return next((one.reason for one in self._refused.values() if one.key == key), "")

    def end(self, key: Key, pod: Object, error: KubetorchError) -> None:
        """End a pod, in a while if others of its workload were refused before."""
        if self.has(pod):
            return
        pause = min(PAUSE * self._counts[key], LONGEST)
        self._counts[key] += 1
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        _log.warning("pod refused workload=%s/%s pod=%s error=%s", *key, name, error)
        ending = asyncio.create_task(self._end(pod, error, pause), name=f"end {name}")
        self._refused[uid] = _Refused(key, f"pod {name} is refused: {error.message}", ending)

    def gone(self, pod: Object) -> None:
        refused = self._refused.pop(pod["metadata"].get("uid"), None)
        if refused is not None:
            refused.ending.cancel()

    def forget(self, key: Key) -> None:
        """A workload is applied anew, or gone."""
        del self._counts[key]

    async def close(self) -> None:
        await cancel_all([one.ending for one in self._refused.values()])

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

    def _event(self, of_pod: Object, error: KubetorchError) -> Object:
        time = datetime.fromtimestamp(self._now(), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        regarding = {part: of_pod[part] for part in ("name", "namespace", "uid")}
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"refused-{of_pod['uid']}",
                "namespace": of_pod["namespace"],
            },
            "involvedObject": {"apiVersion": "v1", "kind": "Pod", **regarding},
            "reason": REASON,
            "message": str(error)[:_MESSAGE_LIMIT],
            "type": "Warning",
            "source": {"component": "kubetorch-controller"},
            "firstTimestamp": time,
            "lastTimestamp": time,
            "count": 1,
        }
