"""Which pods have the content of keys, and the tokens with which programs get it from them.

What getters have is known to the controller that they told alone: a controller that starts anew
learns it from the next ones. Who published a key is in the key's record. A pod that is gone has
nothing any more.

Pods that get a version at the same time form a tree, which grows as they come:

    store ─┬─ p0 ─┬─ p2      a pod gives what it has so far; each source serves two getters, then
           └─ p1  └─ p3      those below it do; a getter whose source fails is given another one
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable
from typing import Protocol

import msgspec

from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.datastore.blobs import check_digest
from kubetorch.errors import DataStoreError
from kubetorch.specs import names
from kubetorch.wire import messages
from kubetorch.wire.data import Holder, JoinGet, JoinWindow, KeySource, KeyView, WindowView
from kubetorch.wire.messages import PodView
from kubetorch.wire.transports import Offer

_SERVICE = re.compile(rf"[a-z0-9-]{{1,{names.SERVICE_CHARACTERS}}}")
#: A DNS subdomain; Kubernetes names pods so.
_POD = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


def check_service(service: str) -> None:
    if not _SERVICE.fullmatch(service):
        raise DataStoreError(f"{service[:100]!r} is no name of a service")


def check_holder(holder: Holder) -> None:
    """Refuse what is no pod of a service."""
    check_service(holder.workload)
    if not _POD.fullmatch(holder.pod):
        raise DataStoreError(f"{holder.pod[:100]!r} is no name of a pod")
    check_part(holder.part)


def check_part(part: str) -> None:
    """Refuse what names no part of a version, nor all of it."""
    if part:
        check_digest(part)


class _Get(msgspec.Struct):
    """A get that goes on.

    Attributes:
        end: When it counts as dead.
        holder: The pod that gives what has come so far; `None` if it does not.
        parent: The pod that it gets from; `None` for the store.
        failed: Pods that gave it nothing.
        complaints: Getters that got nothing from it.
    """

    end: float
    holder: Holder | None = None
    parent: Holder | None = None
    failed: set[Holder] = msgspec.field(default_factory=set)
    complaints: int = 0


class ServicePods(Protocol):
    """The pods of a service."""

    @property
    def pod_names(self) -> Collection[str]:
        """All pods, also those that have not connected yet."""

    def pod_views(self) -> tuple[PodView, ...]:
        """The pods as clients see them."""


class Holders:
    def __init__(
        self, find: Callable[[str, str], ServicePods | None], token: Callable[[str, str], str]
    ) -> None:
        self._find = find
        # A token with which the pods of a service, by namespace and name, give blobs of keys.
        self._token = token
        # By namespace and manifest: the pods that have it, or a part, and how often each was named.
        self._holders: dict[tuple[str, str], dict[Holder, int]] = {}
        # By namespace and manifest: the gets that go on, by their names.
        self._gets: dict[tuple[str, str], dict[str, _Get]] = {}

    def add(self, namespace: str, manifest: str, holder: Holder) -> None:
        """Note a pod, unless enough pods have the manifest.

        Raises:
            DataStoreError: There is no such pod.
        """
        if not self._exists(namespace, holder):
            raise DataStoreError(f"the service {holder.workload!r} has no pod {holder.pod!r}")
        counts = self._holders.setdefault((namespace, manifest), {})
        if len(counts) >= LIMITS.manifest_holders:
            self._prune(namespace, manifest)
        if len(counts) < LIMITS.manifest_holders:
            counts.setdefault(holder, 0)

    def remove(self, namespace: str, manifest: str, holder: Holder) -> None:
        self._holders.get((namespace, manifest), {}).pop(holder, None)

    def forget_all_but(self, manifests: Container[str], is_of: Callable[[str], bool]) -> None:
        """Forget who has other manifests of the namespaces of a store."""
        for namespace, manifest in list(self._holders):
            if is_of(namespace) and manifest not in manifests:
                del self._holders[namespace, manifest]
        for namespace, manifest in list(self._gets):
            if is_of(namespace) and manifest not in manifests:
                del self._gets[namespace, manifest]

    def pods(self, namespace: str, view: KeyView) -> list[str]:
        """The pods that run and have a version."""
        return [holder.pod for holder, _ in self._running(namespace, view)]

    def is_gone(self, namespace: str, view: KeyView) -> bool:
        """True if no pod has a key any more that the store has not."""
        return view.publisher is not None and not self._running(namespace, view)

    def sources(
        self, namespace: str, view: KeyView, *, has_all: bool = False
    ) -> tuple[KeySource, ...]:
        """Pods to get a version from, those first that were named least often."""
        running = self._running(namespace, view)
        if not has_all and running:
            counts = self._holders.setdefault((namespace, view.manifest), {})
            running.sort(key=lambda holder: counts.get(holder[0], 0))
            del running[LIMITS.named_sources :]
            counts[running[0][0]] = counts.get(running[0][0], 0) + 1
        return tuple(self._source(namespace, *pair) for pair in running)

    def _source(self, namespace: str, holder: Holder, pod: PodView) -> KeySource:
        token = self._token(namespace, holder.workload)
        return KeySource(
            workload=holder.workload, pod=holder.pod, url=pod.url, token=token, part=holder.part
        )

    # ----------------------------------------------------------------------------- gets in a tree

    def join(
        self, namespace: str, view: KeyView, join: JoinGet, *, now: float, end: float
    ) -> KeySource | None:
        """The source of a get that goes on until `end` at the latest; `None` for the store.

        Raises:
            DataStoreError: There is no such pod.
        """
        if join.holder is not None and not self._exists(namespace, join.holder):
            raise DataStoreError(
                f"the service {join.holder.workload!r} has no pod {join.holder.pod!r}"
            )
        gets = self._gets.setdefault((namespace, view.manifest), {})
        for getter, get in list(gets.items()):
            # One program of a pod gives what comes: another one before it was killed.
            is_over = get.holder is not None and get.holder == join.holder and getter != join.getter
            if is_over or get.end <= now:
                del gets[getter]
        if join.is_done:
            gets.pop(join.getter, None)
            return None
        get = gets.get(join.getter) or _Get(end)
        if len(gets) < LIMITS.manifest_holders:
            gets[join.getter] = get
        if join.failed is not None:
            self._note_failure(namespace, view, gets, get, join.failed)
        get.end, get.holder = end, None if get.complaints >= LIMITS.complaints else join.holder
        source = self._assigned(namespace, view, gets, get, join)
        get.parent = None if source is None else source[0]
        return None if source is None else self._source(namespace, *source)

    def _note_failure(
        self, namespace: str, view: KeyView, gets: dict[str, _Get], get: _Get, failed: Holder
    ) -> None:
        """Name a pod no more to a getter, and to no other one if that is not the first failure."""
        if failed not in get.failed:
            get.failed.add(failed)
            self.remove(namespace, view.manifest, failed)
            for source in gets.values():
                if source.holder == failed:
                    source.complaints += 1
                    if source.complaints >= LIMITS.complaints:
                        source.holder = None

    def _assigned(
        self, namespace: str, view: KeyView, gets: dict[str, _Get], get: _Get, join: JoinGet
    ) -> tuple[Holder, PodView] | None:
        """The source that is next to the origin among those with room, else with least to do."""
        has_room_for = min(join.fanout or LIMITS.source_getters, LIMITS.source_most_getters)
        getting = {
            peer.holder: peer
            for peer in gets.values()
            if peer.holder is not None and peer.holder.part == join.part
        }
        whole = {holder for holder, _ in self._running(namespace, view, join.part)}
        candidates = {**dict.fromkeys(whole), **getting}
        live = {
            holder: pod
            for holder, pod in self._views(namespace, candidates)
            if pod.phase == "Running" or holder == view.publisher
        }
        dead = candidates.keys() - live.keys()  # or about to connect again
        load = Counter(
            peer.parent for peer in gets.values() if peer is not get and peer.holder not in dead
        )

        def depth(holder: Holder | None) -> int | None:
            """Steps to the origin; `None` behind the getter itself, or if there is no way."""
            steps = 0
            while holder is not None and steps <= len(getting):
                if holder in dead or getting.get(holder) is get:
                    return None
                if holder in whole or holder not in getting:
                    return steps
                holder, steps = getting[holder].parent, steps + 1
            return steps if steps <= len(getting) else None

        ranked: list[tuple[tuple[bool, int, bool, int], tuple[Holder, PodView] | None]] = []
        for holder, pod in live.items():
            steps = depth(holder)
            if steps is None or holder in get.failed or load[holder] >= LIMITS.source_most_getters:
                continue
            is_full = load[holder] >= has_room_for
            ranked.append(
                ((is_full, load[holder] if is_full else steps, False, load[holder]), (holder, pod))
            )
        if view.publisher is None:
            is_full = load[None] >= min(has_room_for, LIMITS.source_getters)
            ranked.append(((is_full, load[None] if is_full else 0, True, load[None]), None))
        return min(ranked, key=lambda pair: pair[0])[1] if ranked else None

    def _running(
        self, namespace: str, view: KeyView, part: str = ""
    ) -> list[tuple[Holder, PodView]]:
        """The pods that run and have all of a version, or of a part."""
        self._prune(namespace, view.manifest)
        all_holders = self._holders.get((namespace, view.manifest), ())
        holders: Iterable[Holder] = [holder for holder in all_holders if holder.part in ("", part)]
        if view.publisher is not None:
            holders = dict.fromkeys([view.publisher, *holders])
        return self._views(namespace, holders)

    def _views(self, namespace: str, holders: Iterable[Holder]) -> list[tuple[Holder, PodView]]:
        """Those of some pods that run."""
        # By workload: its pods by their names.
        pods: dict[str, dict[str, PodView]] = {}
        running = []
        for holder in holders:
            if holder.workload not in pods:
                workload = self._find(namespace, holder.workload)
                views = () if workload is None else workload.pod_views()
                pods[holder.workload] = {pod.name: pod for pod in views}
            pod = pods[holder.workload].get(holder.pod)
            if pod is not None and pod.url:
                running.append((holder, pod))
        return running

    def _prune(self, namespace: str, manifest: str) -> None:
        """Forget pods that are gone; a pod that is about to connect again stays."""
        counts = self._holders.get((namespace, manifest), {})
        for holder in [holder for holder in counts if not self._exists(namespace, holder)]:
            del counts[holder]

    def _exists(self, namespace: str, holder: Holder) -> bool:
        workload = self._find(namespace, holder.workload)
        return workload is not None and holder.pod in workload.pod_names


class _Window(msgspec.Struct):
    opened: float
    #: By participant: its last question.
    questions: dict[str, tuple[float, JoinWindow]] = msgspec.field(default_factory=dict)
    #: By participant, once the window is closed: as they were then.
    offers: dict[str, Offer] | None = None

    def is_met(self, now: float) -> bool:
        joins = [join for _, join in self.questions.values()]
        addresses = {join.ip for join in joins}
        return any(
            (join.world_size is not None and len(joins) >= join.world_size)
            or (join.timeout is not None and now >= self.opened + join.timeout)
            or (bool(join.ips) and addresses.issuperset(join.ips))
            for join in joins
        )


class Windows:
    """Windows in which participants of a transfer wait for each other: `kt.BroadcastWindow`.

    The first participant of a group opens its window. It closes for all of them as soon as one of
    the conditions of any of them is met; who comes later opens the next one.
    """

    def __init__(self) -> None:
        # By namespace and group: the windows whose participants may still ask, the open one last.
        self._windows: dict[tuple[str, str], list[_Window]] = {}

    def join(self, namespace: str, join: JoinWindow, now: float) -> WindowView:
        """Note a participant; it asks until the window is closed.

        Raises:
            DataStoreError: The question is impossible, or there are too many.
        """
        if not 0 < len(join.participant) <= LIMITS.getter_characters:
            raise DataStoreError("a participant of a window needs a name")
        if not 0 < len(join.group) <= LIMITS.group_characters:
            raise DataStoreError(
                f"group_id has {len(join.group)} characters; {LIMITS.group_characters} are allowed"
            )
        if join.offer is not None and len(messages.encode(join.offer)) > LIMITS.offer_bytes:
            raise DataStoreError(f"an offer has more than {LIMITS.offer_bytes} bytes")
        self._forget(now)
        windows = self._windows.setdefault((namespace, join.group), [])
        window = next((group for group in windows if join.participant in group.questions), None)
        if window is None:
            window = self._open(windows, now)
        window.questions[join.participant] = now, join
        if window.offers is None and window.is_met(now):
            questions = [question for _, question in window.questions.values()]
            window.offers = {
                question.participant: question.offer for question in questions if question.offer
            }
        return WindowView(window.offers is not None, len(window.questions), window.offers or {})

    def _open(self, windows: list[_Window], now: float) -> _Window:
        if windows and windows[-1].offers is None:
            window = windows[-1]
        else:
            window = _Window(now)
            windows.append(window)
        if sum(len(group.questions) for group in windows) >= LIMITS.manifest_holders:
            raise DataStoreError(
                f"a group has up to {LIMITS.manifest_holders} participants",
                hint="name the groups apart: kt.BroadcastWindow(group_id=...)",
            )
        return window

    def _forget(self, now: float) -> None:
        oldest = now - TIMING.window_silence_seconds
        for group, windows in list(self._windows.items()):
            for window in windows:
                for participant, (asked, _) in list(window.questions.items()):
                    if asked < oldest:
                        del window.questions[participant]
            windows[:] = [window for window in windows if window.questions]
            if not windows:
                del self._windows[group]
