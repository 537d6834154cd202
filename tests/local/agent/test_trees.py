"""Trees and blobs: what a stranger may have the controller read, and what a project gives away."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
import zstandard
from blake3 import blake3

from kubetorch.datastore import trees
from kubetorch.datastore.trees import Entry, Tree
from kubetorch.datastore.tuning import LIMITS
from kubetorch.lib.http_client import HttpClient
from kubetorch.specs.volume import VolumeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import blobs as records
from kubetorch.wire import messages, routes
from local.cluster.test_controller_process import Cluster, Process, run, until
from shared import WHOLE
from tests.local.service_harness import FAKE, Service, deploy, pack, spec


@pytest.fixture(scope="module")
def service(shared_service_home: Path) -> Iterator[Service]:
    service = Service(shared_service_home, FAKE).start()
    yield service
    service.terminate()


#: Seconds of the slowest `/health`: 0.1 on a machine with time, whose loop stood for 20 and more.
SLOWEST = 10.0
#: Asks `/health` all the time; says how long the longest answer took when its input ends.
SAMPLER = """
import http.client, sys, threading, time
host, port = sys.argv[1:]
connection, worst, is_over = http.client.HTTPConnection(host, int(port), timeout=60), 0.0, []
threading.Thread(target=lambda: is_over.append(sys.stdin.read()), daemon=True).start()
while not is_over:
    begun = time.monotonic()
    connection.request("GET", "/health")
    connection.getresponse().read()
    if not worst:
        print("asking", flush=True)
    worst = max(worst, time.monotonic() - begun)
    time.sleep(0.005)
print(worst)
"""


@contextmanager
def health(service: Service) -> Iterator[list[float]]:
    """The seconds of the slowest answer of `/health`, once it is left."""
    address, worst_seconds = urlsplit(service.url), []
    command = [sys.executable, "-c", SAMPLER, str(address.hostname), str(address.port)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sampler:
        assert sampler.stdout is not None
        assert sampler.stdout.readline() == "asking\n"
        yield worst_seconds
        worst_seconds.append(float(sampler.communicate(timeout=90)[0]))


def peak_mib(service: Service) -> int:
    """The most memory that the service has had."""
    lines = Path(f"/proc/{service.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) // 1024


def bomb(size: int) -> tuple[str, bytes]:
    """A tree of this size, all of whose entries are equal: its digest, and how it travels."""
    entry = msgspec.msgpack.encode(Entry("a/b/c", "file", 1, "0" * 64))
    count = size // len(entry)
    head, piece = b"\xdd" + count.to_bytes(4, "big"), entry * 10_000
    pieces = [head, *([piece] * (count // 10_000)), entry * (count % 10_000)]
    hasher, length = blake3(), sum(map(len, pieces))
    for part in pieces:
        hasher.update(part)
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    packed = [compressor.compress(records.pack(hasher.hexdigest(), length))]
    packed += [compressor.compress(part) for part in pieces]
    return hasher.hexdigest(), b"".join((*packed, compressor.flush()))


def send(service: Service, tree: str, packed: bytes) -> tuple[int, str]:
    """The status of a deploy of a tree, and the answer."""
    return answer(service, replace(spec("f"), tree=tree), packed)


def answer(service: Service, workload: WorkloadSpec, packed: bytes = b"") -> tuple[int, str]:
    """The status of a deploy, and the answer."""
    body = messages.encode(deploy(workload)) + b"\n" + packed
    return post(service, routes.workload("default", "f", "deploy"), body)


def post(service: Service, path: str, body: bytes) -> tuple[int, str]:
    """Status and text of an answer, however long it takes."""
    with (
        HttpClient(service.url, service.token, timeout=90.0) as client,
        client.request("POST", path, body=body) as response,
    ):
        return response.status, response.read().decode()


def test_a_tree_over_the_limits_is_refused_before_it_is_read(
    service: Service,
) -> None:
    tree, packed = bomb(1_500_000_000 if WHOLE else 100_000_000)
    before = peak_mib(service)
    with health(service) as seconds:
        status, answer_text = send(service, tree, packed)
    grown = peak_mib(service) - before
    print(f"{len(packed):,} bytes sent, worst /health {max(seconds):.3f} s, {grown} MiB more")
    assert (status, json.loads(answer_text)["error_type"]) == (400, "ProjectTooLargeError")
    assert ".ktignore" in answer_text
    assert max(seconds) < SLOWEST
    assert grown < 50


def large_tree(seed: int) -> Tree:
    """A tree of as many files as are allowed."""
    return trees.build(
        Entry(
            f"package_{index // 100:04d}/module_{index:06d}.py",
            "file",
            5000,
            hashlib.sha256(f"{seed} {index}".encode()).hexdigest(),
        )
        for index in range(LIMITS.tree_entries)
    )


@pytest.fixture(scope="module")
def tree() -> Tree:
    return large_tree(0)


def test_the_largest_tree_that_is_allowed_slows_nobody(service: Service, tree: Tree) -> None:
    packed = pack([tree.encoded])
    before = peak_mib(service)
    with health(service) as seconds:
        for _ in range(5 if WHOLE else 1):
            status, answer_text = send(service, tree.digest, packed)
    print(f"worst /health {max(seconds):.3f} s, {peak_mib(service) - before} MiB more")
    assert (status, len(json.loads(answer_text)["blobs"])) == (200, LIMITS.tree_entries)
    assert max(seconds) < SLOWEST


def test_many_who_deploy_at_once_slow_nobody(service: Service, tree: Tree) -> None:
    trees_to_send = [tree, *map(large_tree, range(1, 8 if WHOLE else 2))]
    tiny = [str(index).encode() for index in range(20_000 if WHOLE else 500)]
    sent = [(tree.digest, pack([tree.encoded, *tiny])) for tree in trees_to_send]
    sent += [bomb(size) for size in range(20_000_000, 20_000_000 + len(trees_to_send))]
    named = json.dumps(
        {"blobs": [digest for tree in trees_to_send for digest in tree.digests()]}
    ).encode()
    statuses: list[int] = []

    def flood(tree: str, packed: bytes) -> None:
        statuses.append(send(service, tree, packed)[0])
        statuses.append(post(service, routes.BLOBS_MISSING, named)[0])

    threads = [threading.Thread(target=flood, args=request) for request in sent]
    with health(service) as seconds:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(f"worst /health {max(seconds):.3f} s")
    assert sorted(statuses) == [200] * (3 * len(trees_to_send)) + [400] * len(trees_to_send)
    assert max(seconds) < SLOWEST


def test_a_long_declaration_is_refused_and_slows_nobody(service: Service) -> None:
    variables = {f"VARIABLE_{number}": f"$VARIABLE_{number}0" for number in range(3000)}
    mounted = tuple(VolumeSpec(f"v{number}", f"/v{number}") for number in range(201))
    with health(service) as seconds:
        status, answer_text = answer(service, spec("f", env=variables))
        refused = [answer(service, spec("f", env=variables | {"A": "x" * 100_000}))]
        refused.append(answer(service, spec("f", volumes=mounted)))
    service.delete("f")
    assert (status, "ready" in answer_text) == (200, True)
    assert [status for status, _ in refused] == [400, 400]
    assert "131,072 bytes" in refused[0][1]
    assert "201 secrets and volumes" in refused[1][1]
    print(f"worst /health {max(seconds):.3f} s")
    assert max(seconds) < SLOWEST


def test_unpacked_bytes_count_against_the_quota_of_a_namespace(
    tmp_path: Path,
) -> None:
    def upload(port: int, namespace: str, *data: bytes) -> tuple[int, str]:
        with (
            HttpClient(f"http://127.0.0.1:{port}", "ann", timeout=30.0) as client,
            client.request(
                "POST", f"{routes.BLOBS}?namespace={namespace}", body=pack(data)
            ) as response,
        ):
            return response.status, response.read().decode()

    async def body(cluster: Cluster, process: Process) -> None:
        cluster.answers.set()
        await until(lambda: cluster.marked == ["here-0"])
        first_blob, second_blob = bytes(3_000_000), b"1" * 3_000_000
        assert await asyncio.to_thread(upload, process.port, "team", first_blob) == (
            200,
            '{"stored":1}',
        )
        status, answer_text = await asyncio.to_thread(upload, process.port, "team", second_blob)
        assert (status, json.loads(answer_text)["error_type"]) == (507, "StorageFullError")
        assert "3,000,000 of its 5,000,000 bytes" in answer_text
        assert "blobs.namespaceQuota" in answer_text
        assert (await asyncio.to_thread(upload, process.port, "other", second_blob))[0] == 200

    run(tmp_path, body, KT_BLOBS_QUOTA="5M")
