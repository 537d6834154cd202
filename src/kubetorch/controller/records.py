"""Records of calls, for `kt replay`: their arguments, and the generation that ran them.

The arguments, as a pod has packed them, and the spec of the generation are blobs; the trees of the
spec stay in the store as long as a record names them. Records expire by age, and beyond a size the
oldest of a namespace go first. The spec has names of variables, and no values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import msgspec

from kubetorch.controller.blobs import BlobStores, NamespaceBlobs
from kubetorch.controller.state import RecordRow, SqliteState
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.errors import KubetorchError, ProtocolError, ResultExpiredError
from kubetorch.lib.clock import Clock
from kubetorch.specs.image import EnvStep
from kubetorch.specs.workload import RuntimeSpec, WorkloadSpec
from kubetorch.wire import messages
from kubetorch.wire.messages import CallReport, CallView, Creator, RecordView

_log = logging.getLogger(__name__)


class _Code(msgspec.Struct, frozen=True):
    """The blob with the code of a record."""

    spec: WorkloadSpec
    variables: tuple[str, ...]
    creator: Creator | None


class Records:
    def __init__(
        self,
        state: SqliteState,
        blob_stores: BlobStores,
        clock: Clock,
        *,
        most_records: int = LIMITS.namespace_records,
    ) -> None:
        self._most_records = most_records
        self._state = state
        self._blob_stores = blob_stores
        self._clock = clock
        # By digest: what blobs of code say.
        self._codes: dict[str, _Code] = {}

    def add(
        self,
        namespace: str,
        workload: str,
        pod: str,
        report: CallReport,
        spec: WorkloadSpec,
        creator: Creator | None,
    ) -> None:
        """Keep the record of a call that a pod has uploaded; of its report, little is trusted."""
        earlier = self.find(report.id)
        if earlier is not None and (earlier.namespace, earlier.workload) != (namespace, workload):
            return
        assert report.record is not None
        reduced, variables = without_values(spec)
        text = messages.encode(_Code(reduced, variables, creator))
        blobs, now = self._blob_stores.of(namespace).blobs, self._clock.time()
        ended = min(report.ended or now, now)
        try:
            size = blobs.size(report.record) + len(text)
            if size > LIMITS.namespace_record_bytes // 2:  # all others would go for it
                raise ProtocolError(f"a record of {size} bytes")
            row = RecordRow(
                id=report.id,
                namespace=namespace,
                workload=workload,
                pod=pod,
                callable=report.callable,
                state=report.state,
                started=min(report.started, ended),
                ended=ended,
                record=report.record,
                bytes=size,
                code=blobs.add(text),
            )
            self._state.put_record(row)
        except (KubetorchError, OSError) as error:  # such as a full disk: it is not replayed then
            _log.warning("record not kept id=%s error=%s", report.id, error)
            return
        if self._is_full(*self._state.count_records(namespace)):
            self.expire()

    def find(self, call_id: str) -> RecordRow | None:
        row = self._state.record(call_id)
        return None if row is None or self._is_old(row) else row

    def rows(self, namespace: str = "", workload: str = "") -> list[RecordRow]:
        return self._state.records(namespace=namespace, workload=workload)

    def views(
        self, calls: Iterable[CallView], *, namespace: str = "", workload: str = ""
    ) -> list[CallView]:
        """These calls, which say whether they have a record, and calls that have left no more."""
        rows = {
            (row.id, row.namespace, row.workload): row
            for row in self.rows(namespace, workload)
            if not self._is_old(row)
        }
        marked = [
            call
            if rows.pop((call.id, call.namespace, call.workload), None) is None
            else msgspec.structs.replace(call, is_replayable=True)
            for call in calls
        ]
        marked += map(view_of, rows.values())
        return sorted(marked, key=lambda call: call.started, reverse=True)

    def view(self, call: CallView, user: str) -> RecordView:
        """The record of a call that this user may use, as the user sees it."""
        row = self._required(call)
        code = self._code(row)
        if code is None:
            raise _no_record(call.id)
        creator = code.creator
        return RecordView(
            call=view_of(row),
            spec=code.spec,
            variables=code.variables,
            creator=creator,
            is_own=creator is not None and creator.user == user,
            expires=row.ended + TIMING.call_record_seconds,
        )

    def digest(self, call: CallView) -> str:
        """Digest of the packed record of a call that the sender may use."""
        row = self._required(call)
        if not self._blob_stores.of(row.namespace).blobs.has(row.record):
            raise _no_record(call.id)
        return row.record

    def blobs(self, store: NamespaceBlobs) -> set[str]:
        """The blobs of all records in a store, without those of trees."""
        rows = [row for row in self.rows() if store.is_of(row.namespace)]
        return {digest for row in rows for digest in (row.record, row.code)}

    def specs(self) -> list[WorkloadSpec]:
        """The specs whose trees records need."""
        by_code = {row.code: row for row in self.rows()}
        codes = map(self._code, by_code.values())
        return [code.spec for code in codes if code is not None]

    def expire(self) -> None:
        """Forget records that are too old, and the oldest of namespaces that have too many."""
        by_namespace: dict[str, list[RecordRow]] = {}
        for row in self.rows():  # the latest first
            by_namespace.setdefault(row.namespace, []).append(row)
        forgotten = [row.id for rows in by_namespace.values() for row in self._surplus(rows)]
        self._state.delete_records(forgotten)
        codes = {row.code for row in self.rows()}
        self._codes = {digest: code for digest, code in self._codes.items() if digest in codes}

    def _surplus(self, rows: Sequence[RecordRow]) -> Iterator[RecordRow]:
        """The records of a namespace, the latest first, that are to be forgotten."""
        is_full = self._is_full(len(rows), sum(row.bytes for row in rows))
        share = 1 - 1 / LIMITS.record_slack_divisor if is_full else 1
        size = 0
        for count, row in enumerate(rows, 1):
            size += row.bytes
            if self._is_old(row) or self._is_full(count, size, share):
                yield row

    def _is_full(self, count: int, size: int, share: float = 1) -> bool:
        """True if so many records with so many bytes are more than a share of the bounds."""
        most_bytes = share * LIMITS.namespace_record_bytes
        return count > share * self._most_records or size > most_bytes

    def _required(self, call: CallView) -> RecordRow:
        """The record of a call: rights were checked on the workload of the call."""
        row = self.find(call.id)
        if row is None or (row.namespace, row.workload) != (call.namespace, call.workload):
            raise _no_record(call.id)
        return row

    def _is_old(self, row: RecordRow) -> bool:
        return self._clock.time() - row.ended >= TIMING.call_record_seconds

    def _code(self, row: RecordRow) -> _Code | None:
        code = self._codes.get(row.code)
        if code is None:
            try:
                data = self._blob_stores.of(row.namespace).blobs.read(row.code)
                code = self._codes[row.code] = messages.decode(_Code, data)
            except KubetorchError as error:  # another error must end a collection of blobs
                _log.warning("record without code id=%s error=%s", row.id, error)
        return code


def view_of(row: RecordRow) -> CallView:
    return CallView(
        id=row.id,
        namespace=row.namespace,
        workload=row.workload,
        pod=row.pod,
        callable=row.callable,
        state=row.state,
        started=row.started,
        ended=row.ended,
        is_replayable=True,
    )


def _no_record(call_id: str) -> ResultExpiredError:
    days = TIMING.call_record_seconds / 86400
    return ResultExpiredError(
        f"the call {call_id} has left no record, or its record is no longer kept",
        hint=f"calls that fail leave one for {days:.0f} days, at most "
        f"{LIMITS.namespace_record_bytes >> 20} MiB or {LIMITS.namespace_records:,} in a "
        "namespace, the oldest go first; with "
        'kt.fn(..., record="all") all calls do; kt calls shows which can be replayed',
    )


def without_values(spec: WorkloadSpec) -> tuple[WorkloadSpec, tuple[str, ...]]:
    """A spec without values of variables, and the names of these."""
    compute, image = spec.compute, spec.compute.image
    names = dict.fromkeys(name for name, _ in compute.env_vars)
    if image is not None:
        names |= dict.fromkeys(step.name for step in image.steps if isinstance(step, EnvStep))
        steps = tuple(step for step in image.steps if not isinstance(step, EnvStep))
        image = replace(image, steps=steps)
    # Manifests may have values, too.
    compute = replace(compute, env_vars=(), image=image, manifest=None, service_template=None)
    runtime = RuntimeSpec(python=spec.runtime.python, version=spec.runtime.version)
    return replace(spec, compute=compute, runtime=runtime), tuple(names)
