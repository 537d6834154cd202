"""Gets from pods that have a key or are getting it, and the offer of this pod to other getters.

A large get in a pod is a part of a tree: the controller names its source, which is the store or a
pod, and names another one if that fails. Meanwhile the agent of this pod gives what has come so far
to the getters for which this pod is the source.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec.structs import replace

from kubetorch.config import environment
from kubetorch.datastore.blobs import digest_of
from kubetorch.datastore.manifests import Entry, Manifest
from kubetorch.datastore.publications import Arrival, Extents, extents_in
from kubetorch.datastore.transfer import Destination, Receiver, Writer
from kubetorch.errors import DataStoreError, KubetorchError, ProtocolError, StorageFullError
from kubetorch.sdk.data.client import DataClient
from kubetorch.sdk.data.progress import Progress
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.wire.data import FindKeys, Holder, JoinGet, KeySource, PathKey

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """What a get needs of a version.

    Attributes:
        entries: Those of the manifest that are needed.
    """

    path_key: PathKey
    manifest: Manifest
    entries: tuple[Entry, ...]

    @property
    def is_whole(self) -> bool:
        return len(self.entries) == len(self.manifest.entries)

    @cached_property
    def needed(self) -> Manifest:
        return replace(self.manifest, entries=self.entries)

    def extents(self, path_of: Callable[[Entry], str]) -> Extents:
        """Where the blobs are in the files of the entries: no packs that have more than these."""
        extents = extents_in(path_of, self.needed)
        if self.is_whole:
            return extents
        counts = {
            digest: len(whole) for digest, whole in extents_in(_no_path, self.manifest).items()
        }
        return {digest: blob for digest, blob in extents.items() if len(blob) == counts[digest]}

    @cached_property
    def blobs(self) -> frozenset[str]:
        """The blobs that a pod has which gets the same."""
        return frozenset(self.extents(_no_path))

    @cached_property
    def name(self) -> str:
        """A digest that names the blobs; empty for all of the version."""
        return "" if self.is_whole else digest_of("".join(sorted(self.blobs)).encode())

    @property
    def published_name(self) -> str:
        """What a pod that has the blobs publishes them as."""
        return self.name or self.path_key.key.manifest


def _no_path(entry: Entry) -> str:
    return ""


class Peers:
    """The pods that have what is to be got; one that fails is not asked again.

    Args:
        fanout: Getters that each source is to serve at a time; 0: the controller decides.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        progress: Progress,
        *,
        is_joined: bool = False,
        fanout: int = 0,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._progress = progress
        self._pause = pause
        self._clock = clock
        self._versions: list[_Version] = []
        # By digest of a blob: the version that has it.
        self._by_blob: dict[str, _Version] = {}
        self._by_name: dict[str, _Version] = {}
        for part in parts:
            path_key = part.path_key
            if is_joined or path_key.sources or path_key.key.publisher is not None:
                version = _Version(part, clock, is_joined=is_joined, fanout=fanout)
                self._versions.append(version)
                self._by_name.setdefault(part.published_name, version)
                if path_key.key.publisher is not None:  # the store has none of them
                    whole_sources = _Version(part, clock, is_joined=False, fanout=fanout)
                    self._by_blob |= dict.fromkeys(part.needed.digests(), whole_sources)
                self._by_blob |= dict.fromkeys(part.blobs, version)

    def offer(self, part: Part, path_of: Callable[[Entry], str], missing: Collection[str]) -> None:
        """Offer a version to other getters while it comes; no get fails by it."""
        folder = environment.publications_folder()
        version = self._by_name.get(part.published_name)
        if folder is not None and version is not None and version.arrival is None:
            with contextlib.suppress(OSError):
                extents = part.extents(path_of)
                version.arrival = Arrival.begin(folder, part.published_name, extents, missing)

    def have(self, digests: Iterable[str]) -> bool:
        """Whether a pod is known that may have one of some blobs."""
        versions = {self._by_blob[digest] for digest in digests if digest in self._by_blob}
        return any(version.has_pods for version in versions)

    def note(self, digest: str) -> None:
        """Note that a blob has come."""
        version = self._by_blob.get(digest)
        if version is not None and version.arrival is not None:
            with contextlib.suppress(OSError):  # later getters wait, and get it from elsewhere
                version.arrival.add(digest)

    def end(self, client: DataClient) -> None:
        """Leave the trees: this program has got all, or gives up."""
        for version in self._versions:
            version.end(client)

    def fetch(
        self, client: DataClient, digests: Iterable[str], destination: Destination
    ) -> list[str]:
        """Fetch blobs from pods; returns those that the store has to send.

        Raises:
            DataStoreError: The pods do not send a blob that the store has not.
        """
        remaining = dict.fromkeys(digests)
        by_version: dict[_Version, list[str]] = {}
        for digest in remaining:
            if digest in self._by_blob:
                by_version.setdefault(self._by_blob[digest], []).append(digest)
        for version, missing in by_version.items():
            while missing and (source := version.source(client)) is not None:
                received = frozenset(
                    self._fetch_from(client, source, version, missing, destination)
                )
                missing = [digest for digest in missing if digest not in received]
                for digest in received:
                    remaining.pop(digest, None)
            if missing and version.path_key.key.publisher is not None:
                raise version.error()
        return list(remaining)

    def _fetch_from(
        self,
        client: DataClient,
        source: KeySource,
        version: _Version,
        digests: list[str],
        destination: Destination,
    ) -> list[str]:
        """Fetch blobs from a pod; returns those that came whole."""
        asked = _Asked(destination, frozenset(digests))
        receiver, pace = Receiver(asked, limit_blobs=len(digests)), _Pace(source, self._clock)
        try:
            for piece in client.fetch_from(source, version.path_key.key.manifest, digests):
                receiver.feed(piece)
                pace.add(len(piece))
            receiver.finish()
            if not version.has_more(source, bool(receiver.received)):
                self._pause(TIMING.peer_pause_seconds)
        except StorageFullError:  # on this side
            raise
        except KubetorchError as error:
            version.replace(client, source, error)
        finally:
            receiver.close()
            self._progress.add_from_pods(pace.total)
        return receiver.received


class _Version:
    """A version of a key that is being got, and its source.

    Attributes:
        arrival: The offer to other getters.
    """

    def __init__(
        self, part: Part, clock: Callable[[], float], *, is_joined: bool, fanout: int
    ) -> None:
        self.path_key = part.path_key
        self._part = part.name
        self._clock = clock
        self.arrival: Arrival | None = None
        self._is_joined = is_joined
        self._fanout = fanout
        self._getter = uuid.uuid4().hex
        self._lock = threading.Lock()
        #: Those that were named with the key.
        self._named = list(self.path_key.sources)
        self._source: KeySource | None = None
        self._asked_time: float | None = None
        self._failed: set[Holder] = set()
        self._failure: KubetorchError | None = None
        self._progress_time = self._clock()

    @property
    def has_pods(self) -> bool:
        """Whether pods were named with the key that have not failed."""
        return bool(self._named)

    def source(self, client: DataClient) -> KeySource | None:
        """The pod to ask; `None` for the store, until a pod may have room."""
        with self._lock:
            if self._asked_time is None or (
                self._source is None
                and self._clock() - self._asked_time >= TIMING.store_question_seconds
            ):
                self._ask(client, None)
            return self._source

    def _ask(self, client: DataClient, failed: Holder | None) -> None:
        self._progress_time = self._asked_time = self._clock()
        self._source = next(iter(self._named), None)
        if self._is_joined:
            with contextlib.suppress(KubetorchError):  # it is away
                self._source = self._next_source(client, failed)

    def _next_source(self, client: DataClient, failed: Holder | None) -> KeySource | None:
        """The source that the controller names, unless all that it names have failed."""
        for _ in range(LIMITS.data_attempts):
            try:
                source = client.join(self._join(failed))
            except DataStoreError:  # it was restarted, and has leased nothing
                client.find(FindKeys(path=self.path_key.key.key))
                source = client.join(self._join(failed))
            if source is None or _holder(source) not in self._failed:
                return source
            failed = _holder(source)  # it was restarted, and does not know
        return None

    def _join(self, failed: Holder | None = None, *, is_done: bool = False) -> JoinGet:
        return JoinGet(
            key=self.path_key.key.key,
            manifest=self.path_key.key.manifest,
            getter=self._getter,
            part=self._part,
            holder=None if self.arrival is None else _this_pod(self._part),
            failed=failed,
            fanout=self._fanout,
            is_done=is_done,
        )

    def has_more(self, source: KeySource, has_sent: bool) -> bool:
        """False if the pod gets the version itself, and had nothing more at this moment.

        Raises:
            DataStoreError: It had nothing for too long.
        """
        if has_sent:
            self._progress_time = self._clock()
            return True
        silence = self._clock() - self._progress_time
        if not self._is_joined or silence > TIMING.waiting_peer_seconds:
            raise DataStoreError(f"the pod {source.pod} sent nothing")
        return False

    def replace(self, client: DataClient, source: KeySource, error: Exception) -> None:
        """Give a source up, and ask for another one."""
        with self._lock:
            if source is not self._source:
                return  # another thread has
            holder, silence = _holder(source), self._clock() - self._progress_time
            _log.debug("source failed pod=%s silence=%.1f error=%s", source.pod, silence, error)
            self._failed.add(holder)
            self._named = [named for named in self._named if _holder(named) != holder]
            if isinstance(error, KubetorchError):
                self._failure = error
            if not self._is_joined:
                with contextlib.suppress(KubetorchError):
                    client.hold(self.path_key.key.manifest, holder, is_whole=False)
            self._ask(client, holder)

    def end(self, client: DataClient) -> None:
        if self.arrival is not None:
            self.arrival.close()
            self.arrival = None
        if self._is_joined and self._asked_time is not None:
            with contextlib.suppress(KubetorchError):
                client.join(self._join(is_done=True))

    def error(self) -> DataStoreError:
        publisher = self.path_key.key.publisher
        pod = "" if publisher is None else publisher.pod
        reason = "it does not run" if self._failure is None else self._failure.message
        return DataStoreError(
            f"the key {self.path_key.key.key!r} is published by the pod {pod}: {reason}",
            hint=(self._failure and self._failure.hint) or "put it again",
        )


def _holder(source: KeySource) -> Holder:
    return Holder(source.workload, source.pod, source.part)


def _this_pod(part: str) -> Holder:
    return Holder(environment.pod_service(), environment.pod_name(), part)


class _Asked:
    """A destination for what a pod was asked for: what it sends besides may be another one's."""

    def __init__(self, destination: Destination, digests: frozenset[str]) -> None:
        self._destination = destination
        self._digests = digests

    def writer(self, digest: str, length: int) -> Writer:
        if digest not in self._digests:
            raise ProtocolError(f"the blob {digest} came unasked")
        return self._destination.writer(digest, length)


class _Pace:
    """The bytes that a pod sends, from the first one on; too few of them are an error."""

    def __init__(self, source: KeySource, clock: Callable[[], float]) -> None:
        self._pod = source.pod
        self._clock = clock
        self._begun: float | None = None
        self._bytes = 0
        self.total = 0

    def add(self, size: int) -> None:
        self._bytes += size
        self.total += size
        now = self._clock()
        if self._begun is None:  # it may have waited for its own source
            self._begun = now
        seconds = now - self._begun
        if seconds < TIMING.peer_pace_seconds:
            return
        if self._bytes < LIMITS.slow_peer_bytes_per_second * seconds:
            raise DataStoreError(f"the pod {self._pod} sent {self._bytes} bytes in {seconds:.0f} s")
        self._begun, self._bytes = now, 0


def offer(client: DataClient, part: Part, path_of: Callable[[Entry], str]) -> None:
    """Offer what a get wrote to a folder of this pod to later getters; no get fails by it."""
    if environment.publications_folder() is None:
        return
    with contextlib.suppress(KubetorchError, OSError):
        extents = part.extents(path_of)
        client.publish(part.published_name, extents, is_offer=True)
        client.hold(part.path_key.key.manifest, _this_pod(part.name))
