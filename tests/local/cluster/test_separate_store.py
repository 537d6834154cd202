"""A data store of its own: the controller relays to it, pods send and fetch blobs there."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from kubetorch.controller.backends.base import PodStatus
from kubetorch.controller.blobs import BlobStores
from kubetorch.controller.cluster.process import answer_as_standby
from kubetorch.controller.store_relay import StoreRelay
from kubetorch.controller.store_server import StoreServer
from kubetorch.datastore import manifests
from kubetorch.datastore.blobs import digest_of
from kubetorch.datastore.key_folder import KeyFolder
from kubetorch.errors import DataStoreError, ForbiddenError, StoreUnavailableError
from kubetorch.lib.clock import SystemClock
from kubetorch.lib.http_client import HttpClient
from kubetorch.lib.http_server import Server
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.data import store_connection
from kubetorch.sdk.data.client import DataClient
from kubetorch.wire import messages, routes, tokens
from kubetorch.wire.data import Holder, KeyView, PutKey, StoreContact
from tests.cluster_controller import SECRET
from tests.free_ports import free_port
from tests.local.fake_reviews import FakeReviews, ReviewedController
from tests.local.key_store import KeyStore, packed

DATA = "kubetorchworkloads/data"
ANN, READER = "ann's", "reader's"
#: A token that says whom it is for; its signature is the API server's business.
POD = "eyJ.eyJhdWQiOiBbImt1YmV0b3JjaCJdfQ.c2ln"
VERBS = ("get", "list", "create", "delete")


class World(ReviewedController):
    """A controller with a store of its own, which may stop and start anew."""

    def __init__(self, folder: Path) -> None:
        self.reviews = FakeReviews()
        super().__init__(folder, self.reviews)
        self.reviews.users = {
            ANN: ("ann", "", ""),
            READER: ("reader", "", ""),
            "root's": ("root", "", ""),
            POD: ("system:serviceaccount:a:sa", "f-0", "uid-0"),
        }
        self.reviews.audiences[POD] = ["kubetorch"]
        self.reviews.allow("ann", "get list create update delete", "kubetorchworkloads", "a")
        self.reviews.allow("ann", "get list create delete", DATA, "a")
        self.reviews.allow("reader", "get list", DATA, "a")
        self.reviews.allow("root", "get", "kubetorchworkloads/status", "*")
        self._clients = ExitStack()
        self.port = free_port()
        self.store_url = f"http://127.0.0.1:{self.port}"

    async def _start(self) -> None:
        await super()._start()
        await self._start_store()

    async def _start_store(self) -> None:
        self.store = StoreServer(
            blob_stores=BlobStores(self.folder / "store" / "blobs"),
            keys=self.folder / "store" / "keys",
            clock=SystemClock(),
            secret=SECRET,
            environ={},
        )
        await self.store.start(socket.create_server(("127.0.0.1", self.port)))

    def http(self, token: str, url: str = "") -> HttpClient:
        """A client of the controller, or of another URL."""
        return self._clients.enter_context(HttpClient(url or self.url, token, timeout=30.0))

    async def _stop(self) -> None:
        self._clients.close()
        await self.store.close()
        await super()._stop()

    def stop_store(self) -> None:
        self.run(self.store.close())

    def start_store(self) -> None:
        self.run(self._start_store())

    def contact(self, token: str, namespace: str = "a") -> StoreContact:
        status, answer = self.request("POST", routes.data(namespace, "contact"), token, b"")
        assert status == 200, answer
        return messages.decode(StoreContact, json.dumps(answer))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as world:
        world.backend.named["a", "f"] = [PodStatus("f-0", 0, "Running", "", uid="uid-0")]
        assert world.deploy(ANN, "a", "f")[0] == 200
        yield world


def key_store(world: World, token: str = ANN) -> KeyStore:
    return KeyStore(world.http(token), world.folder / "blobs-of-client", "a")


def test_keys_are_put_and_got_through_the_controller(world: World) -> None:
    store = key_store(world)
    assert store.put("models/base", {"w": b"one"}).version == 1
    assert store.get("models") == {"base/w": b"one"}
    assert store.ls() == ["models/"]
    assert store.rm("models", recursive=True) == ["models/base"]
    assert store.ls() == []
    assert not list((world.folder / "blobs").rglob("*"))  # nothing of it at the controller


def test_keys_outlive_the_store_and_the_controller_tells_it_of_services_again(
    world: World,
) -> None:
    store = key_store(world)
    # It belongs to the service `f`, which only a store that knows the services can see.
    assert store.put("f/state", b"1").service == "f"
    world.stop_store()
    world.start_store()
    assert store.get("f/state") == {"": b"1"}
    assert store.put("f/more", b"2").service == "f"


def test_while_the_store_is_away_requests_say_so(world: World) -> None:
    world.stop_store()
    with pytest.raises(StoreUnavailableError, match="does not answer") as caught:
        key_store(world).ls()
    assert "kt check" in str(caught.value.hint)


def test_keys_of_a_service_end_with_it_also_when_the_store_was_away(world: World) -> None:
    store = key_store(world)
    store.put("f/state", b"1")
    store.put("stays", b"2")
    world.stop_store()
    status, answer = world.request("DELETE", routes.workload("a", "f"), ANN)
    assert (status, answer.get("keys", 0)) == (200, 0)
    world.start_store()
    deadline = time.monotonic() + 60
    while store.ls() != ["stays"]:
        assert time.monotonic() < deadline, store.ls()
        time.sleep(0.2)


def test_a_request_waits_for_a_store_that_does_not_lead_yet(world: World) -> None:
    store = key_store(world)
    store.put("k", b"1")
    world.stop_store()
    standby = Server(answer_as_standby)
    world.run(standby.start(socket.create_server(("127.0.0.1", world.port))))
    with ThreadPoolExecutor(1) as pool:
        names = pool.submit(store.ls)
        world.run(standby.close(0.0))
        world.start_store()
        assert names.result(60) == ["k"]


def test_keys_of_before_stay_whole_at_the_controller(tmp_path: Path) -> None:
    """So that the store can be given up again: the controller collects blobs as before."""
    view = KeyView(key="k", kind="file", manifest=digest_of(b"manifest"))
    KeyFolder(tmp_path / "keys" / "a").put(view)
    relay = StoreRelay(
        "http://127.0.0.1:1",
        tmp_path / "keys",
        secret=SECRET,
        clock=SystemClock(),
        services=lambda namespace: (),
    )
    stores = BlobStores(tmp_path / "blobs")
    assert relay.manifests(stores.of("a")) == {view.manifest}
    assert relay.manifests(stores.of("b")) == set()


def test_a_teardown_says_how_many_keys_ended(world: World) -> None:
    store = key_store(world)
    store.put("f/one", b"1")
    store.put("f/two", b"2")
    status, answer = world.request("DELETE", routes.workload("a", "f"), ANN)
    assert (status, answer["keys"]) == (200, 2)


def test_a_pod_publishes_in_place_what_other_pods_may_hold(world: World) -> None:
    store = key_store(world, POD)
    manifest, blobs = packed(b"in place")
    digest, encoded = manifests.encode(manifest)
    store.upload({digest: encoded, **blobs})
    published = PutKey(key="live", manifest=digest, publisher=Holder("f", "f-0"))
    answer = store.client.put_key(published)
    assert answer.key is not None
    assert answer.key.publisher == Holder("f", "f-0")
    with pytest.raises(DataStoreError, match="f-1"):
        store.client.put_key(PutKey(key="x", manifest=digest, publisher=Holder("f", "f-1")))


def test_a_pod_sends_and_fetches_blobs_past_the_controller(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_SERVICE_NAME", "f")
    controller = Controller(world.http(POD))
    direct = store_connection.find(controller, "a")
    assert direct is not None
    assert direct.base_url == world.store_url
    store = KeyStore(world.http(POD), world.folder / "pod-blobs", "a")
    store.put("from/pod", b"1" * 3_000_000)
    assert store.get("from/pod") == {"": b"1" * 3_000_000}
    status, metrics = world.request("GET", routes.METRICS, "root's")
    (sent,) = re.findall(rb"^kubetorch_controller_data_sent_bytes (\d+)", metrics, re.MULTILINE)
    assert (status, int(sent) > 0) == (200, True)
    store_connection.forget(controller, "a")


def test_a_pod_that_does_not_reach_the_store_goes_through_the_controller(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_SERVICE_NAME", "f")
    contact = world.contact(POD)
    assert (contact.url, contact.expires > time.time() + 600) == (world.store_url, True)
    controller = Controller(world.http(POD))
    assert store_connection.find(controller, "a") is not None
    world.stop_store()
    with pytest.raises(StoreUnavailableError):  # of the controller, which does not reach it either
        DataClient(controller, "a").missing({digest_of(b"1"): 1})
    assert store_connection.find(controller, "a") is None
    store_connection.forget(controller, "a")


@pytest.mark.security
def test_a_token_has_the_rights_of_its_asker(world: World) -> None:
    def client(token: str, namespace: str = "a") -> DataClient:
        return DataClient(Controller(world.http(token, world.store_url)), namespace)

    key_store(world).put("k", b"1")
    contact = world.contact(READER)
    claims = tokens.verify(
        tokens.workload_key(SECRET, "a/#store"), contact.token, audience="a/#store", now=time.time()
    )
    assert (claims.subject, claims.verbs, claims.pod) == ("reader", ("get", "list"), "")
    reader = client(contact.token)
    assert list(reader.fetch([digest_of(b"1")]))
    with pytest.raises(ForbiddenError, match="not to create"):
        reader.missing({digest_of(b"2"): 1})
    with pytest.raises(ForbiddenError, match="not to get"):
        list(client(contact.token, "b").fetch([digest_of(b"1")]))
    assert client(world.contact(POD).token).missing({digest_of(b"2"): 1})


@pytest.mark.security
@pytest.mark.parametrize(
    ("method", "verb"), [("POST", "services"), ("POST", "end"), ("POST", "find"), ("POST", "gc")]
)
def test_what_the_controller_tells_and_checks_no_other_does(
    world: World, method: str, verb: str
) -> None:
    for token in (ANN, POD, world.contact(ANN).token, world.contact(POD).token):
        with (
            HttpClient(world.store_url, token) as client,
            client.request(method, routes.data("a", verb), body=b'{"services": {}}') as answer,
        ):
            assert answer.status in (401, 403)
            answer.read()


@pytest.mark.security
def test_a_user_without_rights_gets_no_further_than_the_controller(world: World) -> None:
    status, answer = world.request("POST", routes.data("a", "put"), READER, b"{}")
    assert (status, answer["error_type"]) == (403, "ForbiddenError")
    status, answer = world.request("POST", routes.data("b", "find"), POD, b'{"path": "k"}')
    assert (status, answer["error_type"]) == (403, "ForbiddenError")
