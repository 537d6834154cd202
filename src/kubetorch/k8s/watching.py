"""The known objects of a selection, and the next request: a state machine without I/O.

       list ──(on_list)──► watch ──(on_event: ADDED, MODIFIED, DELETED, BOOKMARK)──► …
       ▲                      │  ▲
       │                      │  └──(on_end, on_failure: resume at the last version, after a pause)
       └──(410: forgotten)────┘

A list after a gap is compared with the known objects, so an object that was deleted during the gap
is reported as deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kubetorch.errors import KubernetesRequestError, KubetorchError
from kubetorch.k8s import failures
from kubetorch.k8s.resources import Object, key, version
from kubetorch.k8s.tuning import TIMING
from kubetorch.lib import backoff

ADDED, MODIFIED, DELETED = "added", "modified", "deleted"

Key = tuple[str, str]


@dataclass(frozen=True)
class Change:
    kind: str
    object: Object
    previous: Object | None = None


class WatchState:
    def __init__(self, action: failures.Action) -> None:
        #: The known objects.
        self.objects: dict[Key, Object] = {}
        #: True once all objects were listed.
        self.is_listed = False
        #: Seconds to wait before the next request.
        self.pause = 0.0
        self._action = action
        #: The version to watch from; empty when all objects have to be listed.
        self.version = ""
        #: True while the present watch has sent no event.
        self._is_silent = True
        #: The pauses after further failures; `None` after a success.
        self._pauses: Iterator[float] | None = None

    def on_list(self, items: list[Object], resource_version: str) -> list[Change]:
        """Take the list of all objects, as of a version; return the changes."""
        changes = [change for item in items for change in self._put(item)]
        present = {key(item) for item in items}
        deleted_keys = [known_key for known_key in self.objects if known_key not in present]
        changes += [Change(DELETED, old, old) for old in map(self.objects.pop, deleted_keys)]
        self.version = resource_version
        self._is_silent = True
        self.is_listed = True
        self._reset_pause()
        return changes

    def on_event(self, event: Mapping[str, Any]) -> list[Change]:
        """Take an event of the watch; return the changes."""
        kind, item = event.get("type"), event.get("object")
        if kind == "ERROR" and isinstance(item, dict):
            raise failures.refused_by(self._action, item)
        if not isinstance(item, dict) or not version(item):
            raise failures.garbled(self._action, "the API server", f"{event!r:.80}")
        self.version = version(item)
        self._is_silent = False
        if kind == "BOOKMARK":
            return []
        if kind == "DELETED":
            previous = self.objects.pop(key(item), None)
            return [] if previous is None else [Change(DELETED, item, previous)]
        return self._put(item)

    def on_end(self, seconds: float) -> None:
        """The server ended the watch after so many seconds, as it does with each watch."""
        if self._is_silent and seconds >= TIMING.silent_watch_seconds:
            self.version = ""
        self._is_silent = True
        if seconds >= TIMING.healthy_watch_seconds:
            self._reset_pause()
        else:
            self._lengthen_pause(None)

    def on_failure(self, error: KubetorchError, seconds: float = 0.0) -> None:
        self._is_silent = True
        if seconds >= TIMING.healthy_watch_seconds:
            self._reset_pause()
        refused = error if isinstance(error, KubernetesRequestError) else None
        if refused is not None and _is_forgotten(refused):
            self.version = ""
        self._lengthen_pause(refused.retry_after if refused is not None else None)

    def _put(self, item: Object) -> list[Change]:
        previous = self.objects.get(key(item))
        if previous is not None and version(previous) == version(item):
            return []
        item["metadata"].pop("managedFields", None)
        self.objects[key(item)] = item
        return [Change(ADDED if previous is None else MODIFIED, item, previous)]

    def _reset_pause(self) -> None:
        self.pause = 0.0
        self._pauses = None

    def _lengthen_pause(self, retry_after: float | None) -> None:
        if self._pauses is None:
            delays = backoff.exponential(
                first=TIMING.watch_first_delay_seconds, limit=TIMING.watch_longest_delay_seconds
            )
            self._pauses = backoff.jittered(delays)
        self.pause = max(next(self._pauses), retry_after or 0.0)


def _is_forgotten(error: KubernetesRequestError) -> bool:
    """True if the server has forgotten the version, or never had it (etcd was restored)."""
    never_was = any(cause["reason"] == "ResourceVersionTooLarge" for cause in error.causes)
    return error.status_code == 410 or error.reason in ("Expired", "Gone") or never_was
