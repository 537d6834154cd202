"""What survives the controller: workloads, their generations, pods and spawned calls.

`State`, `PodState` and `CallState` are what the rest of the controller sees. `SqliteState` keeps
all of it in one SQLite file in WAL mode: a change is on disk, as a transaction, before its method
returns, so `kill -9` at any moment leaves the state before the change or after it. Methods take
well below a millisecond and are called from the event loop. Another state may write behind; `flush`
says when what it was given is safe.
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
from kubetorch.controller.summary import Observer
from kubetorch.errors import ControllerError, ProtocolError
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import messages

_log = logging.getLogger(__name__)
_Record = TypeVar("_Record", bound=msgspec.Struct)


class WorkloadRecord(msgspec.Struct, frozen=True):
    """One workload.

    Attributes:
        namespace, name: Its identity.
        generation: The wanted generation; it exists in `Generation`s.
        good: The last generation that all pods served; 0 when there was none.
        failure: JSON of why the wanted generation was given up; empty when it was not.
        epoch: Number of the last change of its members.
        created, updated, active: Seconds since the epoch: first and last deploy, last call.
    """

    namespace: str
    name: str
    generation: int
    good: int = 0
    failure: str = ""
    epoch: int = 0
    created: float = 0.0
    updated: float = 0.0
    active: float = 0.0


class Generation(msgspec.Struct, frozen=True):
    """One generation of a workload: its number and what it is."""

    number: int
    spec: WorkloadSpec


class PodRecord(msgspec.Struct, frozen=True):
    """One pod of the process backend.

    Attributes:
        namespace, workload, name: Its identity.
        ordinal: Its number in the workload.
        port: Where its agent listens.
        template: Fingerprint of the pod template that it was made from.
        mark: Value of `kubetorch.wire.podenv.MARK` in its processes; a new one for each start.
        pid, start_time: Its agent (`kubetorch.lib.identity.start_time`); 0 when none was started.
        restarts: How often its agent was started again.
        started: Seconds since the epoch of its agent's start.
        devices: Numbers of the GPUs that are its own, with commas.
    """

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


class Contents(msgspec.Struct, frozen=True):
    """Everything about workloads, as it is read when the controller starts."""

    workloads: tuple[WorkloadRecord, ...] = ()
    generations: dict[tuple[str, str], tuple[Generation, ...]] = msgspec.field(default_factory=dict)


class PodState(Protocol):
    """What the process backend keeps."""

    def pods(self) -> list[PodRecord]:
        """All pods."""

    def put_pod(self, pod: PodRecord) -> None:
        """Add or replace a pod."""

    def delete_pods(self, pods: Iterable[tuple[str, str]]) -> None:
        """Forget pods, by namespace and name."""


class CallState(Protocol):
    """What is kept of spawned calls."""

    def call(self, call_id: str) -> CallRecord | None:
        """One call."""

    def calls(self, *, namespace: str = "", workload: str = "") -> list[CallRecord]:
        """Calls, newest first, of a namespace and a workload if they are given."""

    def running_calls(self, *, namespace: str = "", workload: str = "") -> list[CallRecord]:
        """Those of `calls` whose end is not known."""

    def count_ended_calls(self) -> tuple[int, int]:
        """How many calls have ended, and the bytes of their results together."""

    def results(self, namespace: str = "") -> set[str]:
        """The digests of all results, of a namespace if it is given."""

    def put_call(self, call: CallRecord) -> None:
        """Add or replace a call."""

    def delete_calls(self, ids: Iterable[str]) -> None:
        """Forget calls."""


class State(Protocol):
    """What survives the controller of workloads."""

    def contents(self) -> Contents:
        """All workloads and the generations that are kept of them."""

    def put_workload(
        self,
        workload: WorkloadRecord,
        *,
        generation: Generation | None = None,
        keep: Sequence[int] = (),
    ) -> None:
        """Add or replace a workload, in one transaction with its generations.

        Args:
            workload: The workload.
            generation: A new generation, which the workload wants.
            keep: When not empty: the generations to keep; others are forgotten.
        """

    def delete_workload(self, namespace: str, name: str) -> None:
        """Forget a workload and its generations."""

    def reject_workload(self, namespace: str, name: str, reason: str) -> None:
        """A workload of `contents` cannot be taken up, for this reason."""

    def observe(self, observer: Observer) -> None:
        """Ask this one how workloads are, and tell it what others do to them."""

    def touch(self, namespace: str, name: str) -> None:
        """A workload may be in another phase than before; called often."""

    async def flush(self, namespace: str, name: str) -> None:
        """Wait until what was put or deleted of a workload survives the controller.

        Raises:
            KubetorchError: It will not. A generation that was put is forgotten, and a workload that
                was deleted is there again.
        """


class Kept(msgspec.Struct, frozen=True):
    """What survives a controller.

    Attributes:
        workloads: The workloads and their generations.
        calls: Spawned calls.
    """

    workloads: State
    calls: CallState


class SqliteState:
    """The state in an SQLite file.

    Args:
        path: The file.
        connection: The file, opened by `database.open_database`.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._database = connection

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    # ------------------------------------------------------------------------------- workloads

    def contents(self) -> Contents:  # noqa: D102  # State's
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

    def put_workload(  # noqa: D102  # State's
        self,
        workload: WorkloadRecord,
        *,
        generation: Generation | None = None,
        keep: Sequence[int] = (),
    ) -> None:
        key = (workload.namespace, workload.name)
        statements: list[tuple[str, tuple[Any, ...]]]
        if generation is not None:
            statements = [(_replace("workloads", WorkloadRecord), astuple(workload))]
        else:  # a change, which must not bring back what was deleted meanwhile
            statements = [(_update("workloads", WorkloadRecord), (*astuple(workload), *key))]
        if generation is not None:
            spec = messages.encode(generation.spec).decode()
            statements.append(
                ("insert into generations values (?, ?, ?, ?)", (*key, generation.number, spec))
            )
        if keep:
            marks = ", ".join("?" * len(keep))
            statements.append(
                (
                    "delete from generations where namespace = ? and name = ?"
                    f" and number not in ({marks})",
                    (*key, *keep),
                )
            )
        self._transaction(statements)

    def delete_workload(self, namespace: str, name: str) -> None:  # noqa: D102  # State's
        where = "where namespace = ? and name = ?"
        self._transaction(
            [
                (f"delete from workloads {where}", (namespace, name)),
                (f"delete from generations {where}", (namespace, name)),
            ]
        )

    def reject_workload(self, namespace: str, name: str, reason: str) -> None:  # noqa: D102
        _log.error("workload forgotten workload=%s/%s reason=%s", namespace, name, reason)
        self.delete_workload(namespace, name)

    def observe(self, observer: Observer) -> None:
        """Nobody else changes the file."""

    def touch(self, namespace: str, name: str) -> None:
        """The phase is not kept."""

    async def flush(self, namespace: str, name: str) -> None:
        """Every change was on disk before its method returned."""

    # ------------------------------------------------------------------------------------ pods

    def pods(self) -> list[PodRecord]:  # noqa: D102  # PodState's
        return self._records(PodRecord, self._query("select * from pods order by ordinal"))

    def put_pod(self, pod: PodRecord) -> None:  # noqa: D102  # PodState's
        self._transaction([(_replace("pods", PodRecord), astuple(pod))])

    def delete_pods(self, pods: Iterable[tuple[str, str]]) -> None:  # noqa: D102  # PodState's
        where = "delete from pods where namespace = ? and name = ?"
        self._transaction([(where, pod) for pod in pods])

    # ----------------------------------------------------------------------------------- calls

    def call(self, call_id: str) -> CallRecord | None:  # noqa: D102  # CallState's
        rows = self._query("select * from calls where id = ?", call_id)
        return self._records(CallRecord, rows[:1])[0] if rows else None

    def calls(self, *, namespace: str = "", workload: str = "") -> list[CallRecord]:  # noqa: D102
        return self._calls_where("true", namespace, workload)

    def running_calls(  # noqa: D102  # CallState's
        self, *, namespace: str = "", workload: str = ""
    ) -> list[CallRecord]:
        return self._calls_where("ended is null", namespace, workload)

    def _calls_where(self, condition: str, namespace: str, workload: str) -> list[CallRecord]:
        rows = self._query(
            f"select * from calls where {condition} and (? = '' or namespace = ?)"
            " and (? = '' or workload = ?) order by started desc",
            *(namespace, namespace, workload, workload),
        )
        return self._records(CallRecord, rows)

    def count_ended_calls(self) -> tuple[int, int]:  # noqa: D102  # CallState's
        ((count, size),) = self._query("select count(ended), total(result_bytes) from calls")
        return count, int(size)

    def results(self, namespace: str = "") -> set[str]:  # noqa: D102  # CallState's
        rows = self._query(
            "select result from calls where result is not null and (? = '' or namespace = ?)",
            *(namespace, namespace),
        )
        return {digest for (digest,) in rows}

    def put_call(self, call: CallRecord) -> None:  # noqa: D102  # CallState's
        self._transaction([(_replace("calls", CallRecord), astuple(call))])

    def delete_calls(self, ids: Iterable[str]) -> None:  # noqa: D102  # CallState's
        self._transaction([("delete from calls where id = ?", (call_id,)) for call_id in ids])

    # ---------------------------------------------------------------------------------- SQLite

    def _records(self, record: type[_Record], rows: Sequence[tuple[Any, ...]]) -> list[_Record]:
        try:
            return [record(*row) for row in rows]
        except TypeError as error:
            raise ControllerError(
                f"{self._path} cannot be used: its tables are those of another version",
                hint=f"move {self._path} away to begin with an empty state",
            ) from error

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


def _update(table: str, record: type[msgspec.Struct]) -> str:
    values = ", ".join(f"{name} = ?" for name in record.__struct_fields__)
    return f"update {table} set {values} where namespace = ? and name = ?"
