"""A proxy on the loopback address through which a library reaches public addresses alone.

    library ──► proxy ── name ──► addresses ── are they allowed? ──► exactly one of them

A library resolves names by itself and follows redirects, so a check of its URL says nothing about
where it connects. Through this proxy each connection is made to an address that was checked, also
after a redirect, and whatever a name resolves to a moment later. TLS stays between both ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import Iterable
from urllib.parse import urlsplit

from kubetorch.lib.deadlines import timeout
from kubetorch.lib.tasks import cancel_all
from kubetorch.lib.tuning import LIMITS, TIMING

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_HEAD_END = b"\r\n\r\n"
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
#: Global IPv6 addresses are in it; private, local and translated ones are outside.
_GLOBAL_IPV6 = ipaddress.ip_network("2000::/3")


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Networks from texts such as `10.0.0.0/8`; another text is a `ValueError`."""
    return tuple(ipaddress.ip_network(text) for text in texts)


#: What machines ask who they are, and get credentials from: reached in no case.
_METADATA = networks(["169.254.0.0/16", "168.63.129.16/32", "fe80::/10", "fd00:ec2::254/128"])
#: No public addresses, though some versions of Python say that they are.
_RESERVED = networks(
    [*("100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24"), *("2001:db8::/32", "3fff::/20")]
)


def is_allowed(address: str, allowed_networks: Iterable[Network] = ()) -> bool:
    """True for a public address, and for one in these networks that gives no credentials.

    An address that stands for another one, as `::ffff:127.0.0.1` does, is judged by the other one.
    """
    ip: IPAddress = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _NAT64:
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        else:
            ip = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else ip)
    if _is_in(ip, _METADATA):
        return False
    if _is_in(ip, allowed_networks):
        return True
    if isinstance(ip, ipaddress.IPv6Address) and ip not in _GLOBAL_IPV6:
        return False
    is_public = ip.is_global and not ip.is_multicast and not ip.is_reserved
    return is_public and not _is_in(ip, _RESERVED)


def _is_in(ip: IPAddress, among: Iterable[Network]) -> bool:
    return any(ip.version == network.version and ip in network for network in among)


class EgressProxy:
    """Serves in a thread of its own until it is closed.

    Attributes:
        url: For the library. Any process of this machine may use it, and gets no further than
            this one.
        refusals: The hosts that were refused, as they were asked for: what a name resolves to
            in the network of this process is not told.
    """

    def __init__(self, allowed_networks: Iterable[Network] = ()) -> None:
        self._networks = tuple(allowed_networks)
        self.refusals: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, name="kubetorch-egress", daemon=True)
        self._stop = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()

    def __enter__(self) -> EgressProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(TIMING.egress_close_seconds)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._accept, sock=self._listener, limit=LIMITS.egress_head_bytes
        )
        await self._stop.wait()
        server.close()
        await cancel_all(self._connections)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = self._loop.create_task(self._answer(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(
                OSError, EOFError, ValueError, TimeoutError, asyncio.LimitOverrunError
            ):
                async with timeout(TIMING.egress_connect_seconds):
                    head = await reader.readuntil(_HEAD_END)
                    streams = await self._connect(head, writer)
                if streams is not None:
                    await _join(reader, writer, *streams, is_tunnel=head.startswith(b"CONNECT "))
        finally:
            writer.close()

    async def _connect(
        self, head: bytes, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Connect to the target of a request; `None` if it is refused."""
        first, *lines = head.split(b"\r\n")
        method, target, _ = first.decode("ascii").split(" ")
        is_tunnel = method == "CONNECT"
        url = urlsplit(f"//{target}" if is_tunnel else target)
        host, port = url.hostname or "", url.port or 80
        addresses = await self._resolve(host, port)
        if not addresses:
            writer.write(
                b"HTTP/1.1 403 Forbidden\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            )
            return None
        streams = await _open(addresses, port)
        if is_tunnel:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            return streams
        path = url.path or "/"
        query = f"?{url.query}" if url.query else ""
        # One request on each connection: the next one may be for another host.
        first = f"{method} {path}{query} HTTP/1.1".encode()
        streams[1].write(_last(b"\r\n".join([first, *lines])))
        return streams

    async def _resolve(self, host: str, port: int) -> list[str]:
        """The addresses of a host; none if one of them is not allowed."""
        infos = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(info[4][0]) for info in infos]
        for address in addresses:
            if not is_allowed(address, self._networks):
                self.refusals.append(host)
                return []
        return addresses


async def _open(
    addresses: list[str], port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first address that answers."""
    for address in addresses[:-1]:
        with contextlib.suppress(OSError):
            return await asyncio.open_connection(address, port)
    return await asyncio.open_connection(addresses[-1], port)


def _last(head: bytes) -> bytes:
    """The head of a request or an answer, as that of the last one on its connection."""
    dropped = (b"proxy-", b"connection:", b"keep-alive:")
    lines = [
        line
        for line in head.removesuffix(_HEAD_END).split(b"\r\n")
        if not line.lower().startswith(dropped)
    ]
    return b"\r\n".join([*lines, b"connection: close"]) + _HEAD_END


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    target_reader: asyncio.StreamReader,
    target_writer: asyncio.StreamWriter,
    *,
    is_tunnel: bool,
) -> None:
    """Copy in both directions until the target ends."""
    requests = asyncio.ensure_future(_copy(reader, target_writer))
    try:
        if not is_tunnel:
            writer.write(_last(await target_reader.readuntil(_HEAD_END)))
        await _copy(target_reader, writer)
    finally:
        await cancel_all([requests])
        target_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(LIMITS.egress_copied_bytes):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
