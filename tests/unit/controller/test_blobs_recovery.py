import asyncio
from dataclasses import replace
from types import SimpleNamespace

from kubetorch.controller.blobs import BlobRecovery, BlobStores
from kubetorch.controller.tuning import TIMING
from kubetorch.datastore import trees
from kubetorch.datastore.blobs import digest_of
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import SendBlobs
from manual_clock import ManualClock

FILE, ARGUMENTS = b"def f(): pass", b"{}"
TREE = trees.build([trees.Entry("f.py", "file", len(FILE), digest_of(FILE))])
SPEC = WorkloadSpec(
    "ns",
    "train",
    CallableRef("fn", "f", "f", "f"),
    tree=TREE.digest,
    init_args=digest_of(ARGUMENTS),
)


class World:
    def __init__(self, folder):
        self.clock = ManualClock()
        self.blob_stores = BlobStores(folder)
        self.recovery = BlobRecovery(self.blob_stores, self.clock)
        self.requests = []
        #: Errors that deploys were ended with.
        self.deploy_errors = []

    def connect(self, name="train", *specs):
        workload = SimpleNamespace(key=("ns", name), specs=list(specs) or [SPEC])
        asyncio.run(self.recovery.request(workload, self.requests.append))

    def wait(self, *pods):
        """Pod `new` waits while these are connected; from whom it does."""
        senders = {
            pod: lambda message, pod=pod: self.requests.append((pod, message)) for pod in pods
        }
        workload = SimpleNamespace(
            key=("ns", "train"),
            spec=SPEC,
            specs=[SPEC],
            senders=lambda: senders,
            end_deploy=self.deploy_errors.append,
        )
        return asyncio.run(self.recovery.request_for(workload, "new"))

    def bring(self, *blobs):
        for data in blobs:
            self.blob_stores.of("ns").blobs.put(digest_of(data), data)


def test_a_pod_is_asked_for_trees_with_their_files_and_for_arguments(tmp_path):
    world = World(tmp_path)
    world.connect()
    assert world.requests == [SendBlobs(trees=(TREE.digest,), blobs=(SPEC.init_args,))]


def test_files_are_asked_for_where_the_tree_is_known(tmp_path):
    world = World(tmp_path)
    world.bring(TREE.encoded, ARGUMENTS)
    world.connect()
    assert world.requests == [SendBlobs(blobs=(digest_of(FILE),))]


def test_nobody_is_asked_when_nothing_is_missing(tmp_path):
    world = World(tmp_path)
    world.bring(TREE.encoded, ARGUMENTS, FILE)
    world.connect()
    world.connect("other", replace(SPEC, tree=None, init_args=None))
    assert world.requests == []


def test_what_is_lost_later_is_asked_for_at_once(tmp_path):
    world = World(tmp_path)
    world.bring(TREE.encoded, ARGUMENTS, FILE)
    world.connect()
    world.blob_stores.of("ns").blobs.delete(digest_of(FILE))
    world.blob_stores.of("ns").forget()
    world.connect()
    assert world.requests == [SendBlobs(blobs=(digest_of(FILE),))]


def test_another_pod_is_asked_when_the_first_did_not_send_it(tmp_path):
    world = World(tmp_path)
    for _ in range(3):
        world.connect()
    assert len(world.requests) == 1
    world.clock.advance(TIMING.blob_recovery_seconds)
    world.connect()
    assert len(world.requests) == 2


def test_all_kept_generations_are_looked_at(tmp_path):
    world = World(tmp_path)
    world.bring(TREE.encoded, ARGUMENTS, FILE)
    older = replace(SPEC, tree="0" * 64)
    world.connect("train", SPEC, older)
    assert world.requests == [SendBlobs(trees=("0" * 64,))]


def test_while_a_pod_waits_one_after_the_other_is_asked(tmp_path):
    world = World(tmp_path)
    assert world.wait("a", "b") == "asked of a"
    assert world.wait("a", "b") == "asked of a"
    assert [pod for pod, _ in world.requests] == ["a"]
    world.clock.advance(TIMING.awaited_blob_recovery_seconds)
    assert world.wait("a", "b") == "asked of a, b"
    assert [pod for pod, _ in world.requests] == ["a", "b"]
    world.clock.advance(TIMING.awaited_blob_recovery_seconds)
    late = "without success so far; the next deploy brings them"
    assert world.wait("a", "b") == f"asked of a, b, {late}"
    assert [pod for pod, _ in world.requests] == ["a", "b", "a"]
    assert world.wait("b") == f"asked of b, {late}"


def test_a_pod_that_waits_is_not_asked_itself(tmp_path):
    world = World(tmp_path)
    assert "no other pod is connected" in world.wait()
    assert world.requests == []


def test_a_deploy_ends_when_nobody_can_have_its_code(tmp_path):
    world = World(tmp_path)
    world.wait("train-0")
    assert not world.deploy_errors
    reason = world.wait()
    (error,) = world.deploy_errors
    assert reason in error.message
    assert error.hint == "deploy again: the client uploads what is missing"


def test_a_deploy_whose_code_is_there_goes_on_while_a_pod_waits_for_that_of_before(tmp_path):
    world = World(tmp_path)
    world.bring(TREE.encoded, ARGUMENTS, FILE)
    world.wait()
    assert not world.deploy_errors
