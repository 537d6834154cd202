"""Pulls from buckets into the data store, and writes to them: a program for each, on request.

    getters ──► run of an address ──► program ──► bucket
                     └── key of the address ◄── manifest

Getters of the same address with the same credentials share a run. A run ends with its last getter;
what it stored until then is named by no key.

The program gets none of the controller's variables and no other credentials than those of the
request, and reaches public addresses and those that the operator allows (`lib.egress`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator, Callable, Mapping
from weakref import WeakValueDictionary

import msgspec

from kubetorch.controller.blobs import BlobStores
from kubetorch.controller.data import DataStore
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.datastore import addresses, manifests
from kubetorch.datastore.addresses import WRITABLE, Address
from kubetorch.datastore.blobs import BlobStore
from kubetorch.errors import ConfigError, DataStoreError, KubetorchError
from kubetorch.lib import deadlines, processes
from kubetorch.lib.egress import networks
from kubetorch.lib.tasks import cancel_all
from kubetorch.wire import exceptions, messages
from kubetorch.wire.buckets import BucketJob, BucketProgress, PullBucket, PushBucket
from kubetorch.wire.data import FindKeys, KeyView, PutKey

_log = logging.getLogger(__name__)

_PROGRAM = "kubetorch.datastore.bucket_program"
#: The variable with the networks that may be reached though they are not public.
NETWORKS = "KT_BUCKET_NETWORKS"
#: The variables of this process that the program gets.
_INHERITED = (
    *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
)


def allowed_networks(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The networks of `KT_BUCKET_NETWORKS`.

    Raises:
        ConfigError: One is no network.
    """
    texts = environ.get(NETWORKS, "").replace(",", " ").split()
    try:
        networks(texts)
    except ValueError as error:
        raise ConfigError(
            f"{NETWORKS} has {error}", hint="networks as 10.0.0.0/8, with commas between them"
        ) from None
    return tuple(texts)


class _Run:
    """A program, and those who wait for its end; `abandon` is called when the last one leaves."""

    def __init__(self, namespace: str, abandon: Callable[[], None]) -> None:
        self.namespace = namespace
        self._abandon = abandon
        self.progress = BucketProgress()
        self.is_over = False
        self.waiters = 0
        self._has_changed = asyncio.Event()

    def set_progress(self, progress: BucketProgress, *, is_last: bool = False) -> None:
        self.progress, self.is_over = progress, is_last
        self._has_changed.set()
        self._has_changed = asyncio.Event()

    def follow(self) -> AsyncGenerator[BucketProgress, None]:
        """Yields the progress at each change and after each pause, and last the outcome."""
        # Counted before the first step of the generator: until then the other getters may leave.
        self.waiters += 1
        return self._follow()

    async def _follow(self) -> AsyncGenerator[BucketProgress, None]:
        try:
            while not self.is_over:
                has_changed = self._has_changed
                yield self.progress
                await deadlines.wait_at_most(TIMING.bucket_heartbeat_seconds, has_changed.wait())
            yield self.progress
        finally:
            self.waiters -= 1
            if not self.waiters and not self.is_over:
                self._abandon()


class Buckets:
    def __init__(
        self,
        data: DataStore,
        blob_stores: BlobStores,
        environ: Mapping[str, str],
        *,
        silence_seconds: float = TIMING.bucket_silence_seconds,
    ) -> None:
        self._data = data
        self._blob_stores = blob_stores
        self._environ = {name: environ[name] for name in _INHERITED if name in environ}
        self._networks = allowed_networks(environ)
        self._silence_seconds = silence_seconds
        self._slots = asyncio.Semaphore(LIMITS.bucket_programs)
        self._slots_of_namespaces: WeakValueDictionary[str, asyncio.Semaphore] = (
            WeakValueDictionary()
        )
        self._runs: dict[tuple[object, ...], _Run] = {}
        self._tasks: set[asyncio.Task[BucketProgress]] = set()

    async def close(self) -> None:
        await cancel_all(self._tasks)

    def pull(
        self, namespace: str, pull: PullBucket, creator: str
    ) -> AsyncGenerator[BucketProgress, None]:
        """Let the key of an address hold what is there; yields the progress, last the key."""
        address, options = _checked(pull.address, pull.options)
        identity = (namespace, str(address), *sorted(options.items()))
        run = self._runs.get(identity)
        if run is None:
            run = self._begin(identity, namespace, address, options, creator)
        return run.follow()

    def push(
        self, namespace: str, push: PushBucket, creator: str
    ) -> AsyncGenerator[BucketProgress, None]:
        """Write what a manifest names, then let the key of the address hold it."""
        address, options = _checked(push.address, push.options)
        if address.scheme not in WRITABLE:
            raise DataStoreError(
                f"{address.scheme}:// addresses cannot be written to",
                hint=f"{', '.join(f'{scheme}://' for scheme in WRITABLE)} can",
            )
        put = msgspec.structs.replace(push.put, key=address.key, publisher=None)
        return self._begin((object(),), namespace, address, options, creator, put=put).follow()

    def _check_room(self, namespace: str) -> None:
        """Refuse a run that would be one too many, here or for its namespace."""
        if len(self._runs) >= LIMITS.bucket_runs:
            raise DataStoreError(
                f"{len(self._runs)} addresses are being pulled or written to in this cluster; a "
                f"controller allows {LIMITS.bucket_runs} at once",
                hint="try again when some of them have ended",
            )
        count = sum(run.namespace == namespace for run in self._runs.values())
        if count >= LIMITS.bucket_runs_of_namespace:
            raise DataStoreError(
                f"{count} addresses are being pulled or written to in namespace {namespace}; "
                f"a namespace may have {LIMITS.bucket_runs_of_namespace} at once",
                hint="try again when some of them have ended",
            )

    def _begin(
        self,
        identity: tuple[object, ...],
        namespace: str,
        address: Address,
        options: dict[str, str],
        creator: str,
        *,
        put: PutKey | None = None,
    ) -> _Run:
        self._check_room(namespace)
        slots = self._slots_of_namespaces.setdefault(
            namespace, asyncio.Semaphore(LIMITS.bucket_programs_of_namespace)
        )

        def forget() -> None:
            # From now on a getter begins a run of its own.
            if self._runs.get(identity) is run:
                del self._runs[identity]

        def abandon() -> None:
            forget()
            task.cancel()

        async def work() -> BucketProgress:
            async with slots, self._slots:
                return await self._work(run, namespace, address, options, creator, put)

        def end(task: asyncio.Task[BucketProgress]) -> None:
            """Tell the getters, however the task ended, also if it never began."""
            self._tasks.discard(task)
            forget()
            error = None if task.cancelled() else task.exception()
            if not task.cancelled() and error is None:
                run.set_progress(task.result(), is_last=True)
                return
            if isinstance(error, KubetorchError | OSError):
                _log.warning("bucket failed address=%s error=%s", address, error)
            else:
                if error is not None:
                    _log.error("bucket failed address=%s", address, exc_info=error)
                error = DataStoreError(
                    f"the controller ended its work on {address}", hint="try again"
                )
            failure = exceptions.describe_refusal(error).to_dict()
            run.set_progress(msgspec.structs.replace(run.progress, failure=failure), is_last=True)

        run = self._runs[identity] = _Run(namespace, abandon)
        task = asyncio.get_running_loop().create_task(work())
        self._tasks.add(task)
        task.add_done_callback(end)
        return run

    async def _work(
        self,
        run: _Run,
        namespace: str,
        address: Address,
        options: dict[str, str],
        creator: str,
        put: PutKey | None,
    ) -> BucketProgress:
        keys_near = await self._keys_near(namespace, address)
        held_manifest = next((key.manifest for key in keys_near if key.key == address.key), "")
        blobs = self._blob_stores.of(namespace).blobs
        room = blobs.room
        if put is not None:
            await self._blob_stores.in_data_thread(lambda: _fetch(blobs, put.manifest))
        elif self._blob_stores.bucket is not None:
            # The program makes no room.
            await self._blob_stores.in_thread(lambda: blobs.make_room(room.limit_bytes or 0))
        job = BucketJob(
            address=str(address),
            folder=str(blobs.root),
            options=options,
            limit_bytes=room.limit_bytes,
            owner=room.owner,
            hint=room.hint,
            manifest=held_manifest if put is None else put.manifest,
            is_push=put is not None,
            networks=self._networks,
        )
        try:
            progress = await self._run_program(run, job)
        finally:
            blobs.forget_used_bytes()
        if progress.failure is not None:
            return progress
        if put is None:
            # Asked again: the program may have taken hours.
            match await self._keys_near(namespace, address):
                case [key] if (key.key, key.manifest) == (address.key, progress.manifest):
                    return msgspec.structs.replace(progress, key=key)
        stored_put = msgspec.structs.replace(
            put or PutKey(key=address.key, manifest="", lifespan="cluster"),
            manifest=progress.manifest,
        )
        answer = await self._data.put(namespace, stored_put, creator, is_pulled=True)
        if answer.key is None:
            raise DataStoreError(
                f"{len(answer.missing)} blobs of {address} vanished while it was pulled",
                hint="get it again",
            )
        return msgspec.structs.replace(progress, key=answer.key)

    async def _keys_near(self, namespace: str, address: Address) -> list[KeyView]:
        """The key of an address, and the keys above and below it."""
        path_keys = await self._data.find(namespace, FindKeys(path=address.key))
        return [path_key.key for path_key in path_keys.keys]

    async def _run_program(self, run: _Run, job: BucketJob) -> BucketProgress:
        """Returns the last line of a program; the lines before are the progress of the run."""
        no_current_folder = ("-P",) if sys.version_info >= (3, 11) else ()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *no_current_folder, "-m", _PROGRAM),
            stdin=PIPE,
            stdout=PIPE,
            env=self._environ,
            limit=LIMITS.bucket_line_bytes,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        last = BucketProgress()
        is_ending = False
        try:
            with contextlib.suppress(ConnectionError):
                process.stdin.write(messages.encode(job))
                await process.stdin.drain()
                process.stdin.close()
            while True:
                async with deadlines.timeout(self._silence_seconds):
                    line = await process.stdout.readline()
                if not line:
                    is_ending = True
                    break
                last = messages.decode(BucketProgress, line)
                run.set_progress(last)
        except TimeoutError:
            raise DataStoreError(
                f"{job.address} sent nothing for {self._silence_seconds:.0f} s",
                hint="the server may be overloaded, or cut off; get it again",
            ) from None
        finally:
            status = await asyncio.shield(_end(process, is_ending=is_ending))
        if not last.manifest and last.failure is None:
            if status < 0:
                end = f"was ended by {processes.signal_name(-status)}"
                hint = "perhaps no memory was left beside the controller; get it again"
            else:
                end = f"ended with exit code {status}"
                hint = "the controller's log has the traceback"
            raise DataStoreError(f"the program for {job.address} {end}", hint=hint)
        return last


async def _end(process: asyncio.subprocess.Process, *, is_ending: bool) -> int:
    """End a program, which may take back what it has half written; returns its exit code.

    A program that `is_ending` by itself gets no signal: asyncio would ask for its exit code before
    it sends one, and lose it.
    """
    if not is_ending:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    try:
        async with deadlines.timeout(TIMING.bucket_end_seconds):
            return await process.wait()
    except TimeoutError:
        process.kill()
        return await process.wait()


def _fetch(blobs: BlobStore, manifest: str) -> None:
    """Have on disk what a manifest names, which the program reads there."""
    blobs.fetch((manifest,))
    if blobs.has(manifest):
        blobs.fetch(manifests.read(blobs, manifest).digests())


def _checked(text: str, options: Mapping[str, str]) -> tuple[Address, dict[str, str]]:
    address = addresses.parse(text)
    return address, addresses.check_options(address.scheme, options)
