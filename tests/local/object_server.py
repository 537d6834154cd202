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
        answers_late: Whether watches hear of a write before who wrote it does.
    """

    def __init__(self, *kinds: tuple[str, str, str]) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.writes: list[tuple[str, str, Any]] = []
        self.refusals: list[tuple[int, str]] = []
        self.is_away = False
        self.loses_answers = self.answers_late = False
        self._kinds = kinds
        self._versions = itertools.count(1)
        self._watchers: set[_Watcher] = set()
        #: All that happened, for watches that begin at an earlier version.
        self._changes: list[tuple[str, str, Object]] = []

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

    def put(self, collection: str, manifest: Object) -> Object:
        """Somebody else writes an object."""
        key = (collection, manifest["metadata"]["name"])
        kind = "MODIFIED" if key in self.objects else "ADDED"
        metadata = {**manifest["metadata"], "resourceVersion": str(next(self._versions))}
        metadata.setdefault("uid", f"uid-{metadata['resourceVersion']}")
        metadata.setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
        self.objects[key] = {**copy.deepcopy(manifest), "metadata": metadata}
        self._publish(collection, kind, self.objects[key])
        return self.objects[key]

    def remove(self, collection: str, name: str) -> None:
        """Somebody else deletes an object."""
        removed = self.objects.pop((collection, name))
        removed["metadata"]["resourceVersion"] = str(next(self._versions))
        self._publish(collection, "DELETED", removed)

    def go_away(self) -> None:
        """Cut all watches and requests, until `is_away` is false again."""
        self.is_away = True
        for watcher in self._watchers:
            watcher.queue.put_nowait(("CUT", {}))

    def names(self) -> list[str]:
        return [name for _, name in self.objects]

    def _publish(self, collection: str, kind: str, changed: Object) -> None:
        change = (collection, kind, copy.deepcopy(changed))
        self._changes.append(change)
        for watcher in self._watchers:
            watcher.notify(*change)

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
            stored = self.objects.get((collection, names[0]))
            exchange.answer(200, stored) if stored else exchange.refuse(404, "NotFound")
            return
        if "watch" in exchange.request.query:
            await self._watch(exchange, collection)
            return
        chosen = exchange.request.query.get("labelSelector", "")
        items = [
            stored
            for (where, _), stored in self.objects.items()
            if where.startswith(collection) and _has(stored, chosen)
        ]
        metadata = {"resourceVersion": str(next(self._versions))}
        exchange.answer(200, {"kind": "List", "metadata": metadata, "items": items})

    async def _watch(self, exchange: Exchange, collection: str) -> None:
        chosen = exchange.request.query.get("labelSelector", "")
        watcher = _Watcher(collection, chosen)
        begun = int(exchange.request.query.get("resourceVersion", "0"))
        for change in self._changes:
            if int(_version(change[2])) > begun:
                watcher.notify(*change)
        self._watchers.add(watcher)
        try:
            await exchange.say()
            while True:
                kind, changed = await watcher.queue.get()
                if self.is_away:
                    exchange.cut()
                    return
                await exchange.say({"type": kind, "object": changed})
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
        stored = self.objects.get((collection, name))
        if request.method == "POST":
            status, updated = (409, None) if stored else (201, body)
        elif stored is None:
            status, updated = 404, None
        elif request.method == "DELETE":
            status, updated = 200, None
            if (body.get("preconditions") or {}).get("uid", stored["metadata"]["uid"]) != stored[
                "metadata"
            ]["uid"]:
                status = 409
        elif request.method == "PUT":
            is_current = _version(body) == _version(stored)
            status, updated = (200, body) if is_current else (409, None)
        else:
            updated = _patched(stored, body, names[1:])
            status = 200 if updated else 422
        if status >= 400:
            exchange.refuse(status, {404: "NotFound", 409: "Conflict", 422: "Invalid"}[status])
            return
        self.writes.append((request.method, request.path, body))
        if request.method == "DELETE":
            self.remove(collection, name)
            answer: Object = {"kind": "Status", "status": "Success"}
        else:
            assert updated is not None
            answer = self.put(collection, updated)
        if self.loses_answers:
            exchange.cut()
        elif self.answers_late:
            asyncio.get_running_loop().call_later(0.05, exchange.answer, status, answer)
        else:
            exchange.answer(status, answer)


class _Watcher:
    """One who is told of changes of a collection, of the objects with some labels."""

    def __init__(self, collection: str, labels: str) -> None:
        self.collection = collection
        self.labels = labels
        self.queue: asyncio.Queue[tuple[str, Object]] = asyncio.Queue()

    def notify(self, collection: str, kind: str, changed: Object) -> None:
        if collection.startswith(self.collection) and _has(changed, self.labels):
            self.queue.put_nowait((kind, changed))


def _has(stored: Object, labels: str) -> bool:
    """Whether an object is one of those that a label selector chooses."""
    own_labels = stored["metadata"].get("labels") or {}
    selector_terms = (term.partition("=") for term in labels.split(",") if term)
    return all(
        own_labels.get(name) == value if sign else name in own_labels
        for name, sign, value in selector_terms
    )


def _version(stored: Object) -> str:
    return str(stored["metadata"].get("resourceVersion"))


def _merged(stored: Any, patch: Any) -> Any:
    """What a merge patch makes of something."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(stored) if isinstance(stored, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value)
    return merged


def _patched(stored: Object, operations: list[Object] | Object, part: list[str]) -> Object | None:
    """What a patch makes of an object; `None` when a test of it fails."""
    patched = copy.deepcopy(stored)
    if isinstance(operations, dict):
        merged: Object = _merged(patched, operations)
        return merged
    for operation in operations:
        *path, last = operation["path"].strip("/").split("/")
        node = patched
        for step in path:
            node = node[step]
        if operation["op"] == "test" and node.get(last) != operation["value"]:
            return None
        if operation["op"] == "add":
            node[last] = operation["value"]
    if part:  # of a subresource, only that part is taken
        return {**stored, part[0]: patched[part[0]]}
    return {**patched, "status": stored["status"]} if "status" in stored else patched
