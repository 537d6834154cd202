"""Watches objects of a cluster as a backend does, and judges them until a verdict is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from kubetorch.controller.backends.kubernetes.dooms import judging
from kubetorch.controller.backends.kubernetes.dooms.verdicts import NOTHING, Verdict, worst
from kubetorch.controller.backends.kubernetes.surroundings import Surroundings
from kubetorch.errors import KubetorchError
from kubetorch.k8s import podlogs
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import PODS, Object, Ref, Selection
from kubetorch.lib.changes import Changes
from kubetorch.manifests import labels


@dataclass(frozen=True)
class Judgement:
    """A verdict and when it was reached, in seconds since the epoch."""

    verdict: Verdict
    at: float

    @property
    def seconds(self) -> float:
        """From the fact to the verdict; times of Kubernetes are whole seconds, rounded down."""
        return 0.0 if self.verdict.since is None else max(0.0, self.at - self.verdict.since)


class Court:
    """Judges what is applied in one namespace."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client = client
        self.namespace = namespace
        self.changes = Changes()
        self.surroundings = Surroundings(client, lambda _: self.changes.notify())
        selection = Selection(PODS, namespace)
        self.pods = Informer(client, selection, lambda _: self.changes.notify())
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Court:
        await self.surroundings.start()
        await self._stack.enter_async_context(self.pods)
        await self.pods.listed(timeout=20)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        await self.surroundings.close()

    async def apply(self, name: str, manifests: list[Object]) -> Verdict:
        """Apply objects of one launch; a verdict if the API server refuses one."""
        for manifest in manifests:
            metadata: dict[str, Any] = manifest["metadata"]
            metadata.setdefault("namespace", self.namespace)
            metadata.setdefault("labels", {})[labels.SERVICE] = name
            try:
                await self.client.apply(manifest, field_manager="kubetorch")
            except KubetorchError as error:
                return judging.judge_refusal(error, manifest, now=time.time())
        await self.surroundings.follow(manifests[-1])
        return NOTHING

    def judge(self, name: str, main: Object) -> Verdict:
        """The verdict at this moment."""
        cluster = self.surroundings.cluster
        pods = [
            one
            for one in self.pods.objects.values()
            if (one["metadata"].get("labels") or {}).get(labels.SERVICE) == name
        ]
        found = [
            judging.judge_pod(one, events=self.surroundings.events_of_pod(one), cluster=cluster)
            for one in pods
        ]
        if main["kind"] != "Pod":
            owners = self.surroundings.owners(self.namespace, name)
            things = [(one["kind"], one["metadata"]["name"]) for one in owners]
            events = self.surroundings.events(self.namespace, things)
            found.append(judging.judge_owner(main, owners, events=events, cluster=cluster))
        return worst(found)

    async def until(
        self, name: str, main: Object, wanted: Callable[[Verdict], bool], *, timeout: float
    ) -> Judgement:
        """Judge whenever something changes, until a verdict is as wanted."""
        end = time.monotonic() + timeout
        verdict = NOTHING
        while (rest := end - time.monotonic()) > 0:
            verdict = self.judge(name, main)
            if wanted(verdict):
                return Judgement(await self._with_log(name, verdict), time.time())
            pause = min(rest, verdict.again if verdict.again is not None else rest)
            try:
                await asyncio.wait_for(self.changes.wait(), pause)
            except asyncio.TimeoutError:
                continue
        return Judgement(verdict, time.time())

    async def _with_log(self, name: str, verdict: Verdict) -> Verdict:
        if verdict.log is None:
            return verdict
        options = podlogs.LogOptions(verdict.log, previous=verdict.is_previous, tail=20)
        said = await podlogs.read(self.client, Ref(PODS, name, self.namespace), options)
        return verdict.with_log(said.decode(errors="replace").splitlines())
