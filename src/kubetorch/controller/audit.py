"""The audit log: one line of JSON for each request that changes something, or shows a secret.

A line is written when the status of the answer is decided, before it is sent. It has neither tokens
nor values: nothing of a request's body, and of its query only the namespace.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from datetime import datetime, timezone

from kubetorch.controller.access import Principal, User, name_of
from kubetorch.controller.routes.table import Exchange, Route
from kubetorch.controller.tuning import LIMITS

_log = logging.getLogger("kubetorch.audit")
_NAMES = ("name", "claim", "call_id")


class Audit:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._minute = 0
        self._strangers = 0

    def write(
        self,
        exchange: Exchange,
        route: Route,
        parameters: Mapping[str, str],
        principal: Principal | None,
        status: int,
    ) -> None:
        now = self._clock()
        if principal is None and not self._is_listed(int(now // 60)):
            return
        needs = [need.verb for need in route.needs] or [route.method.lower()]
        subresources = [need.subresource for need in route.needs if need.subresource]
        named = next((parameters[key] for key in _NAMES if key in parameters), "")
        outcome = "refused" if status in (401, 403) else "failed"
        line = {
            "time": datetime.fromtimestamp(now, timezone.utc).isoformat(),
            "user": None if principal is None else name_of(principal),
            "groups": list(principal.groups[: LIMITS.audited_groups])
            if isinstance(principal, User)
            else [],
            "verb": "+".join(dict.fromkeys(needs)),
            "subresource": "+".join(dict.fromkeys(subresources)),
            "namespace": parameters.get("namespace") or exchange.query("namespace"),
            "name": named,
            "method": exchange.method,
            "path": exchange.path[:500],
            "outcome": "allowed" if status < 400 else outcome,
            "status": status,
            "request_id": exchange.request_id,
            "source": exchange.source,
        }
        _log.info(json.dumps(line, ensure_ascii=True))

    def _is_listed(self, minute: int) -> bool:
        """True if one more request of a stranger has a line."""
        if minute != self._minute:
            if self._strangers > LIMITS.unidentified_lines:
                _log.info('{"left_out": %d}', self._strangers - LIMITS.unidentified_lines)
            self._minute, self._strangers = minute, 0
        self._strangers += 1
        return self._strangers <= LIMITS.unidentified_lines
