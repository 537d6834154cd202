"""The state that survives the controller: workloads, generations, pods and spawned calls.

`SqliteState` stores all of it in one SQLite file in WAL mode: a change is on disk, as a
transaction, before its method returns, so `kill -9` at any moment leaves the state before the
change or after it. Methods take well below a millisecond and are called from the event loop. In a
cluster `KubernetesState` stores workloads instead, and writes behind; `flush` waits until a change
is safe.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec.structs import astuple

from kubetorch.controller import database
from kubetorch.controller.access import NO_GRANT, Grant
from kubetorch.errors import ProtocolError
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import messages

_Record = TypeVar("_Record", bound=msgspec.Struct)

_log = logging.getLogger(__name__)


class WorkloadRecord(msgspec.Struct, frozen=True):
    namespace: str
    name: str
    #: The wanted generation.
    generation: int
    #: The last generation that all pods served; 0 before the first.
    good: int = 0
    #: Why the wanted generation was given up, as JSON; empty if it was not.
    failure: str = ""
    #: The number of the last list of members that was sent.
    epoch: int = 0
    #: Unix times: of the first deploy, of the last, and of the last call.
    created: float = 0.0
    updated: float = 0.0
    active: float = 0.0
    #: The worlds of a distributed service, as `kubetorch.controller.world` packs them.
    worlds: str = ""
    #: The ordinals of the pods that a selector found at the last deploy, with commas.
    pool: str = ""
    #: The scaling of a workload that the controller scales, as `kubetorch.controller.scaling` packs
    #: it.
    scaling: str = ""


class Generation(msgspec.Struct, frozen=True):
    """A generation of a workload: its number, spec and grant, which only clusters store."""

    number: int
    spec: WorkloadSpec
    grant: Grant = NO_GRANT


class PodRecord(msgspec.Struct, frozen=True):
    """One pod of the process backend."""

    namespace: str
    workload: str
    name: str
    ordinal: int
    port: int
    template: str
    mark: str = ""
    pid: int = 0
    start_time: str = ""
    restarts: int = 0
    started: float = 0.0
    devices: str = ""
    #: The pod takes no new call, and ends.
    is_leaving: bool = False


class CallRecord(msgspec.Struct, frozen=True):
    """One spawned call; see `kubetorch.wire.messages.CallReport` for the fields."""

    id: str
    namespace: str
    workload: str
    pod: str
    callable: str
    state: str
    started: float
    ended: float | None = None
    result: str | None = None
    result_bytes: int = 0
    attempts: int = 1


class RecordRow(msgspec.Struct, frozen=True):
    """The record of one call, see `kubetorch.controller.records`; `code` is a digest, too."""

    id: str
    namespace: str
    workload: str
    pod: str
    callable: str
    state: str
    started: float
    ended: float
    record: str
    bytes: int
    code: str


class Contents(msgspec.Struct, frozen=True):
    """Everything about workloads, as it is read when the controller starts."""

    workloads: tuple[WorkloadRecord, ...] = ()
    generations: dict[tuple[str, str], tuple[Generation, ...]] = msgspec.field(default_factory=dict)


class Summary(msgspec.Struct, frozen=True):
    """The state of a workload at one moment, as `kubectl get` shows it."""

    phase: str
    kind: str
    ready: int
    pods: int
    is_ready: bool
    reason: str
    message: str
    ttl: str
    time: float


class Observer(Protocol):
    """Gives summaries to a state, and is notified of deletions by others."""

    def summary(self, namespace: str, name: str) -> Summary | None:
        """The summary of a workload; `None` without such a workload."""

    def on_deleted_elsewhere(self, namespace: str, name: str) -> None:
        """Another program deleted a workload: its pods are to go too."""


class State(Protocol):
    """The records of workloads that survive the controller."""

    def contents(self) -> Contents:
        """All workloads and their stored generations."""

    def put_workload(
        self,
        workload: WorkloadRecord,
        *,
        generation: Generation | None = None,
        keep: Sequence[int] = (),
    ) -> None:
        """Add or replace a workload, in one transaction with its generations."""

    def delete_workload(self, namespace: str, name: str) -> None:
        """Forget a workload and its generations."""

    def reject_workload(self, namespace: str, name: str, reason: str) -> None:
        """Record that a workload of `contents` cannot be adopted, for this reason."""

    def observe(self, observer: Observer) -> None:
        """Ask this observer for summaries, and notify it of deletions by others."""
        return

    def touch(self, namespace: str, name: str) -> None:
        """A workload may be in another phase than before; called often."""
        return

    async def flush(self, namespace: str, name: str) -> None:
        """Wait until the changes of a workload would survive the controller."""
        return

    async def flush_worlds(self, namespace: str, name: str) -> None:
        """Wait until its worlds would survive; not for long, as pods wait for it."""
        return


class SqliteState(State):
    """The state in an SQLite file, which no other process changes."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._database = connection

    def close(self) -> None:
        self._database.close()

    def contents(self) -> Contents:  # State's
        generations: dict[tuple[str, str], tuple[Generation, ...]] = {}
        for namespace, name, number, spec in self._query(
            "select namespace, name, number, spec from generations order by number"
        ):
            try:
                generation = Generation(number, messages.decode(WorkloadSpec, spec))
            except (msgspec.MsgspecError, ProtocolError) as error:
                _log.error("generation of %s/%s cannot be read: %s", namespace, name, error)
                continue
            key = (namespace, name)
            generations[key] = (*generations.get(key, ()), generation)
        rows = self._query("select * from workloads order by namespace, name")
        return Contents(tuple(self._records(WorkloadRecord, rows)), generations)

    def put_workload(  # State's
        self,
        workload: WorkloadRecord,
        *,
        generation: Generation | None = None,
        keep: Sequence[int] = (),
    ) -> None:
        key = (workload.namespace, workload.name)
        statements: list[tuple[str, tuple[Any, ...]]]
        if generation is not None:
            spec = messages.encode(generation.spec).decode()
            added = "insert or replace into generations values (?, ?, ?, ?)"
            statements = [
                (_replace("workloads", WorkloadRecord), astuple(workload)),
                (added, (*key, generation.number, spec)),
            ]
        else:  # a change, which must not bring back what was deleted meanwhile
            values = ", ".join(f"{name} = ?" for name in WorkloadRecord.__struct_fields__)
            update = f"update workloads set {values} where namespace = ? and name = ?"
            statements = [(update, (*astuple(workload), *key))]
        if keep:
            marks = ", ".join("?" * len(keep))
            condition = f"namespace = ? and name = ? and number not in ({marks})"
            statements.append((f"delete from generations where {condition}", (*key, *keep)))
        self._transaction(statements)

    def delete_workload(self, namespace: str, name: str) -> None:  # State's
        where = "where namespace = ? and name = ?"
        self._transaction(
            [
                (f"delete from workloads {where}", (namespace, name)),
                (f"delete from generations {where}", (namespace, name)),
            ]
        )

    def reject_workload(self, namespace: str, name: str, reason: str) -> None:
        _log.error("workload forgotten workload=%s/%s reason=%s", namespace, name, reason)
        self.delete_workload(namespace, name)

    def pods(self) -> list[PodRecord]:
        return self._records(PodRecord, self._query("select * from pods order by ordinal"))

    def put_pod(self, pod: PodRecord) -> None:
        self._transaction([(_replace("pods", PodRecord), astuple(pod))])

    def delete_pods(self, pods: Iterable[tuple[str, str]]) -> None:
        where = "delete from pods where namespace = ? and name = ?"
        self._transaction([(where, pod) for pod in pods])

    def call(self, call_id: str) -> CallRecord | None:
        rows = self._query("select * from calls where id = ?", call_id)
        return self._records(CallRecord, rows[:1])[0] if rows else None

    def calls(
        self, *, namespace: str = "", workload: str = "", is_running: bool = False
    ) -> list[CallRecord]:
        condition = "ended is null" if is_running else "true"
        rows = self._query(
            f"select * from calls where {condition} and (? = '' or namespace = ?)"
            " and (? = '' or workload = ?) order by started desc",
            *(namespace, namespace, workload, workload),
        )
        return self._records(CallRecord, rows)

    def count_ended_calls(self) -> tuple[int, int]:
        ((count, size),) = self._query("select count(ended), total(result_bytes) from calls")
        return count, int(size)

    def results(self, namespace: str = "") -> set[str]:
        rows = self._query(
            "select result from calls where result is not null and (? = '' or namespace = ?)",
            *(namespace, namespace),
        )
        return {digest for (digest,) in rows}

    def put_call(self, call: CallRecord) -> None:
        self._transaction([(_replace("calls", CallRecord), astuple(call))])

    def delete_calls(self, ids: Iterable[str]) -> None:
        self._transaction([("delete from calls where id = ?", (call_id,)) for call_id in ids])

    def record(self, call_id: str) -> RecordRow | None:
        rows = self._query("select * from records where id = ?", call_id)
        return self._records(RecordRow, rows)[0] if rows else None

    def records(self, *, namespace: str = "", workload: str = "") -> list[RecordRow]:
        """Records of calls, the latest first."""
        rows = self._query(
            "select * from records where (? = '' or namespace = ?) and (? = '' or workload = ?)"
            " order by ended desc",
            *(namespace, namespace, workload, workload),
        )
        return self._records(RecordRow, rows)

    def count_records(self, namespace: str) -> tuple[int, int]:
        """The number of records of a namespace, and their bytes."""
        ((count, size),) = self._query(
            "select count(*), coalesce(sum(bytes), 0) from records where namespace = ?", namespace
        )
        return count, size

    def put_record(self, record: RecordRow) -> None:
        self._transaction([(_replace("records", RecordRow), astuple(record))])

    def delete_records(self, ids: Iterable[str]) -> None:
        self._transaction([("delete from records where id = ?", (call_id,)) for call_id in ids])

    def _records(self, record: type[_Record], rows: Sequence[tuple[Any, ...]]) -> list[_Record]:
        return [record(*row) for row in rows]

    def _query(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise database.failure(self._path, error) from error

    def _transaction(self, statements: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        try:
            self._database.execute("begin immediate")
            for statement, values in statements:
                self._database.execute(statement, values)
            self._database.execute("commit")
        except sqlite3.Error as error:
            if self._database.in_transaction:
                self._database.execute("rollback")
            raise database.failure(self._path, error) from error


def _replace(table: str, record: type[msgspec.Struct]) -> str:
    marks = ", ".join("?" * len(record.__struct_fields__))
    return f"insert or replace into {table} values ({marks})"
