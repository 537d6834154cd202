"""Streams into pods against a scripted API server."""

import asyncio
import contextlib
import dataclasses
import json

import pytest

import port_forward
from kubetorch import errors
from kubetorch.k8s import pod_streams
from kubetorch.k8s.client import Client
from kubetorch.k8s.kubeconfig import Pem, User
from kubetorch.k8s.resources import PODS, Ref
from local.fake_apiserver import Authority, FakeApiServer, ServerChannels, failure

WEB = Ref(PODS, "web", "team")
V5, V4 = "v5.channel.k8s.io", "v4.channel.k8s.io"


@contextlib.asynccontextmanager
async def client_of(handler, **settings):
    authority = Authority()
    async with FakeApiServer(handler, authority.server_context()) as server:
        access = server.access(authority=authority.pem)
        async with Client(access, variables={}, **settings) as client:
            yield client, server


def ended(code):
    if code == 0:
        return json.dumps({"metadata": {}, "status": "Success"}).encode()
    causes = [{"reason": "ExitCode", "message": str(code)}]
    status = {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode"}
    return json.dumps({**status, "details": {"causes": causes}}).encode()


# ------------------------------------------------------------------------------------- exec


@pytest.mark.parametrize("code", [0, 3, 137])
def test_a_program_runs_to_its_end(runs, code):
    async def handler(exchange):
        assert exchange.request.header("sec-websocket-protocol") == f"{V5}, {V4}"
        channels = await ServerChannels.accept(exchange, V5)
        await channels.send(1, b"")
        await channels.send(1, b"out")
        await channels.send(2, b"err")
        await channels.send(3, ended(code))
        channels.end()
        await exchange.hang()

    async def scenario():
        async with client_of(handler) as (client, server):
            completed = await pod_streams.run(
                client, WEB, ["ls", "-l", "a b"], container="main", timeout=30
            )
            assert completed == pod_streams.Completed(code, b"out", b"err")
            target = server.requests[0].target
            assert target.startswith("/api/v1/namespaces/team/pods/web/exec?")
            assert "command=ls&command=-l&command=a+b&container=main&stdout=1&stderr=1" in target

    runs(scenario)


@pytest.mark.parametrize("subprotocol", [V5, V4])
def test_standard_input_is_written_and_ends_where_the_server_can(runs, subprotocol):
    async def handler(exchange):
        channels = await ServerChannels.accept(exchange, subprotocol)
        received = b""
        while (message := await channels.receive()) not in (None, b"\xff\x00"):
            received += message[1:]
        await channels.send(1, received)
        await channels.send(3, ended(0))
        channels.end()
        await exchange.hang()

    async def scenario():
        async with (
            client_of(handler) as (client, _),
            await pod_streams.start(client, WEB, ["cat"], stdin=True) as process,
        ):
            data = bytes(range(256)) * 400
            await process.write(data)
            if subprotocol == V4:
                with pytest.raises(errors.KubernetesError, match=V5):
                    process.end_input()
                return
            process.end_input()
            assert b"".join([piece async for _, piece in process.output()]) == data
            assert await process.wait() == 0

    runs(scenario)


def test_a_program_that_cannot_start_says_why(runs):
    async def handler(exchange):
        channels = await ServerChannels.accept(exchange, V5)
        await channels.send(3, json.dumps(failure(500, "InternalError", "no such file")).encode())
        channels.end()
        await exchange.hang()

    async def scenario():
        async with client_of(handler) as (client, _):
            with pytest.raises(errors.KubernetesRequestError, match="no such file") as caught:
                await pod_streams.run(client, WEB, ["nope"], timeout=30)
            assert "cannot get pods/exec 'web' in namespace 'team'" in str(caught.value)

    runs(scenario)


def test_a_refused_upgrade_is_the_error_of_the_refusal(runs):
    async def handler(exchange):
        exchange.refuse(403, "Forbidden", "User cannot create pods/exec")

    async def scenario():
        async with client_of(handler) as (client, _):
            with pytest.raises(errors.KubernetesForbiddenError) as caught:
                await pod_streams.start(client, WEB, ["ls"])
            assert "['create', 'get']" in caught.value.hint

    runs(scenario)


def test_a_rotated_token_opens_a_stream(runs, tmp_path):
    token = tmp_path / "token"
    token.write_text("old")

    async def handler(exchange):
        if exchange.request.token != "Bearer new":
            token.write_text("new")
            exchange.refuse(401, "Unauthorized")
            return
        channels = await ServerChannels.accept(exchange, V5)
        await channels.send(3, ended(0))
        channels.end()
        await exchange.hang()

    async def scenario():
        async with client_of(handler) as (client, server):
            access = dataclasses.replace(client.access, user=User(token_file=token))
            async with Client(access, variables={}) as rotated:
                assert (await pod_streams.run(rotated, WEB, ["ls"], timeout=30)).exit_code == 0
            assert len(server.requests) == 2

    runs(scenario)


def test_a_connection_that_breaks_is_no_end_of_the_program(runs):
    async def handler(exchange):
        channels = await ServerChannels.accept(exchange, V5)
        await channels.send(1, b"half")
        exchange.cut()

    async def scenario():
        async with client_of(handler) as (client, _):
            with pytest.raises(errors.KubernetesUnavailableError, match="before the program did"):
                await pod_streams.run(client, WEB, ["ls"], timeout=30)

    runs(scenario)


def test_a_program_that_takes_too_long_is_left_when_its_time_is_over(runs):
    async def scenario():
        client_left = asyncio.Event()

        async def handler(exchange):
            channels = await ServerChannels.accept(exchange, V5)
            while await channels.receive() is not None:
                pass
            client_left.set()

        async with client_of(handler) as (client, _):
            with pytest.raises(TimeoutError):
                await pod_streams.run(client, WEB, ["sleep"], timeout=2.0)
            await asyncio.wait_for(client_left.wait(), 30)

    runs(scenario)


def test_output_that_nobody_reads_stops_the_sender(runs):
    total = 64 * 1024 * 1024

    async def scenario():
        sent = 0

        async def handler(exchange):
            nonlocal sent
            channels = await ServerChannels.accept(exchange, V5)
            while sent < total:
                await channels.send(1, bytes(32 * 1024))
                sent += 32 * 1024
            await channels.send(3, ended(0))
            channels.end()
            await exchange.hang()

        async with (
            client_of(handler) as (client, _),
            await pod_streams.start(client, WEB, ["yes"]) as process,
        ):
            before = -1
            while before != sent:
                before = sent
                await asyncio.sleep(0.2)
            assert sent < total / 2
            received = 0
            async for _, data in process.output():
                received += len(data)
            assert received == total

    runs(scenario)


# ------------------------------------------------------------------------------------- logs


def test_a_log_is_read_up_to_a_limit(runs):
    async def handler(exchange):
        exchange.answer(200, b"line\n")

    async def scenario():
        async with client_of(handler) as (client, server):
            options = pod_streams.LogOptions(previous=True)
            assert await pod_streams.read_log(client, WEB, options, limit=7) == b"line\n"
            assert server.requests[0].query == {"previous": "true", "limitBytes": "7"}

    runs(scenario)


# ----------------------------------------------------------------------------- port-forward


async def echo(exchange):
    """A pod whose port 8080 gives back what it gets."""
    channels = await ServerChannels.accept(exchange, V4)
    port = int(exchange.request.query["ports"])
    greeting = port.to_bytes(2, "little")
    await channels.send(0, greeting)
    await channels.send(1, greeting)
    if port != 8080:
        await channels.send(1, b"connection refused")
        channels.end()
        await exchange.hang()
        return
    while (message := await channels.receive()) is not None:
        await channels.send(message[0], message[1:])
        if message.endswith(b"bye"):
            channels.end()


@contextlib.asynccontextmanager
async def forwarded(handler, port=8080):
    async def target():
        return WEB

    async with (
        client_of(handler, patience=0.2) as (client, server),
        port_forward.PortForward(client, target, port) as forward,
    ):
        yield forward, server


def test_connections_are_forwarded_side_by_side(runs):
    async def scenario():
        async with forwarded(echo) as (forward, server):
            pairs = [
                await asyncio.open_connection("127.0.0.1", forward.local_port) for _ in range(3)
            ]
            for index, (reader, writer) in enumerate(pairs):
                writer.write(f"hello {index}".encode() + bytes(200_000))
                assert (await reader.readexactly(200_007)).startswith(f"hello {index}".encode())
            for _, writer in pairs:
                writer.close()
            assert len(server.requests) == 3
            assert forward.error is None

    runs(scenario)


def test_the_end_of_the_pods_side_ends_the_local_connection(runs):
    async def scenario():
        async with forwarded(echo) as (forward, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", forward.local_port)
            writer.write(b"bye")
            assert await asyncio.wait_for(reader.read(), 30) == b"bye"
            writer.close()

    runs(scenario)


def test_a_client_that_ends_its_side_still_gets_the_answer(runs):
    async def handler(exchange):
        channels = await ServerChannels.accept(exchange, V4)
        await channels.send(0, b"xx")
        await channels.send(1, b"xx")
        await channels.receive()
        await asyncio.sleep(0.3)
        await channels.send(0, b"answer")
        channels.end()
        await exchange.hang()

    async def scenario():
        async with forwarded(handler) as (forward, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", forward.local_port)
            writer.write(b"question")
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 30) == b"answer"
            writer.close()

    runs(scenario)


def test_a_port_that_nobody_listens_on_is_an_error_with_the_reason(runs):
    async def scenario():
        async with forwarded(echo, port=9) as (forward, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", forward.local_port)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 30) == b""
            writer.close()
            assert "port 9" in str(forward.error)
            assert "connection refused" in str(forward.error)

    runs(scenario)


def test_a_forward_survives_that_the_server_was_away(runs):
    async def scenario():
        async with forwarded(echo) as (forward, server):
            await server.stop()
            reader, writer = await asyncio.open_connection("127.0.0.1", forward.local_port)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 30) == b""
            writer.close()
            assert isinstance(forward.error, errors.KubernetesUnavailableError)
            await server.start()
            reader, writer = await asyncio.open_connection("127.0.0.1", forward.local_port)
            writer.write(b"again")
            assert await reader.readexactly(5) == b"again"
            writer.close()

    runs(scenario)


def test_a_wrong_certificate_is_refused_for_streams_too(runs):
    async def scenario():
        async with client_of(echo) as (client, _):
            foreign_authority = Pem(data=Authority().pem)
            cluster = dataclasses.replace(client.access.cluster, authority=foreign_authority)
            access = dataclasses.replace(client.access, cluster=cluster)
            async with Client(access, variables={}) as wary:
                with pytest.raises(errors.KubernetesCredentialsError, match="does not verify"):
                    await port_forward.connect(wary, WEB, 8080)

    runs(scenario)
