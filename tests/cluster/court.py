"""Watches objects of a cluster as the backend does, and judges them until a verdict is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from kubetorch.controller.backends.kubernetes.launch_failures import diagnosis
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import (
    NO_TROUBLE,
    Verdict,
    worst,
)
from kubetorch.controller.backends.kubernetes.launch_watch import ClusterWatch, LaunchVerdicts
from kubetorch.errors import KubetorchError
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import PODS, Object, Selection
from kubetorch.lib.changes import Changes
from kubetorch.manifests import labels


@dataclass(frozen=True)
class Judgement:
    """A verdict and when it was reached, in seconds since the epoch."""

    verdict: Verdict
    judged_at: float

    @property
    def seconds(self) -> float:
        """From the fact to the verdict; times of Kubernetes are whole seconds, rounded down."""
        return 0.0 if self.verdict.since is None else max(0.0, self.judged_at - self.verdict.since)


class Court:
    """Judges what is applied in one namespace."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client = client
        self.namespace = namespace
        self._changes = Changes()
        self._cluster_watch = ClusterWatch(client, time=time.time, on_change=self._changed)
        self._verdicts = LaunchVerdicts(client, self._cluster_watch, self._changed)
        self.pods = Informer(client, Selection(PODS, namespace), self._changed)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Court:
        await self._cluster_watch.start()
        await self._stack.enter_async_context(self.pods)
        await self.pods.listed(timeout=20)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._verdicts.close()
        await self._stack.aclose()
        await self._cluster_watch.close()

    async def apply(self, name: str, manifests: list[Object]) -> Verdict:
        """Apply objects of one launch; a verdict if the API server refuses one."""
        for manifest in manifests:
            metadata: dict[str, Any] = manifest["metadata"]
            metadata.setdefault("namespace", self.namespace)
            metadata.setdefault("labels", {})[labels.SERVICE] = name
            try:
                await self._cluster_watch.watch_object(manifest)
                await self.client.apply(manifest, field_manager="kubetorch")
            except KubetorchError as error:
                return diagnosis.judge_refusal(error, manifest, now=time.time())
        return NO_TROUBLE

    def judge(self, name: str, main: Object) -> Verdict:
        """The verdict at this moment."""
        key = (self.namespace, name)
        verdicts = [
            self._verdicts.of_pod(key, pod)
            for pod in self.pods.objects.values()
            if (pod["metadata"].get("labels") or {}).get(labels.SERVICE) == name
        ]
        if main["kind"] != "Pod":
            verdicts.append(self._verdicts.of_owner(key, main))
        return worst(verdicts)

    async def until_doomed(self, name: str, main: Object, *, timeout: float) -> Judgement:
        """Judge whenever something changes, until there is a doom or the seconds are over."""
        verdict, end = NO_TROUBLE, time.monotonic() + timeout
        while (rest := end - time.monotonic()) > 0:
            verdict = self.judge(name, main)
            if verdict.is_doomed:
                break
            try:
                await asyncio.wait_for(self._changes.wait(), rest)
            except asyncio.TimeoutError:
                continue
        return Judgement(verdict, time.time())

    @property
    def _changed(self) -> Callable[[object], None]:
        return lambda _: self._changes.notify()
