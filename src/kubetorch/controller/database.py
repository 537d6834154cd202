"""The SQLite file of the state: its tables, and opening it.

Apart from `kubetorch.controller.state`, because the local service opens the file, and finds out
whether it can be used, before it imports anything of weight.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from kubetorch.errors import ControllerError, KubetorchError, StorageFullError, VersionMismatchError

#: Raised when the tables change; an older file is brought up to date when it is opened.
SCHEMA = 6

_TABLES = """
create table if not exists workloads (
    namespace text not null, name text not null, generation integer not null,
    good integer not null, failure text not null, epoch integer not null,
    created real not null, updated real not null, active real not null, worlds text not null,
    pool text not null,
    primary key (namespace, name)
) without rowid;
create table if not exists generations (
    namespace text not null, name text not null, number integer not null, spec text not null,
    primary key (namespace, name, number)
) without rowid;
create table if not exists pods (
    namespace text not null, workload text not null, name text not null,
    ordinal integer not null, port integer not null, template text not null, mark text not null,
    pid integer not null, start_time text not null, restarts integer not null,
    started real not null, devices text not null,
    primary key (namespace, name)
) without rowid;
create table if not exists calls (
    id text not null primary key, namespace text not null, workload text not null,
    pod text not null, callable text not null, state text not null,
    started real not null, ended real, result text, result_bytes integer not null,
    attempts integer not null
) without rowid;
create index if not exists running_calls on calls (namespace, workload) where ended is null;
"""

#: By schema of an older file: the statements that bring it up to date before the tables are made,
#: and after.
_ATTEMPTS = "alter table calls add column attempts integer not null default 1;"
_POOL = f"alter table workloads add column pool text not null default ''; {_ATTEMPTS}"
_WORLDS = f"alter table workloads add column worlds text not null default ''; {_POOL}"
_MOVES = {
    1: (
        f"alter table pods rename to old_pods; {_WORLDS}",
        "insert into pods select *, '' from old_pods; drop table old_pods;",
    ),
    2: (_WORLDS, ""),
    3: (_WORLDS, ""),
    4: (_POOL, ""),
    5: (_ATTEMPTS, ""),
}


def open_database(path: Path) -> sqlite3.Connection:
    """Open the file, which is made when it does not exist."""
    try:
        connection = sqlite3.connect(path, isolation_level=None, timeout=5.0)
        # After a crash of the machine, not of the process, the last changes may be lost.
        connection.executescript("pragma journal_mode=wal; pragma synchronous=normal;")
        (version,) = connection.execute("pragma user_version").fetchone()
        if version < SCHEMA:
            before, after = _MOVES.get(version, ("", ""))
            connection.executescript(
                f"begin; {before} {_TABLES} {after} pragma user_version={SCHEMA}; commit"
            )
    except sqlite3.Error as error:
        raise failure(path, error) from error
    if version > SCHEMA:
        raise VersionMismatchError(
            f"{path} was written by a newer version of Kubetorch (schema {version})",
            hint="upgrade this one: pip install -U kubetorch",
        )
    return connection


def failure(path: Path, error: sqlite3.Error) -> KubetorchError:
    """The error of our tree for an error of SQLite."""
    if "full" in str(error):
        return StorageFullError(f"no space left for {path}", hint="make room there")
    return ControllerError(
        f"{path} cannot be used: {error}",
        hint=f"move {path} away to begin with an empty state",
    )
