"""Verdicts on the pods of workloads and on what makes them, kept as long as they can be right.

A verdict holds until the pod, its events or the cluster change, or its time is over. The last lines
of a container that a verdict asks for are fetched once for each run of it; until they are there,
the pod waits for its reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from kubetorch.controller.backends.kubernetes.dooms import cluster as reading
from kubetorch.controller.backends.kubernetes.dooms import judging
from kubetorch.controller.backends.kubernetes.dooms.verdicts import LOG_LINES, Verdict
from kubetorch.controller.backends.kubernetes.surveying import Survey
from kubetorch.errors import KubetorchError
from kubetorch.k8s import podlogs
from kubetorch.k8s.client import Client
from kubetorch.k8s.podlogs import LogOptions
from kubetorch.k8s.resources import PODS, Object, Ref, version

#: Namespace and name of a workload.
Key = tuple[str, str]
#: Seconds for the last lines of a container.
LOG_TIMEOUT = 3.0

_log = logging.getLogger(__name__)


class _Judged(NamedTuple):
    """A verdict, and what it was made of."""

    basis: tuple[object, ...]
    verdict: Verdict


class Judgements:
    """Judges pods, and remembers.

    Args:
        client: Asks for logs.
        survey: Knows what happens around pods.
        on_change: Told of a workload of which a verdict may be different now.
    """

    def __init__(self, client: Client, survey: Survey, on_change: Callable[[Key], None]) -> None:
        self._client = client
        self._survey = survey
        self._on_change = on_change
        self._judged: dict[str, _Judged] = {}
        # Since when there is a doom that has to settle.
        self._doomed: dict[str, float] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._lines: dict[tuple[str, str, int], list[str]] = {}
        self._fetching: dict[tuple[str, str, int], asyncio.Task[None]] = {}

    def close(self) -> None:
        """Judge no more."""
        for timer in self._timers.values():
            timer.cancel()
        for task in self._fetching.values():
            task.cancel()

    def of_pod(self, key: Key, pod: Object, *, shows_log: bool = True) -> Verdict:
        """The verdict on a pod.

        Args:
            key: Its workload.
            pod: The pod.
            shows_log: Whether the verdict may tell what its containers wrote.
        """
        metadata = pod["metadata"]
        uid = metadata["uid"]
        basis = (version(pod), *self._survey.basis(pod, _names(pod)))
        known = self._judged.get(uid)
        if known is not None and known.basis == basis:
            return known.verdict
        events = self._survey.events(key[0], _names(pod))
        cluster = self._survey.cluster()
        verdict = judging.judge_pod(pod, events=events, cluster=cluster)
        verdict = self._settled(uid, verdict, cluster.now)
        self._judged[uid] = _Judged(basis, verdict)
        self._judge_again(key, uid, verdict)
        if verdict.log is not None and shows_log:
            verdict = self._with_lines(key, pod, verdict)
            self._judged[uid] = _Judged(basis, verdict)
        return verdict

    def of_owner(self, key: Key, manifest: Object) -> Verdict:
        """The verdict on what makes the pods of a workload."""
        owners = self._survey.owners(manifest)
        names = ((one["kind"], one["metadata"]["name"]) for one in owners)
        verdict = judging.judge_owner(
            manifest,
            owners,
            events=self._survey.events(key[0], names),
            cluster=self._survey.cluster(),
        )
        self._judge_again(key, _owner(key), verdict)
        return verdict

    def events_around(self, pods: Iterable[Object], owners: Iterable[Object]) -> list[Object]:
        """The events of pods, their claims and what owns them, the oldest first."""
        found = [
            event
            for pod in pods
            for event in self._survey.events(pod["metadata"]["namespace"], _names(pod))
        ]
        for one in owners:
            name = (one["kind"], one["metadata"]["name"])
            found += self._survey.events(one["metadata"]["namespace"], iter([name]))
        return sorted(found, key=reading.began)

    def forget(self, pod: Object) -> None:
        """A pod is gone."""
        uid = pod["metadata"]["uid"]
        self._judged.pop(uid, None)
        self._doomed.pop(uid, None)
        self._cancel(uid)
        for known in [one for one in self._lines if one[0] == uid]:
            del self._lines[known]

    def forget_owner(self, key: Key) -> None:
        """A workload is gone."""
        self._cancel(_owner(key))

    def _cancel(self, what: str) -> None:
        timer = self._timers.pop(what, None)
        if timer is not None:
            timer.cancel()

    def _judge_again(self, key: Key, what: str, verdict: Verdict) -> None:
        self._cancel(what)
        if verdict.again is not None:
            loop = asyncio.get_running_loop()
            self._timers[what] = loop.call_later(verdict.again, self._is_over, key, what)

    def _is_over(self, key: Key, what: str) -> None:
        self._timers.pop(what, None)
        self._judged.pop(what, None)
        self._on_change(key)

    def _settled(self, uid: str, verdict: Verdict, now: float) -> Verdict:
        """The verdict; a doom that is too new is only what a pod waits for."""
        if not verdict.settles:
            self._doomed.pop(uid, None)
            return verdict
        rest = self._doomed.setdefault(uid, now) + verdict.settles - now
        return verdict if rest <= 0 else replace(verdict, error=None, again=rest)

    # ------------------------------------------------------------------------------- last lines

    def _with_lines(self, key: Key, pod: Object, verdict: Verdict) -> Verdict:
        container = verdict.log or ""
        run = (pod["metadata"]["uid"], container, _restarts(pod, container))
        lines = self._lines.get(run)
        if lines is not None:
            return verdict.with_log(lines)
        if run not in self._fetching:
            work = self._fetch(key, pod, verdict, run)
            self._fetching[run] = asyncio.create_task(work, name=f"log of {container}")
        return replace(verdict, error=None)

    async def _fetch(
        self, key: Key, pod: Object, verdict: Verdict, run: tuple[str, str, int]
    ) -> None:
        ref = Ref(PODS, pod["metadata"]["name"], key[0])
        options = LogOptions(run[1], tail=LOG_LINES)
        read = podlogs.read_ended if verdict.is_previous else podlogs.read
        try:
            found = await asyncio.wait_for(read(self._client, ref, options), LOG_TIMEOUT)
            self._lines[run] = found.decode("utf-8", "replace").splitlines()
        except (KubetorchError, asyncio.TimeoutError) as error:
            _log.info("log not read pod=%s container=%s error=%s", ref.name, run[1], error)
            self._lines[run] = []
        finally:
            self._fetching.pop(run, None)
        self._judged.pop(run[0], None)
        self._on_change(key)


def _owner(key: Key) -> str:
    """What the timer of a workload is kept by; no pod has such a `uid`."""
    return f"{key[0]}/{key[1]}"


def _names(pod: Object) -> Iterator[tuple[str, str]]:
    """What a pod's events are about: itself, and its claims."""
    yield "Pod", pod["metadata"]["name"]
    for volume in pod["spec"].get("volumes") or ():
        claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
        if claim:
            yield "PersistentVolumeClaim", claim


def _restarts(pod: Object, container: str) -> int:
    status = pod.get("status") or {}
    statuses = [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]
    return sum(int(one.get("restartCount") or 0) for one in statuses if one["name"] == container)
