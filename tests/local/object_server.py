"""What a fake API server needs to keep objects: versions, conflicts, patches, watches."""

from __future__ import annotations

import asyncio
import copy
import itertools
from typing import Any

from local.fake_apiserver import Exchange

Object = dict[str, Any]
_PREFIXES = {"apis": 3, "api": 2}


class ObjectServer:
    """A handler for `FakeApiServer`.

    Attributes:
        objects: By the path of their collection and their name.
        writes: Method, path and body of each write that succeeded.
        refusals: Answers of the next writes, first: status and reason.
        is_away: Whether every request is cut off.
        loses_answers: Whether writes have their effect, and no answer.
    """

    def __init__(self, *kinds: tuple[str, str, str]) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.writes: list[tuple[str, str, Any]] = []
        self.refusals: list[tuple[int, str]] = []
        self.is_away = False
        self.loses_answers = False
        self._kinds = kinds
        self._versions = itertools.count(1)
        self._watchers: set[_Watcher] = set()
        #: All that happened, for watches that begin at an earlier version.
        self._happened: list[tuple[str, str, Object]] = []

    async def __call__(self, exchange: Exchange) -> None:
        request = exchange.request
        if self.is_away:
            exchange.cut()
            return
        parts = request.path.strip("/").split("/")
        head = _PREFIXES[parts[0]]
        if len(parts) == head:
            self._discover(exchange, "/".join(parts[1:head]))
            return
        rest = parts[head:]
        namespace = rest[1] if rest[0] == "namespaces" else ""
        plural, *names = rest[2:] if namespace else rest
        collection = "/".join([*parts[:head], plural, namespace])
        if request.method == "GET":
            await self._read(exchange, collection, names)
        else:
            self._write(exchange, collection, names)

    # ------------------------------------------------------------------------------------ for tests

    def put(self, collection: str, found: Object) -> Object:
        """Somebody else writes an object."""
        key = (collection, found["metadata"]["name"])
        kind = "MODIFIED" if key in self.objects else "ADDED"
        metadata = {**found["metadata"], "resourceVersion": str(next(self._versions))}
        metadata.setdefault("uid", f"uid-{metadata['resourceVersion']}")
        metadata.setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
        self.objects[key] = {**copy.deepcopy(found), "metadata": metadata}
        self._tell(collection, kind, self.objects[key])
        return self.objects[key]

    def remove(self, collection: str, name: str) -> None:
        """Somebody else deletes an object."""
        found = self.objects.pop((collection, name))
        found["metadata"]["resourceVersion"] = str(next(self._versions))
        self._tell(collection, "DELETED", found)

    def go_away(self) -> None:
        """Cut all watches and requests, until `is_away` is false again."""
        self.is_away = True
        for watcher in self._watchers:
            watcher.queue.put_nowait(("CUT", {}))

    def names(self) -> list[str]:
        return [name for _, name in self.objects]

    def _tell(self, collection: str, kind: str, found: Object) -> None:
        happened = (collection, kind, copy.deepcopy(found))
        self._happened.append(happened)
        for watcher in self._watchers:
            watcher.tell(*happened)

    # ------------------------------------------------------------------------------------- requests

    def _discover(self, exchange: Exchange, version: str) -> None:
        names = [
            {"name": plural, "kind": kind, "namespaced": True}
            for group, plural, kind in self._kinds
            if group == version
        ]
        exchange.answer(200, {"kind": "APIResourceList", "resources": names})

    async def _read(self, exchange: Exchange, collection: str, names: list[str]) -> None:
        if names:
            found = self.objects.get((collection, names[0]))
            exchange.answer(200, found) if found else exchange.refuse(404, "NotFound")
            return
        if "watch" in exchange.request.query:
            await self._watch(exchange, collection)
            return
        chosen = exchange.request.query.get("labelSelector", "")
        items = [
            found
            for (where, _), found in self.objects.items()
            if where.startswith(collection) and _has(found, chosen)
        ]
        metadata = {"resourceVersion": str(next(self._versions))}
        exchange.answer(200, {"kind": "List", "metadata": metadata, "items": items})

    async def _watch(self, exchange: Exchange, collection: str) -> None:
        chosen = exchange.request.query.get("labelSelector", "")
        watcher = _Watcher(collection, chosen)
        begun = int(exchange.request.query.get("resourceVersion", "0"))
        for happened in self._happened:
            if int(_version(happened[2])) > begun:
                watcher.tell(*happened)
        self._watchers.add(watcher)
        try:
            await exchange.say()
            while True:
                kind, found = await watcher.queue.get()
                if self.is_away:
                    exchange.cut()
                    return
                await exchange.say({"type": kind, "object": found})
        finally:
            self._watchers.discard(watcher)

    def _write(self, exchange: Exchange, collection: str, names: list[str]) -> None:
        if self.refusals:
            status, reason = self.refusals.pop(0)
            exchange.refuse(status, reason)
            return
        request = exchange.request
        body = request.json
        name = names[0] if names else body["metadata"]["name"]
        known = self.objects.get((collection, name))
        if request.method == "POST":
            status, found = (409, None) if known else (201, body)
        elif known is None:
            status, found = 404, None
        elif request.method == "DELETE":
            status, found = 200, None
            if (body.get("preconditions") or {}).get("uid", known["metadata"]["uid"]) != known[
                "metadata"
            ]["uid"]:
                status = 409
        elif request.method == "PUT":
            is_current = _version(body) == _version(known)
            status, found = (200, body) if is_current else (409, None)
        else:
            found = _patched(known, body, names[1:])
            status = 200 if found else 422
        if status >= 400:
            exchange.refuse(status, {404: "NotFound", 409: "Conflict", 422: "Invalid"}[status])
            return
        self.writes.append((request.method, request.path, body))
        if request.method == "DELETE":
            self.remove(collection, name)
            answer: Object = {"kind": "Status", "status": "Success"}
        else:
            assert found is not None
            answer = self.put(collection, found)
        if self.loses_answers:
            exchange.cut()
        else:
            exchange.answer(status, answer)


class _Watcher:
    """One who is told of changes of a collection, of the objects with some labels."""

    def __init__(self, collection: str, labels: str) -> None:
        self.collection = collection
        self.labels = labels
        self.queue: asyncio.Queue[tuple[str, Object]] = asyncio.Queue()

    def tell(self, collection: str, kind: str, found: Object) -> None:
        if collection.startswith(self.collection) and _has(found, self.labels):
            self.queue.put_nowait((kind, found))


def _has(found: Object, labels: str) -> bool:
    """Whether an object is one of those that a label selector chooses."""
    there = found["metadata"].get("labels") or {}
    wanted = (one.partition("=") for one in labels.split(",") if one)
    return all(there.get(name) == value if sign else name in there for name, sign, value in wanted)


def _version(found: Object) -> str:
    return str(found["metadata"].get("resourceVersion"))


def _merged(known: Any, patch: Any) -> Any:
    """What a merge patch makes of something."""
    if not isinstance(patch, dict):
        return patch
    found = dict(known) if isinstance(known, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = _merged(found.get(key), value)
    return found


def _patched(known: Object, operations: list[Object] | Object, part: list[str]) -> Object | None:
    """What a patch makes of an object; `None` when a test of it fails."""
    found = copy.deepcopy(known)
    if isinstance(operations, dict):
        merged: Object = _merged(found, operations)
        return merged
    for operation in operations:
        *path, last = operation["path"].strip("/").split("/")
        at = found
        for step in path:
            at = at[step]
        if operation["op"] == "test" and at.get(last) != operation["value"]:
            return None
        if operation["op"] == "add":
            at[last] = operation["value"]
    if part:  # of a subresource, only that part is taken
        return {**known, part[0]: found[part[0]]}
    return {**found, "status": known["status"]} if "status" in known else found
