"""The connection of a pod to a data store of its own, past the controller.

Outside of pods there is only the controller, which relays. So does it for a pod that does not reach
the store, for example because of a NetworkPolicy.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from kubetorch.config import environment
from kubetorch.errors import KubetorchError, StoreUnavailableError
from kubetorch.lib.http_client import HttpClient
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.wire import messages, routes
from kubetorch.wire.data import StoreContact

if TYPE_CHECKING:
    from kubetorch.sdk.controller import Controller


class _Connection(NamedTuple):
    """How blobs go until `end`, in seconds since the epoch; `None`: through the controller."""

    store: HttpClient | None
    end: float


#: By controller and namespace. Threads that connect at the same time ask twice: no lock is held
#: that a forked child could inherit.
_connections: dict[tuple[str, str], _Connection] = {}


def find(controller: Controller, namespace: str) -> HttpClient | None:
    """A client of the store; `None` where blobs go through the controller."""
    if not environment.is_in_pod():
        return None
    key = controller.base_url, namespace
    connection = _connections.get(key)
    if connection is None or connection.end <= time.time():
        forget(controller, namespace)
        connection = _connections[key] = _connect(controller, namespace)
    return connection.store


def avoid(controller: Controller, namespace: str) -> None:
    """Let blobs go through the controller for a while: the store does not answer, or refuses."""
    forget(controller, namespace)
    end = time.time() + TIMING.store_retry_seconds
    _connections[controller.base_url, namespace] = _Connection(None, end)


def forget(controller: Controller, namespace: str) -> None:
    """Ask the controller anew the next time; requests that are on their way go on."""
    connection = _connections.pop((controller.base_url, namespace), None)
    if connection is not None and connection.store is not None:
        connection.store.close()


def _connect(controller: Controller, namespace: str) -> _Connection:
    path, patience = routes.data(namespace, "contact"), TIMING.source_answer_seconds
    end = time.time() + TIMING.store_connection_seconds
    try:
        contact = messages.decode(StoreContact, controller.ask("POST", path, timeout=patience))
        if not contact.url:
            return _Connection(None, end)
        store = HttpClient(contact.url, contact.token)
        with store.request("GET", routes.HEALTH, timeout=TIMING.store_probe_seconds) as answer:
            if b"healthy" not in answer.read(
                LIMITS.metadata_bytes
            ):  # a store that does not lead yet
                raise StoreUnavailableError("the store does not lead yet")
    except (KubetorchError, ValueError):
        return _Connection(None, time.time() + TIMING.store_retry_seconds)
    return _Connection(store, min(end, contact.expires - TIMING.store_token_margin_seconds))
