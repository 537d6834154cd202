"""The way of blobs from a pod to a store of its own, past the controller.

Outside of pods there is only the controller, which relays. So does it for a pod that does not reach
the store, for example because of a NetworkPolicy.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from kubetorch.config import environment
from kubetorch.errors import KubetorchError
from kubetorch.lib.http_client import HttpClient
from kubetorch.sdk.tuning import TIMING
from kubetorch.wire import messages, routes
from kubetorch.wire.data import StoreContact

if TYPE_CHECKING:
    from kubetorch.sdk.controller import Controller


class _Way(NamedTuple):
    """How blobs go until a moment, in seconds since the epoch; `None`: through the controller."""

    store: HttpClient | None
    end: float


_lock = threading.Lock()
#: By controller and namespace.
_ways: dict[tuple[str, str], _Way] = {}


def find(controller: Controller, namespace: str) -> HttpClient | None:
    """A client of the store; `None` where blobs go through the controller."""
    if not environment.is_in_pod():
        return None
    key = controller.base_url, namespace
    with _lock:
        way = _ways.get(key)
        if way is None or way.end <= time.time():
            way = _ways[key] = _new_way(controller, namespace)
        return way.store


def forget(controller: Controller, namespace: str) -> None:
    """Ask the controller again: the store refuses its token."""
    with _lock:
        way = _ways.pop((controller.base_url, namespace), None)
    if way is not None and way.store is not None:
        way.store.close()


def _new_way(controller: Controller, namespace: str) -> _Way:
    path, patience = routes.data(namespace, "contact"), TIMING.source_answer_seconds
    end = time.time() + TIMING.store_way_seconds
    try:
        contact = messages.decode(StoreContact, controller.ask("POST", path, timeout=patience))
        if not contact.url:
            return _Way(None, end)
        store = HttpClient(contact.url, contact.token)
        with store.request("GET", routes.HEALTH, timeout=TIMING.store_probe_seconds) as answer:
            answer.read()
    except KubetorchError:
        return _Way(None, time.time() + TIMING.store_retry_seconds)
    return _Way(store, min(end, contact.expires - TIMING.store_token_margin_seconds))
