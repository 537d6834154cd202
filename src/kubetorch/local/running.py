"""The running service: builds the controller, serves, and stops."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal

import uvloop

from kubetorch.controller.access import LocalAccess
from kubetorch.controller.backends.attaching import Attaching
from kubetorch.controller.backends.process import ProcessBackend
from kubetorch.controller.backends.secret_files import SecretFiles
from kubetorch.controller.backends.site import Site
from kubetorch.controller.backends.volume_folders import VolumeFolders
from kubetorch.controller.controller import Controller
from kubetorch.controller.depots import Depots
from kubetorch.controller.state import Kept, SqliteState
from kubetorch.errors import KubetorchError
from kubetorch.lib import descriptors
from kubetorch.lib.clock import SystemClock
from kubetorch.local import commands, environment
from kubetorch.local.service import Begun
from kubetorch.wire import tokens

_log = logging.getLogger(__name__)


def run(begun: Begun) -> int:
    """Serve until somebody says stop, or nobody needs it; the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    descriptors.raise_limit()
    # What is here now stays: the collector need not look at it again.
    gc.freeze()
    gc.enable()
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(_Service(begun).run())
    except (KubetorchError, OSError):
        _log.exception("service failed")
        return 1
    finally:
        begun.place.service.unlink(missing_ok=True)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
    return 0


class _Service:
    """The service, from its start to its end."""

    def __init__(self, begun: Begun) -> None:
        self._begun = begun
        self._stopped: asyncio.Future[bool] | None = None
        self._idle_limit = environment.idle_seconds(begun.environ)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._stopped = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, False)
        state = SqliteState(self._begun.place.state, self._begun.database)
        controller = self._build(state)
        await controller.start(self._begun.listener)
        self._watch_idle(controller)
        pods = await self._stopped
        # First: whoever looks for a service from now on starts a new one.
        self._begun.place.service.unlink(missing_ok=True)
        _log.info("service stops pods=%s", pods)
        await controller.close(pods=pods)
        state.close()

    def _build(self, state: SqliteState) -> Controller:
        begun, clock = self._begun, SystemClock()
        user = tokens.fingerprint(begun.token)
        site = Site(
            home=begun.place.path,
            secret=begun.secret,
            user=user,
            environment={**begun.environ, commands.HOME: str(begun.place.path)},
            command=begun.agents.command,
            marks=commands.marks(str(begun.place.path)),
        )
        secrets = SecretFiles(begun.place.secrets, clock.time)
        volumes = VolumeFolders(begun.place.volumes, clock.time)
        backend = ProcessBackend(
            site,
            state,
            attaching=Attaching(secrets, volumes),
            clock=clock,
            spare_command=begun.agents.spare,
            first=begun.agents.first,
        )
        return Controller(
            backend=backend,
            state=Kept(state, state),
            depots=Depots(begun.place.blobs, is_shared=True),
            clock=clock,
            secret=begun.secret,
            new_access=lambda workloads: LocalAccess(
                user=user, secret=begun.secret, clock=clock.time, is_known=workloads.is_pod
            ),
            stop=self._stop,
        )

    def _stop(self, pods: bool) -> None:
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(pods)

    def _watch_idle(self, controller: Controller) -> None:
        left = self._idle_limit - controller.idle_seconds()
        if left <= 0:
            self._stop(True)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(left, self._watch_idle, controller)
