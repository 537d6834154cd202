"""The lists of `docs/security.md`: all routes, and the rights that each of them needs.

python tools/routes.py           # fails if the page differs from the code
python tools/routes.py --write   # writes the page
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from kubetorch.controller.routes import status
from kubetorch.controller.routes.blobs import BlobRoutes
from kubetorch.controller.routes.calls import CallRoutes
from kubetorch.controller.routes.data import CONTACT_ROUTE, BucketRoutes, DataRoutes
from kubetorch.controller.routes.status import ServiceRoutes
from kubetorch.controller.routes.stores import SecretRoutes, VolumeRoutes
from kubetorch.controller.routes.table import Route
from kubetorch.controller.routes.workloads import WorkloadRoutes
from kubetorch.controller.store_relay import StoreRelay
from kubetorch.pod.http.app import TABLE
from kubetorch.wire import routes

#: Of a line in the page.
WIDTH = 110
PAGE = Path(__file__).parents[1] / "docs/security.md"
_GROUPS = (
    ServiceRoutes,
    WorkloadRoutes,
    BlobRoutes,
    DataRoutes,
    BucketRoutes,
    CallRoutes,
    SecretRoutes,
    VolumeRoutes,
)
_BEGIN, _END = "<!-- {}: tools/routes.py -->", "<!-- end of {} -->"


def of_controller() -> list[Route]:
    """All routes of the controller, with handlers that work on nothing."""
    all_routes: list[Route] = []
    for group in _GROUPS:
        handlers = object.__new__(group)
        if isinstance(handlers, DataRoutes | BucketRoutes):
            all_routes += [route.handled_by(handler) for route, handler in handlers.handlers()]
        else:
            all_routes += handlers.routes()
    return [*all_routes, CONTACT_ROUTE.handled_by(StoreRelay.contact)]


def controller() -> str:
    """The list of the controller's routes."""
    items = []
    for route in of_controller():
        if route.audience == "anybody":
            rights = "nothing, not even a token"
        elif route.is_local:
            rights = "only the local service has this route"
        else:
            rights = "; ".join(status.needed(route.needs)) or "a valid token"
        items.append(
            _item(
                f"{route.method} {route.path}",
                status.summary_of(route),
                users=rights,
                is_for_pods=route.audience == "pods",
                is_audited=route.is_audited,
            )
        )
    sessions = "a pod's session: reloads, and what the pod reports"
    items.append(_item(f"WebSocket {routes.SESSIONS}", sessions, users="nobody", is_for_pods=True))
    relayed = "passed on to a pod of the service, whose agent decides (below)"
    items.append(_item("any /{namespace}/{service}/…", relayed, users="a token for the service"))
    return "\n".join(items)


def _item(
    route: str, about: str, *, users: str, is_for_pods: bool = False, is_audited: bool = False
) -> str:
    pods = " Pods may use this route." if is_for_pods else ""
    audited = " Audited." if is_audited else ""
    text = f"{about}. *Users need:* {users}.{pods}{audited}"
    lines = textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join((f"- `{route}`:", *(f"  {line}" for line in lines)))


def agent() -> str:
    """The table of the agent."""
    rows = [("Route", "Does", "The token must open")]
    for route in TABLE:
        verbs = " or ".join(f"`{verb}`" for verb in route.opens)
        opens = "nothing, not even a token" if route.is_open else verbs or "anything"
        rows.append((f"`{route.method} {route.path}`", route.about, opens))
    return _table(rows)


def filled(text: str) -> str:
    """A page with the lists in it."""
    for name, routes_of in (("controller", controller()), ("agent", agent())):
        begin, end = _BEGIN.format(name), _END.format(name)
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n\n{routes_of}\n\n{end}{after}"
    return text


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    head, *body = rows
    lines = [head, tuple("---" for _ in head), *body]
    return "\n".join("| " + " | ".join(cell or " " for cell in line) + " |" for line in lines)


def main(arguments: list[str]) -> int:
    """Check the page, or write it; the exit status."""
    text = PAGE.read_text(encoding="utf-8")
    filled_text = filled(text)
    if "--write" in arguments:
        PAGE.write_text(filled_text, encoding="utf-8")
    elif filled_text != text:
        sys.stderr.write(f"{PAGE} is not what the code says: python tools/routes.py --write\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
