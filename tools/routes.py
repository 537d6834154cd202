"""The tables of `docs/security.md`: which routes there are, and who may ask each of them.

python tools/routes.py           # says whether the page is what the code says
python tools/routes.py --write   # makes it so
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from kubetorch.controller.routes import openapi
from kubetorch.controller.routes.blobs import BlobRoutes
from kubetorch.controller.routes.calls import CallRoutes
from kubetorch.controller.routes.secrets import SecretRoutes
from kubetorch.controller.routes.service import ServiceRoutes
from kubetorch.controller.routes.table import Route
from kubetorch.controller.routes.volumes import VolumeRoutes
from kubetorch.controller.routes.workloads import WorkloadRoutes
from kubetorch.pod.http.table import TABLE
from kubetorch.wire import routes

PAGE = Path(__file__).parents[1] / "docs/security.md"
_GROUPS = (ServiceRoutes, WorkloadRoutes, BlobRoutes, CallRoutes, SecretRoutes, VolumeRoutes)
_BEGIN, _END = "<!-- {}: tools/routes.py -->", "<!-- end of {} -->"


def of_controller() -> list[Route]:
    """All routes of the controller, with handlers that work on nothing."""
    return [route for group in _GROUPS for route in group.routes(object.__new__(group))]


def controller() -> str:
    """The table of the controller."""
    rows = [("Route", "Does", "Users need", "Pods", "Audited")]
    for route in of_controller():
        if route.audience == "anybody":
            who = "nothing, not even a token"
        elif route.is_local:
            who = "only the local service has it"
        else:
            who = "; ".join(openapi.needed(route.needs)) or "a valid token"
        pods = "yes" if route.audience == "pods" else ""
        audited = "yes" if route.is_audited else ""
        rows.append((f"`{route.method} {route.path}`", openapi.about(route), who, pods, audited))
    sessions = "a pod's session: reloads, and what it reports"
    rows.append((f"`WebSocket {routes.SESSIONS}`", sessions, "nobody", "yes", ""))
    relayed = "passed on to a pod of the service, whose agent decides (below)"
    rows.append(("`any /{namespace}/{service}/…`", relayed, "a token for the service", "", ""))
    return _table(rows)


def agent() -> str:
    """The table of the agent."""
    rows = [("Route", "Does", "The token must open")]
    for route in TABLE:
        verbs = " or ".join(f"`{verb}`" for verb in route.opens)
        opens = "nothing, not even a token" if route.is_open else verbs or "anything"
        rows.append((f"`{route.method} {route.path}`", route.about, opens))
    return _table(rows)


def filled(text: str) -> str:
    """A page with the tables in it."""
    for name, table in (("controller", controller()), ("agent", agent())):
        begin, end = _BEGIN.format(name), _END.format(name)
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    return text


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    head, *others = rows
    lines = [head, tuple("---" for _ in head), *others]
    return "\n".join("| " + " | ".join(cell or " " for cell in line) + " |" for line in lines)


def main(arguments: list[str]) -> int:
    """Check the page, or write it; the exit status."""
    text = PAGE.read_text(encoding="utf-8")
    wanted = filled(text)
    if "--write" in arguments:
        PAGE.write_text(wanted, encoding="utf-8")
    elif wanted != text:
        sys.stderr.write(f"{PAGE} is not what the code says: python tools/routes.py --write\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
