"""The audit log: one line of JSON for each request that changes something, or shows a secret.

It is written when it is decided what the request comes to, before the answer goes out. It has
neither tokens nor values: nothing of a request's body, and of its query nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from datetime import datetime, timezone

from kubetorch.controller.access import Principal, User, name_of
from kubetorch.controller.exchange import Exchange
from kubetorch.controller.routes.table import Route

#: Groups of a user that are named in a line.
GROUPS = 20

_log = logging.getLogger("kubetorch.audit")
_NAMES = ("name", "claim", "call_id")


class Audit:
    """Writes the lines.

    Args:
        clock: Seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def write(
        self,
        exchange: Exchange,
        route: Route,
        parameters: Mapping[str, str],
        principal: Principal | None,
        status: int,
    ) -> None:
        """Write the line of one request.

        Args:
            exchange: The request.
            route: Where it goes.
            parameters: Those of its path.
            principal: Who sends it, once that is known.
            status: HTTP status of the answer.
        """
        needs = [need.verb for need in route.needs] or [route.method.lower()]
        subresources = [need.subresource for need in route.needs if need.subresource]
        named = next((parameters[key] for key in _NAMES if key in parameters), "")
        line = {
            "time": datetime.fromtimestamp(self._clock(), timezone.utc).isoformat(),
            "user": None if principal is None else name_of(principal),
            "groups": list(principal.groups[:GROUPS]) if isinstance(principal, User) else [],
            "verb": "+".join(dict.fromkeys(needs)),
            "subresource": "+".join(dict.fromkeys(subresources)),
            "namespace": parameters.get("namespace") or exchange.query("namespace"),
            "name": named,
            "method": exchange.method,
            "path": exchange.path[:500],
            "outcome": _outcome(status),
            "status": status,
            "request_id": exchange.request_id,
            "source": exchange.source,
        }
        _log.info(json.dumps(line, ensure_ascii=True))


def _outcome(status: int) -> str:
    if status < 400:
        return "allowed"
    if status in (401, 403):
        return "refused"
    return "failed"
