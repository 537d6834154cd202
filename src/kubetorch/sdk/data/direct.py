"""Tensors of a window straight from the process of the putter to those of its getters.

    put ── stores the version ── window ── Source.send ──┐ frames
    get ───────────────────────── window ── Sink.meet ── Sink.fill ── digests ── destination

The version is in the store by then, so whatever fails here ends in a get from the store, and a line
that says why. Nothing here waits for long, and no destination is written before all bytes have come
and are right.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from msgspec.structs import replace

from kubetorch.config import environment
from kubetorch.datastore import keys
from kubetorch.datastore.tensors import Array, Contents, Destination, TensorFile, flatten
from kubetorch.datastore.transports import cuda_ipc, frames, plans, rendezvous
from kubetorch.datastore.transports.cuda_ipc import CudaIpc
from kubetorch.datastore.transports.frames import Staging
from kubetorch.datastore.transports.plans import Plan
from kubetorch.datastore.transports.process_group import ProcessGroups
from kubetorch.datastore.transports.rendezvous import Link
from kubetorch.datastore.transports.transport import FAILURES, Device, Transfer, Transport
from kubetorch.datastore.tuning import TIMING as STORE_TIMING
from kubetorch.datastore.weights import StoredTensors
from kubetorch.errors import DataStoreError, KubetorchError
from kubetorch.lib import terminal
from kubetorch.sdk.data.tensor_cache import store_here
from kubetorch.sdk.data.windows import Members
from kubetorch.sdk.transport.session import Session
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.wire.transports import Greeting, Offer, Ready, Start, Taken


class Version(NamedTuple):
    """What a put has stored.

    Attributes:
        manifest: The digest of its manifest.
        file: The tensors of the putter.
    """

    key: str
    manifest: str
    file: TensorFile


class _Process:
    """What this process remembers from window to window."""

    def __init__(self) -> None:
        self.groups = ProcessGroups()
        #: Until then it offers to get tensors from no process.
        self.pause_end = 0.0


_PROCESS = _Process()


class Source:
    """Passes the tensors of a put to the getters of its window.

    Attributes:
        offer: `None` where the store is as good: for few bytes, for arrays of NumPy, for tensors on
            several devices, and on CPUs if the store is a folder of this machine.
    """

    offer: Offer | None = None

    def __init__(self, session: Session, version: Version, *, is_packed: bool) -> None:
        self._version = version
        self._is_packed = is_packed
        self._listener: socket.socket | None = None
        if version.file.size < LIMITS.joined_get_bytes:
            return
        with contextlib.suppress(*FAILURES):
            offer = _offer(session, version.key, _device(version.file.arrays.values()))
            if offer is None:
                return
            family = socket.AF_INET6 if ":" in offer.address else socket.AF_INET
            self._listener = socket.create_server((offer.address, 0), family=family)
            port = self._listener.getsockname()[1]
            self._host = offer.address
            self.offer = replace(
                offer,
                manifest=version.manifest,
                address=f"{offer.address}:{port}",
                token=secrets.token_urlsafe(),
            )

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        if self._listener is not None:
            self._listener.close()

    def send(self, members: Members) -> None:
        """Pass the tensors on, as far as it can be done; the others are in the store."""
        plan = plans.plan(members.offers, self._version.key)
        if plan is None or plan.putter != members.participant or not plan.getters:
            return
        links: dict[str, Link] = {}
        try:
            assert self._listener is not None
            links = rendezvous.gather(self._listener, plan.offer.token, plan.getters)
            self._send(plan, links)
        except FAILURES as error:
            _say(self._version.key, "getters get it from the store", error)
        finally:
            for link in links.values():
                link.close()

    def _send(self, plan: Plan, links: Mapping[str, Link]) -> None:
        grouped = [links[name] for name in plan.grouped if name in links]
        sharing = [links[name] for name in plan.sharing if name in links]
        transfers = []
        group = None
        if sharing:
            _start(sharing, [Start(transport="cuda_ipc")] * len(sharing), self._is_packed)
            transfers.append(self._transfer(CudaIpc(sharing)))
        if grouped:
            kind = _kind(_device(self._version.file.arrays.values()))
            group, starts = _PROCESS.groups.for_getters(kind, grouped, self._host)
            _start(grouped, starts, self._is_packed)
            transfers.append(self._transfer(group))
        try:
            for transfer in transfers:
                transfer.wait(grouped)
            rendezvous.await_taken(links.values())
        except BaseException:
            if group is not None:
                group.abort()
            raise
        if group is not None:
            _PROCESS.groups.put(group)

    def _transfer(self, transport: Transport) -> Transfer:
        file = self._version.file
        spans = frames.spans(file.header, is_packed=self._is_packed)
        return Transfer(transport.send(frames.outgoing(file, spans)))


class Sink:
    """Takes the tensors of a get from the process that puts them in the same window.

    Args:
        dest: The destination of the get; without it the tensors will be those of a CPU.
        only: Patterns of a part of the tensors, which comes from the store.

    Attributes:
        offer: As that of `Source`.
    """

    def __init__(self, session: Session, key: str, dest: object, only: Sequence[str]) -> None:
        self._session = session
        self._key = key
        self._dest = dest
        self._is_part = bool(only)
        self._plan: Plan | None = None
        self._link: Link | None = None

    @cached_property
    def offer(self) -> Offer | None:
        if self._is_part or time.monotonic() < _PROCESS.pause_end:
            return None
        with contextlib.suppress(*FAILURES):
            offer = _offer(self._session, keys.check(self._key), self._device)
            return None if offer is None else replace(offer, address="")
        return None

    @cached_property
    def _device(self) -> Device | None:
        return _cpu() if self._dest is None else _device(flatten(self._dest).arrays.values())

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_: object) -> None:
        if self._link is not None:
            self._link.close()

    def meet(self, members: Members) -> None:
        """Connect with the putter, if there is one that passes its tensors on."""
        if self.offer is None:
            return
        plan = plans.plan(members.offers, self.offer.key)
        if plan is None:
            return
        try:
            if members.participant in plan.refused:
                raise DataStoreError("another process has the same GPU")
            if members.participant in plan.getters:
                self._plan = plan
                self._link = rendezvous.connect(plan.offer.address)
                names = _PROCESS.groups.names(_kind(self._device))
                self._link.send(Greeting(plan.offer.token, members.participant, tuple(names)))
        except TimeoutError as error:
            _PROCESS.pause_end = time.monotonic() + TIMING.unanswered_offer_seconds
            self._give_up(error)
        except FAILURES as error:
            self._give_up(error)

    def fill(
        self,
        manifest: str,
        stored: StoredTensors,
        contents: Contents,
        destination: Destination,
    ) -> bool:
        """Fill a destination; returns whether it is filled, or has to be from the store."""
        if self._link is None or self._plan is None:
            return False
        try:
            if manifest != self._plan.offer.manifest:
                raise DataStoreError("a newer version was put meanwhile")
            staging = self._received(self._link, stored)
            staging.check()
            staging.fill(destination, contents)
        except FAILURES as error:
            self._give_up(error)
            return False
        return True

    def _received(self, link: Link, stored: StoredTensors) -> Staging:
        staging = Staging(stored, self._device)
        link.send(Ready())
        start = link.receive(Start, 2 * STORE_TIMING.rendezvous_seconds)
        incoming = staging.frames(is_packed=start.is_packed)
        if start.transport == "cuda_ipc":
            Transfer(CudaIpc([link]).receive(incoming)).wait()
        else:
            kind = _kind(self._device)
            if start.transport != kind[0]:
                raise DataStoreError(f"the putter sends by {start.transport[:80]}")
            group = _PROCESS.groups.for_putter(kind, start, link.own_host)
            try:
                Transfer(group.receive(incoming)).wait([link])
            except BaseException:
                group.abort()
                raise
            _PROCESS.groups.put(group)
        link.send(Taken())
        return staging

    def _give_up(self, error: BaseException) -> None:
        _say(self._key, "it comes from the store", error)
        if self._link is not None:
            self._link.close()
            self._link = None


def _say(key: str, consequence: str, error: BaseException) -> None:
    reason = error.message if isinstance(error, KubetorchError) else f"{error!r:.300}"
    terminal.say(f"{key!r} does not go from process to process, {consequence}: {reason}")


def _start(links: Sequence[Link], starts: Sequence[Start], is_packed: bool) -> None:
    for link, start in zip(links, starts, strict=True):
        link.send(replace(start, is_packed=is_packed))


def _cpu() -> Device | None:
    """The CPU as torch has it, if this program has torch."""
    torch = sys.modules.get("torch")
    return None if torch is None else torch.device("cpu")


def _device(arrays: Iterable[Array]) -> Device | None:
    """The device that has all of these tensors; `None` if there are several, or none of torch."""
    devices = {getattr(array, "device", None) for array in arrays if _cpu() is not None}
    device = devices.pop() if len(devices) == 1 else None
    return device if getattr(device, "type", None) in ("cpu", "cuda") else None


def _kind(device: Device) -> tuple[str, str]:
    """The backend of a process group for a device, and the device."""
    return ("nccl" if device.type == "cuda" else "gloo", str(device))


def _offer(session: Session, key: str, device: Device | None) -> Offer | None:
    """What a process can do with tensors on a device; its address is that of this process."""
    address = environment.pod_ip() or ("127.0.0.1" if session.is_local else "")
    if device is None or not address or (device.type == "cpu" and store_here(session) is not None):
        return None
    offer = Offer(key=key, device=device.type, address=address)
    if device.type == "cpu":
        return offer
    return replace(
        offer,
        device_id=cuda_ipc.device_id(device.index),
        readable_ids=cuda_ipc.readable_ids(device.index),
        host=cuda_ipc.host(),
    )
