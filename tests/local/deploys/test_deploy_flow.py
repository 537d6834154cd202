"""The deploy flow against a controller that answers as it should not, or breaks off."""

import asyncio
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from kubetorch.datastore import trees
from kubetorch.datastore.tuning import TIMING
from kubetorch.errors import (
    ControllerError,
    ControllerUnavailableError,
    RemoteError,
    ServiceTimeoutError,
)
from kubetorch.lib.http_client import HttpClient
from kubetorch.sdk import tuning as sdk_tuning
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.deploys import deploy
from kubetorch.sdk.deploys.source import Placement, Source
from kubetorch.sdk.logs import Screen
from kubetorch.sdk.transport.pod_transport import DIRECT, DirectTransport
from kubetorch.sdk.transport.session import Session
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import exceptions, versions
from kubetorch.wire.messages import Accepted, DeployLog, Failed, Missing, Stage
from tests.local.fake_controller import BREAK, STALL, FakeController, ready, view


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    (folder / "jobs.py").write_text("def train():\n    return 1\n")
    return folder


class Client:
    """Deploys to a fake; every connection is counted."""

    def __init__(self, project):
        self.connections = 0
        self.project = project
        self.session = None

    def deployment(
        self, fake, *, kind="fn", init_args=None, existing=(), stream_logs=True, transport=None
    ):
        def connect():
            self.connections += 1
            return Controller(HttpClient(fake.url, "token"))

        source = Source(kind, None, Placement(), (str(self.project), "jobs", "train"))
        spec = WorkloadSpec("default", "train", source.ref())
        self.close()
        self.session = Session(connect, transport or DIRECT, is_local=transport is None)
        order = deploy.Order(source, spec, init_args, stream_logs, existing)
        return deploy.Deployment(order, self.session, Screen())

    def close(self):
        if self.session is not None:
            self.session.close()


@pytest.fixture
def client(project):
    client = Client(project)
    yield client
    client.close()


def tree_of(fake, deployed):
    return trees.decode(fake.blobs.read(deployed.spec.tree))


def test_the_first_deploy_sends_what_the_controller_lacks(client, tmp_path):
    missing = []
    with FakeController(tmp_path / "blobs", [[Missing(blobs=())], [ready()]]) as fake:
        # The first answer names everything that the tree has.
        deployment = client.deployment(fake)
        bundle = deployment._bundle()
        missing.extend([bundle.spec.tree, *bundle.scans[0].tree.digests()])
        fake._scripts[0] = [Missing(blobs=tuple(missing))]
        ready_view = deployment.run()

    first, second = fake.deploys_seen
    assert first == second
    assert (first.protocol, first.spec.name) == (versions.PROTOCOL, "train")
    assert [entry.path for entry in tree_of(fake, first).entries] == ["jobs.py", "pyproject.toml"]
    assert ready_view == view()


def test_an_edit_travels_with_the_deploy(client, project, tmp_path):
    with FakeController(tmp_path / "blobs", [[ready()], [ready()]]) as fake:
        client.deployment(fake).run()
        assert fake.blobs.missing([fake.deploys_seen[0].spec.tree])
        (project / "jobs.py").write_text("def train():\n    return 22\n")
        client.deployment(fake).run()

    edited = tree_of(fake, fake.deploys_seen[1])
    (digest,) = [entry.digest for entry in edited.entries if entry.path == "jobs.py"]
    assert fake.blobs.read(digest) == b"def train():\n    return 22\n"


def test_a_deploy_without_changes_is_one_request_without_blobs(client, tmp_path):
    with FakeController(tmp_path / "blobs", [[ready()], [ready()]]) as fake:
        client.deployment(fake).run()
        client.deployment(fake).run()

    first, second = fake.deploys_seen
    assert first.spec == second.spec
    assert first.id != second.id


def test_constructor_arguments_are_a_blob(client, tmp_path):
    with FakeController(tmp_path / "blobs", [[ready()]]) as fake:
        client.deployment(fake, kind="cls", init_args={"start": 5}).run()

    (seen_deploy,) = fake.deploys_seen
    assert fake.blobs.read(seen_deploy.spec.init_args) == b'{"start":5}'


def test_every_deploy_of_a_class_makes_a_new_instance_and_of_a_function_does_not(client, tmp_path):
    with FakeController(tmp_path / "blobs", [[ready()]] * 4) as fake:
        for kind in ("cls", "cls", "fn", "fn"):
            client.deployment(fake, kind=kind).run()

    instances = [seen_deploy.spec.instance for seen_deploy in fake.deploys_seen]
    assert instances[0] != instances[1]
    assert instances[2:] == [None, None]


@pytest.mark.parametrize(
    "script", [[BREAK], [Accepted(generation=1), BREAK], [Accepted(generation=1)]]
)
def test_a_controller_that_breaks_off_is_told_the_same_deploy_again(client, tmp_path, script):
    with FakeController(tmp_path / "blobs", [script, [ready()]]) as fake:
        ready_view = client.deployment(fake).run()

    first, second = fake.deploys_seen
    assert first == second
    assert client.connections == 2
    assert ready_view == view()


def test_a_controller_that_always_breaks_off_is_given_up(client, tmp_path):
    with (
        FakeController(tmp_path / "blobs", [[BREAK]] * sdk_tuning.LIMITS.deploy_attempts) as fake,
        pytest.raises(ControllerUnavailableError),
    ):
        client.deployment(fake).run()

    assert len(fake.deploys_seen) == sdk_tuning.LIMITS.deploy_attempts


def test_a_controller_that_never_has_enough_is_given_up(client, tmp_path):
    with (
        FakeController(
            tmp_path / "blobs", [[Missing(blobs=())]] * sdk_tuning.LIMITS.deploy_attempts
        ) as fake,
        pytest.raises(ControllerError, match="lacked blobs"),
    ):
        client.deployment(fake).run()


def test_a_file_that_changes_while_it_is_sent_is_scanned_again(client, project, tmp_path):
    with FakeController(tmp_path / "blobs", [[ready()], [ready()]]) as fake:
        client.deployment(fake).run()
        (project / "jobs.py").write_text("first edit")
        # A file that changed a moment ago is sent as it was read.
        time.sleep(TIMING.racy_file_seconds)
        deployment = client.deployment(fake)
        bundles = []
        scan = deployment._bundle

        def scan_and_edit():
            bundles.append(scan())
            if len(bundles) == 1:
                (project / "jobs.py").write_text("second edit, longer")
            return bundles[-1]

        deployment._bundle = scan_and_edit
        deployment.run()

    assert len(bundles) == 2
    assert fake.deploys_seen[-1].spec.tree == bundles[1].spec.tree


def failed(error):
    return Failed(failure=exceptions.describe(error).to_dict())


def test_an_error_of_our_own_is_raised_as_itself(client, tmp_path):
    event = failed(ServiceTimeoutError("not ready", hint="wait"))
    with (
        FakeController(tmp_path / "blobs", [[Accepted(generation=1), event]]) as fake,
        pytest.raises(ServiceTimeoutError, match="not ready") as caught,
    ):
        client.deployment(fake).run()

    assert caught.value.hint == "wait"


def test_what_the_users_code_raised_is_raised_as_itself_with_its_traceback(client, tmp_path):
    try:
        {}["missing"]
    except KeyError as error:
        events = [failed(error)]
    with (
        FakeController(tmp_path / "blobs", [events]) as fake,
        pytest.raises(KeyError) as caught,
    ):
        client.deployment(fake).run()

    assert "missing" in caught.value.remote_traceback
    assert caught.value.__cause__ is not None


def test_an_exception_that_is_not_known_here_is_a_remote_error(client, tmp_path):
    failure = {"error_type": "Strange", "message": "what", "module": "nowhere.at.all"}
    with (
        FakeController(tmp_path / "blobs", [[Failed(failure=failure)]]) as fake,
        pytest.raises(RemoteError, match="Strange: what"),
    ):
        client.deployment(fake).run()


def test_lines_of_loading_code_are_shown_once_also_when_they_are_told_again(
    client, tmp_path, capsys
):
    line = DeployLog(text="loading", pod="train-0", time=1.0)
    stage = Stage(stage="preloading", message="numpy is unfit", warning=True)
    script = [Accepted(generation=1), line, stage]
    with FakeController(tmp_path / "blobs", [[*script, BREAK], [*script, ready()]]) as fake:
        client.deployment(fake).run()

    out, err = capsys.readouterr()
    assert out.count("loading") == len(out.splitlines()) == 1
    assert err.count("numpy is unfit") == 1


def test_a_service_that_serves_calls_is_taken_instead(client, tmp_path):
    with FakeController(tmp_path / "blobs", workloads=[view("train")]) as fake:
        existing_view = client.deployment(fake, existing=("alice-train", "train")).run()

    assert existing_view == view("train")


def test_a_service_that_is_scaled_to_zero_is_taken_instead(client, tmp_path):
    at_zero = replace(view("train"), pods=(), scaler="http://train.default.svc")
    with FakeController(tmp_path / "blobs", workloads=[at_zero]) as fake:
        existing_view = client.deployment(fake, existing=("train",)).run()

    assert existing_view == at_zero


def test_a_service_without_a_ready_pod_is_deployed(client, tmp_path):
    broken = view("train", ready=False)
    with FakeController(tmp_path / "blobs", [[ready()]], workloads=[broken]) as fake:
        client.deployment(fake, existing=("train",)).run()

    assert len(fake.deploys_seen) == 1


def test_a_deploy_that_goes_on_is_followed_past_any_number_of_breaks(client, tmp_path):
    transport = DirectTransport()
    transport.patience = 0.15  # the first pause between attempts is shorter, and two are longer
    cuts = [[Accepted(generation=1), BREAK]] * (sdk_tuning.LIMITS.deploy_attempts + 6)
    with FakeController(tmp_path / "blobs", [*cuts, [ready()]]) as fake:
        assert client.deployment(fake, transport=transport).run() == view()

    assert len({seen_deploy.id for seen_deploy in fake.deploys_seen}) == 1


def test_cancelling_an_awaited_deploy_closes_its_connection(client, tmp_path):
    async def cancel_it(fake):
        task = asyncio.create_task(client.deployment(fake).run_async())
        await asyncio.to_thread(fake.stalled.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with FakeController(tmp_path / "blobs", [[Accepted(generation=1), STALL]]) as fake:
        # Ends only when the fake's answer was cut: leaving the loop waits for the thread.
        asyncio.run(cancel_it(fake))


def test_interrupting_a_deploy_leaves_nothing_behind(client, tmp_path):
    code = textwrap.dedent(
        """
        import signal, sys, threading, pathlib
        sys.path[:0] = {path!r}
        from tests.local.fake_controller import STALL, FakeController
        from tests.local.deploys.test_deploy_flow import Client
        from kubetorch.wire.messages import Accepted

        client = Client(pathlib.Path({project!r}))
        with FakeController(pathlib.Path({blobs!r}), [[Accepted(generation=1), STALL]]) as fake:
            deployment = client.deployment(fake)
            main = threading.main_thread().ident
            over = threading.Event()

            def interrupt():
                fake.stalled.wait(40)
                # Python does not see a signal that comes just before a thread begins to wait.
                pause = 0.5
                while not over.wait(pause):
                    signal.pthread_kill(main, signal.SIGINT)
                    pause = 10  # in which the first one has done its work

            threading.Thread(target=interrupt).start()
            try:
                deployment.run()
            except KeyboardInterrupt:
                over.set()
                print("interrupted", deployment._answer)
        """
    )
    root = Path(__file__).parents[3]
    completed = subprocess.run(
        [
            sys.executable,
            "-c",
            code.format(
                path=[str(root)],
                project=str(client.project),
                blobs=str(tmp_path / "blobs"),
            ),
        ],
        capture_output=True,
        text=True,
        timeout=90,
    )
    client.session = Session(lambda: None)
    assert completed.stdout == "interrupted None\n", completed.stderr
