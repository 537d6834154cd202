"""Pods that must not have what they have mounted: they end, and an event of each says why.

Whatever made a pod makes another one at once, which may be refused as well. So the more of a
workload were refused since it was applied, the later the next one ends; until then it has no key
and no code.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone
from typing import NamedTuple

from kubetorch.controller.backends.kubernetes.pods import Key
from kubetorch.errors import KubernetesConflictError, KubernetesNotFoundError, KubetorchError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import PODS, Object, Ref
from kubetorch.lib.tasks import cancel_all

#: The reason of the events.
REASON = "MountRefused"
#: Seconds that each pod of a workload waits longer than the one before, and the most.
PAUSE, LONGEST = 2.0, 300.0
_MESSAGE_LIMIT = 1024

_log = logging.getLogger(__name__)


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
