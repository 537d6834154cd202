"""Requests of the data store, to the controller; blocking, for the SDK and the CLI."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlencode

from msgspec.structs import replace

from kubetorch.config import environment
from kubetorch.datastore import keys, publications
from kubetorch.datastore.blobs import digest_of
from kubetorch.datastore.publications import Extents
from kubetorch.errors import (
    ControllerUnavailableError,
    DataStoreError,
    ProtocolError,
    StorageFullError,
    StoreUnavailableError,
    UnauthorizedError,
)
from kubetorch.lib import terminal
from kubetorch.lib.http_client import HttpClient, Response
from kubetorch.sdk.controller import refusal
from kubetorch.sdk.data import store_connection
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.wire import blobs, messages, routes
from kubetorch.wire.buckets import BucketProgress, PullBucket, PushBucket
from kubetorch.wire.data import (
    AskBlobs,
    BlobNames,
    BlobSizes,
    CheckedKey,
    CollectionReport,
    FindKeys,
    GetSource,
    Holder,
    HoldManifest,
    JoinGet,
    JoinWindow,
    KeySource,
    KeyView,
    ListedPath,
    PathKeys,
    PutAnswer,
    PutKey,
    RemoveAnswer,
    RemovePath,
    WindowView,
)

if TYPE_CHECKING:
    from kubetorch.sdk.controller import Controller
    from kubetorch.sdk.transport.session import Session

_T = TypeVar("_T")


class DataClient:
    """The data store of one namespace."""

    def __init__(self, controller: Controller, namespace: str) -> None:
        self._controller = controller
        self._namespace = namespace

    def put_key(self, put: PutKey) -> PutAnswer:
        return messages.decode(PutAnswer, self._post("put", put))

    def find(self, find: FindKeys) -> PathKeys:
        """The keys for a path, leased for as long as a get of their bytes may take."""
        wait = TIMING.data_question_seconds
        with _saying_that_it_waits():
            answer = messages.decode(PathKeys, self._post("find", find, wait))
            size = sum(path_key.key.size for path_key in answer.keys)
            seconds = size / LIMITS.slow_get_bytes_per_second
            if seconds > find.lease_seconds:
                find = replace(find, lease_seconds=seconds)
                answer = messages.decode(PathKeys, self._post("find", find, wait))
        return answer

    def pull(self, pull: PullBucket) -> Iterator[BucketProgress]:
        """Let the key of an address hold what is there; the last row has the key or a failure."""
        return self._rows("pull", pull)

    def push(self, push: PushBucket) -> Iterator[BucketProgress]:
        """Write what a manifest names to an address; the last row has the key or a failure."""
        return self._rows("push", push)

    def _rows(self, verb: str, message: object) -> Iterator[BucketProgress]:
        path = routes.data(self._namespace, verb)
        with self._controller.request("POST", path, body=messages.encode(message)) as response:
            for line in response.iter_lines():
                if line:
                    yield messages.decode(BucketProgress, line)

    def remove(self, remove: RemovePath) -> RemoveAnswer:
        return messages.decode(RemoveAnswer, self._post("rm", remove))

    def fetch_from(
        self, source: KeySource, manifest: str, digests: Iterable[str]
    ) -> Iterator[bytes]:
        """As `fetch`, from a pod that has the blobs; outside of pods the controller relays.

        Raises:
            DataStoreError: The pod does not have the manifest, or the files changed.
            ControllerUnavailableError: The pod does not answer.
        """
        question = AskBlobs(source.part or manifest, tuple(digests))
        with self._ask_pod(source, question) as response:
            yield from response.iter_bytes()

    def faults_in(
        self, source: KeySource, manifest: str, digests: Iterable[str]
    ) -> Iterator[tuple[str, str]]:
        """The blobs that a pod lacks, each with the reason; it compares contents with digests."""
        question = AskBlobs(manifest, tuple(digests), is_only_check=True)
        with self._ask_pod(source, question) as response:
            for line in response.iter_lines():
                if line:
                    yield messages.decode(tuple[str, str], line)

    @contextlib.contextmanager
    def _ask_pod(self, source: KeySource, question: AskBlobs) -> Iterator[Response]:
        body = messages.encode(question)
        headers = {routes.AUTHORIZATION: f"Bearer {source.token}"}
        if not environment.is_in_pod():
            path = f"/{self._namespace}/{source.workload}{routes.PUBLISHED}"
            headers[routes.POD] = source.pod
            with self._controller.request("POST", path, body=body, headers=headers) as response:
                yield response
            return
        with (
            HttpClient(source.url, timeout=TIMING.peer_silence_seconds) as peer,
            peer.request("POST", routes.PUBLISHED, body=body, headers=headers) as response,
        ):
            if response.status >= 300:
                raise refusal("POST", source.url, response.status, response.read())
            yield response

    def publish(self, manifest: str, extents: Extents, *, is_offer: bool = False) -> Holder:
        """Let the agent of this pod serve the blobs of a manifest from files of the pod.

        Pass the holder to `PutKey.publisher`, or to `hold` for an offer, which a newer offer ends.

        Raises:
            DataStoreError: This program runs in no pod.
        """
        folder = environment.publications_folder()
        if folder is None:
            raise DataStoreError(
                "only programs in a pod publish their files in place", hint='locale="store"'
            )
        write = publications.offer if is_offer else publications.write
        write(folder, manifest, extents)
        return Holder(environment.pod_service(), environment.pod_name())

    def hold(self, manifest: str, holder: Holder, *, is_whole: bool = True) -> None:
        """Offer a pod, which published a manifest, to other getters of its keys; or no longer."""
        hold = HoldManifest(manifest, holder, is_whole)
        self._post("hold", hold, TIMING.source_answer_seconds)

    def join(self, join: JoinGet) -> KeySource | None:
        """The pod from which to get a version; `None` for the store."""
        answer = self._post("join", join, TIMING.source_answer_seconds)
        return messages.decode(GetSource, answer).source

    def join_window(self, join: JoinWindow) -> WindowView:
        return messages.decode(WindowView, self._post("window", join))

    def verify(self, path: str) -> Iterator[CheckedKey]:
        """Compare the keys of a path with their digests; rows of progress, and one at its end."""
        target = f"{routes.data(self._namespace, 'verify')}?{urlencode({'path': path})}"
        with self._controller.request("GET", target) as response:
            for line in response.iter_lines():
                if line:
                    yield messages.decode(CheckedKey, line)

    def collect(self, *, is_dry: bool = False) -> CollectionReport:
        """Delete the blobs that nothing needs, or count them."""
        target = f"{routes.data(self._namespace, 'gc')}?dry_run={str(is_dry).lower()}"
        answer = self._controller.ask("POST", target, timeout=TIMING.collection_seconds)
        return messages.decode(CollectionReport, answer)

    def missing(self, sizes: Mapping[str, int], *, is_check: bool = False) -> list[str]:
        """The blobs among these that the store lacks; their lengths are by digest.

        The blobs that it has stay for ten minutes; so does each that is uploaded. With `is_check`
        it reads those that it has, and lacks the damaged ones.

        Raises:
            StorageFullError: The store has no room for those that it lacks.
        """
        missing_digests: list[str] = []
        digests = iter(sizes)
        while batch := list(itertools.islice(digests, LIMITS.named_blobs)):
            body = BlobSizes({digest: sizes[digest] for digest in batch}, is_check)
            with self._bulk("blobs-missing", messages.encode(body)) as response:
                missing_digests += messages.decode(BlobNames, response.read()).blobs
        return missing_digests

    def has_room(self, size: int) -> bool:
        """Whether the store has room for so many bytes."""
        try:
            # A name that no blob has: what is missing then is the whole.
            self.missing({digest_of(b"room"): size})
        except StorageFullError:
            return False
        return True

    def upload(self, packed: Iterable[bytes]) -> None:
        """Store blobs, as `datastore.transfer.compressed` has them; up to 4 GiB at once."""
        headers = {"Content-Type": blobs.CONTENT_TYPE}
        with self._bulk("blobs", packed, headers) as response:
            response.read()

    def fetch(
        self,
        digests: Iterable[str],
        bases: Mapping[str, str] | None = None,
        silence: float = TIMING.data_answer_seconds,
    ) -> Iterator[bytes]:
        """The pieces of a compressed stream of these blobs, for `datastore.transfer.Receiver`.

        The digests are those of manifests that `find` answered, and of their chunks. Blobs for
        which there are `bases`, which the caller has, may come as deltas. The store may be silent
        for `silence` seconds.
        """
        body = messages.encode(BlobNames(tuple(digests), dict(bases or {})))
        with self._bulk("blobs-fetch", body, silence=silence) as response:
            yield from response.iter_bytes()

    def _bulk(
        self,
        verb: str,
        body: bytes | Iterable[bytes],
        headers: Mapping[str, str] | None = None,
        silence: float = TIMING.data_answer_seconds,
    ) -> Response:
        """The answer to a request about blobs, of the store itself if this pod reaches it."""
        path = routes.data(self._namespace, verb)
        store = store_connection.find(self._controller, self._namespace)
        if store is not None:
            try:
                response = store.request("POST", path, body=body, headers=headers, timeout=silence)
                if response.status < 300:
                    return response
                with response:
                    error = refusal("POST", store.base_url + path, response.status, response.read())
            except ControllerUnavailableError as unanswered:
                error = unanswered
            if not isinstance(error, ControllerUnavailableError | UnauthorizedError):
                raise error
            store_connection.avoid(self._controller, self._namespace)
            if not isinstance(body, bytes):  # a part of it may be gone
                raise error
        return self._controller.request("POST", path, body=body, headers=headers, timeout=silence)

    def list(self, path: str) -> list[ListedPath]:
        query = urlencode({"path": path})
        target = f"{routes.data(self._namespace, 'ls')}?{query}"
        answer = self._controller.ask("GET", target, timeout=TIMING.data_answer_seconds)
        return messages.decode(list[ListedPath], answer)

    def _post(self, verb: str, message: object, wait: float = TIMING.data_answer_seconds) -> bytes:
        path, body = routes.data(self._namespace, verb), messages.encode(message)
        return self._controller.ask("POST", path, body=body, timeout=wait)


@contextlib.contextmanager
def _saying_that_it_waits() -> Iterator[None]:
    """Say after a while that the controller does not answer."""
    line = "the data store does not answer yet; waiting for the controller"
    timer = threading.Timer(TIMING.data_silence_seconds, terminal.say, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def ask(session: Session, namespace: str, question: Callable[[DataClient], _T]) -> _T:
    """Ask the data store something that may be asked twice."""
    return session.ask(lambda controller: question(DataClient(controller, namespace)))


def move_undamaged(
    move: Callable[[int], _T], *, final: tuple[type[DataStoreError], ...] = ()
) -> _T:
    """Move blobs, and again if they are damaged on their way, or the base of a delta is missing.

    Args:
        move: Moves them; its argument is the number of the attempt, from 1.
        final: More errors after which there is no other attempt: the store is full or unavailable.
    """
    for attempt in range(1, LIMITS.data_attempts):
        try:
            return move(attempt)
        except (StorageFullError, StoreUnavailableError):
            raise
        except final:
            raise
        except (ProtocolError, DataStoreError):
            time.sleep(TIMING.data_retry_seconds * attempt)
    return move(LIMITS.data_attempts)


def find_key(session: Session, namespace: str, path: str) -> KeyView | None:
    """The key at a path, whose blobs stay for a while."""
    name = keys.check(path)
    answer = ask(session, namespace, lambda client: client.find(FindKeys(path=name)))
    return next((part.key for part in answer.keys if part.key.key == name), None)
