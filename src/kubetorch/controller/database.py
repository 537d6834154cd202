"""The SQLite file of the state: its tables, and opening it.

Apart from `kubetorch.controller.state`, because the local service opens the file, and finds out
whether it can be used, before it imports anything of weight.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from kubetorch.controller.tuning import TIMING
from kubetorch.errors import ControllerError, KubetorchError, StorageFullError, VersionMismatchError

#: Of all files of a released version, so that those of before are told apart: `ktor`.
APPLICATION = 0x6B746F72
#: Raised when the tables change.
SCHEMA = 4

_TABLES = """
create table workloads (
    namespace text not null, name text not null, generation integer not null,
    good integer not null, failure text not null, epoch integer not null,
    created real not null, updated real not null, active real not null, worlds text not null,
    pool text not null, scaling text not null,
    primary key (namespace, name)
) without rowid;
create table generations (
    namespace text not null, name text not null, number integer not null, spec text not null,
    primary key (namespace, name, number)
) without rowid;
create table pods (
    namespace text not null, workload text not null, name text not null,
    ordinal integer not null, port integer not null, template text not null, mark text not null,
    pid integer not null, start_time text not null, restarts integer not null,
    started real not null, devices text not null, is_leaving integer not null,
    primary key (namespace, name)
) without rowid;
create table calls (
    id text not null primary key, namespace text not null, workload text not null,
    pod text not null, callable text not null, state text not null,
    started real not null, ended real, result text, result_bytes integer not null,
    attempts integer not null
) without rowid;
create table records (
    id text not null primary key, namespace text not null, workload text not null,
    pod text not null, callable text not null, state text not null,
    started real not null, ended real not null, record text not null, bytes integer not null,
    code text not null
) without rowid;
create index records_by_end on records (namespace, ended, bytes);
create index running_calls on calls (namespace, workload) where ended is null;
"""


def open_database(path: Path) -> sqlite3.Connection:
    """Open the file, which is made when it does not exist.

    Raises:
        VersionMismatchError: A newer version of Kubetorch wrote it, or one of before the first
            release.
    """
    try:
        connection = sqlite3.connect(
            path, isolation_level=None, timeout=TIMING.database_lock_seconds
        )
        # After a crash of the machine, not of the process, the last changes may be lost.
        connection.executescript("pragma journal_mode=wal; pragma synchronous=normal;")
        (application,) = connection.execute("pragma application_id").fetchone()
        (schema,) = connection.execute("pragma user_version").fetchone()
        (tables,) = connection.execute("select count(*) from sqlite_master").fetchone()
        if not tables:
            application, schema = APPLICATION, SCHEMA
            connection.executescript(
                f"begin; {_TABLES} pragma application_id={application}; "
                f"pragma user_version={schema}; commit"
            )
    except sqlite3.Error as error:
        raise failure(path, error) from error
    if application != APPLICATION or schema < SCHEMA:
        connection.close()
        raise VersionMismatchError(
            f"{path} was written by an unreleased version of Kubetorch: run kt local stop, and "
            f"delete {path}"
        )
    if schema > SCHEMA:
        connection.close()
        raise VersionMismatchError(
            f"{path} was written by a newer version of Kubetorch (schema {schema})",
            hint="upgrade this one: pip install -U kubetorch",
        )
    return connection


def failure(path: Path, error: sqlite3.Error) -> KubetorchError:
    """The error of our tree for an error of SQLite."""
    if "full" in str(error):
        return StorageFullError(f"no space left for {path}", hint="make room there")
    return ControllerError(
        f"{path} cannot be used: {error}", hint=f"move {path} away to begin with an empty state"
    )
