"""Sessions with the local service of the user, which is started when there is none."""

from __future__ import annotations

from pathlib import Path

from kubetorch.lib.http_client import HttpClient
from kubetorch.local import lifetime
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.transport.session import Session
from kubetorch.sdk.tuning import TIMING


def open_session(home: Path) -> Session:
    def connect() -> Controller:
        service = lifetime.ensure(home)
        return Controller(HttpClient(service.url, service.token, hint="kt local status"))

    return Session(connect, patience=TIMING.ending_service_seconds)
