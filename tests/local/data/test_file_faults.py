"""Faults while files move: nothing half-done is seen, and the next attempt goes on."""

from __future__ import annotations

import filecmp
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kubetorch as kt
from kubetorch.datastore.blobs import BlobStore
from kubetorch.lib.http_client import HttpClient
from kubetorch.sdk import backend
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.data import files
from kubetorch.sdk.data.download import Download
from kubetorch.sdk.data.progress import Progress
from kubetorch.sdk.transport.session import Session
from tests.local import commands
from tests.local.service_harness import FAKE, Service
from tests.local.tcp_relay import Relay

pytestmark = pytest.mark.faults

MIB = 1024**2


@pytest.fixture
def service(
    service_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Service]:
    monkeypatch.setenv("KT_BACKEND", "local")
    monkeypatch.chdir(tmp_path)
    service = Service(service_home, FAKE).start()
    yield service
    backend.close_all()
    service.terminate()


def stored_bytes(service: Service) -> int:
    store = BlobStore(service.home / "blobs")
    return sum(blob.size for blob in store.iterate())


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


#: A program that the kernel kills when it does a thing to files of some name the n-th time.
KILLED = """
    import itertools
    import os
    import signal
    import sys

    numbers = itertools.count(1)

    def kill(event, arguments):
        if event == {event!r} and {name!r} in str(arguments[0]):
            if next(numbers) == {count}:
                os.kill(os.getpid(), signal.SIGKILL)

    import kubetorch as kt

    sys.addaudithook(kill)
    {statement}
"""


def run_killed(statement: str, event: str, name: str, count: int) -> None:
    """Run a statement until it does something for the n-th time."""
    program = KILLED.format(statement=statement, event=event, name=name, count=count)
    assert run(program).wait(60) == -signal.SIGKILL


def run(program: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])


def moved(arguments: list[str]) -> int:
    """Bytes that a command moved."""
    completed = commands.kt(*arguments, "--json")
    assert completed.returncode == 0, completed.stderr
    return int(json.loads(completed.stdout)["moved"])


def test_a_putter_that_is_killed_leaves_the_old_version_and_its_blobs(service: Service) -> None:
    Path("model").write_text("old")
    kt.put("model", "model")
    size = 48 * MIB
    Path("model").write_bytes(os.urandom(size))
    run_killed('kt.put("model", "model")', "os.rename", "/blobs/tmp/", 8)
    assert MIB < stored_bytes(service) < size, "it was at work"
    kt.get("model", "out/")
    assert Path("out/model").read_text() == "old"
    arrived = stored_bytes(service)
    sent = moved(["put", "model", "-s", "model"])
    assert sent <= size - arrived + MIB, "blobs that had arrived were not sent again"
    kt.get("model", "out/")
    assert Path("out/model").read_bytes() == Path("model").read_bytes()


NAMES = ("a", "b", "c")


@pytest.fixture
def versions(service: Service) -> dict[str, dict[str, bytes]]:
    """A folder that has the old version of a key that holds the new one."""
    versions = {
        "old": dict.fromkeys(NAMES, b"old"),
        "new": {name: os.urandom(16 * MIB) for name in NAMES},
    }
    Path("model").mkdir()
    for version, contents in versions.items():
        for name, content in contents.items():
            Path("model", name).write_bytes(content)
        kt.put("model", "model", contents=True)
        if version == "old":
            kt.get("model", "out", contents=True)
    return versions


GET = 'kt.get("model", "out", contents=True)'


def get_again(versions: dict[str, dict[str, bytes]]) -> None:
    """A get after one that was killed: all is there, and nothing is left of that one."""
    (stage,) = Path("out").glob(".kt-get-*")
    os.utime(stage, (0, 0))
    kt.get("model", "out", contents=True)
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == versions["new"]


def test_a_getter_that_is_killed_while_it_fetches_leaves_the_old_files(
    versions: dict[str, dict[str, bytes]],
) -> None:
    run_killed(GET, "open", "/.kt-get-", 12)
    assert any(path.stat().st_size for path in Path("out").glob(".kt-get-*/*")), "it was at work"
    assert {name: Path("out", name).read_bytes() for name in NAMES} == versions["old"]
    get_again(versions)


def test_a_getter_that_is_killed_in_its_last_step_leaves_files_that_are_whole(
    versions: dict[str, dict[str, bytes]],
) -> None:
    run_killed(GET, "os.rename", "/.kt-get-", 2)
    contents = {name: Path("out", name).read_bytes() for name in NAMES}
    new = [name for name in NAMES if contents[name] == versions["new"][name]]
    old = [name for name in NAMES if contents[name] == versions["old"][name]]
    assert (len(new), len(old)) == (1, 2)
    get_again(versions)


def test_a_connection_that_breaks_costs_only_what_was_on_its_way(service: Service) -> None:
    size = 48 * MIB
    Path("model").write_bytes(os.urandom(size))
    with Relay(int(service.url.rpartition(":")[2])) as relay:
        session = Session(
            lambda: Controller(HttpClient(relay.url, service.token, timeout=60)),
            patience=60,
            is_local=False,
        )
        progress = Progress("storing", "model")
        putter = threading.Thread(
            target=lambda: files.put(
                session,
                "default",
                "model",
                ["model"],
                progress,
                contents=False,
                filter_options=None,
                is_forced=False,
                lifespan=None,
            )
        )
        putter.start()
        wait_until(lambda: stored_bytes(service) > size // 4)
        relay.cut()
        putter.join(60)
        assert progress.moved <= size + MIB
        getter = threading.Thread(
            target=lambda: Download(session, "default", Progress("getting", "model")).get(
                "model", "out/", contents=False, filter_options=None, is_forced=False
            )
        )
        getter.start()
        wait_until(lambda: relay.accepted > 4 or any(Path().glob(".kt-get-*/out/*")))
        relay.cut()
        getter.join(60)
        session.close()
    assert Path("out/model").read_bytes() == Path("model").read_bytes()


def test_a_get_says_that_it_waits_for_a_controller_that_does_not_answer(
    service: Service, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("model").write_text("model")
    kt.put("model", "model")
    with Relay(int(service.url.rpartition(":")[2])) as relay:
        relay.hold()
        session = Session(
            lambda: Controller(HttpClient(relay.url, service.token, timeout=60)), is_local=False
        )
        getter = threading.Thread(
            target=lambda: Download(session, "default", Progress("getting", "model")).get(
                "model", "out/", contents=False
            )
        )
        getter.start()
        errors = ""

        def has_reported_the_wait() -> bool:
            nonlocal errors
            errors += capfd.readouterr().err
            return "the data store does not answer yet; waiting for the controller\n" in errors

        wait_until(has_reported_the_wait)
        relay.release()
        getter.join(60)
        session.close()
    assert Path("out/model").read_text() == "model"


SMALL_DISK = 'mount -t tmpfs -o size=4m small "$0" && cd "$0" && exec "$@"'
UNSHARE = ("unshare", "--mount", "--propagation=private", "sh", "-c", SMALL_DISK)


def test_a_full_disk_at_the_getter_is_a_typed_error_and_leaves_nothing(
    service: Service, tmp_path: Path
) -> None:
    large = tmp_path / "large"
    large.write_bytes(os.urandom(6 * MIB))
    small = tmp_path / "small"
    small.write_text("small")
    kt.put("large", large)
    kt.put("small", small)
    disk = tmp_path / "disk"
    disk.mkdir()
    program = """
        import os, kubetorch as kt
        kt.get("small", "out/")
        try:
            kt.get("large", "out/")
        except kt.StorageFullError as error:
            print(type(error).__name__, "no space left" in str(error), sorted(os.listdir("out")))
    """
    completed = subprocess.run(
        [*UNSHARE, str(disk), sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    if "unshare" in completed.stderr or "mount:" in completed.stderr:
        pytest.skip("this user cannot mount a small disk")
    assert completed.stdout == "StorageFullError True ['small']\n", completed.stderr


MEDIUM_DISK = SMALL_DISK.replace("size=4m", "size=24m")


def test_tensors_without_room_are_refused_before_the_first_of_them_is_stored(
    tmp_path: Path,
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    program = """
        import os, numpy, kubetorch as kt
        from kubetorch.local import lifetime
        os.environ |= {"KT_LOCAL_DIR": os.path.abspath("home"), "KT_BACKEND": "local"}
        random = numpy.random.default_rng(0)
        large = random.integers(0, 255, 40_000_000, "u1")
        try:
            kt.put("large", {"w": large})
        except kt.StorageFullError as error:
            print(type(error).__name__)
        kt.put("small", {"w": large[:9_000_000]})
        print(kt.get("small")["w"].shape)
        lifetime.stop()
    """
    command = (
        *UNSHARE[:-1],
        MEDIUM_DISK,
        str(disk),
        sys.executable,
        "-c",
        textwrap.dedent(program),
    )
    completed = subprocess.run(command, capture_output=True, text=True, timeout=100)
    if "unshare" in completed.stderr or "mount:" in completed.stderr:
        pytest.skip("this user cannot mount a small disk")
    assert completed.stdout == "StorageFullError\n(9000000,)\n", completed.stderr


def test_two_putters_of_one_key_leave_the_whole_of_either(service: Service) -> None:
    contents = {}
    for name in ("one", "two"):
        Path(name).mkdir()
        for part in range(20):
            Path(name, str(part)).write_text(f"{name} {part}" * 20_000)
        contents[name] = {path.name: path.read_bytes() for path in Path(name).iterdir()}
    putters = [
        run(f'import kubetorch as kt\nfor _ in range(4): kt.put("model", "{name}", contents=True)')
        for name in ("one", "two")
    ]
    while any(putter.poll() is None for putter in putters):
        try:
            kt.get("model", "out", contents=True)
        except kt.DataStoreError as error:
            assert "there is no key" in str(error)
            continue
        names = {path.name: path.read_bytes() for path in Path("out").iterdir()}
        assert names in contents.values()
    assert [putter.returncode for putter in putters] == [0, 0]


def test_a_store_that_is_killed_is_started_again_by_the_put(service: Service) -> None:
    size = 48 * MIB
    Path("model").write_bytes(os.urandom(size))
    putter = run('import kubetorch as kt; kt.put("model", "model")')
    wait_until(lambda: stored_bytes(service) > size // 4)
    service.kill()
    assert putter.wait(60) == 0
    kt.get("model", "out/")
    assert Path("out/model").read_bytes() == Path("model").read_bytes()


def test_thousands_of_small_files_are_a_few_blobs(service: Service) -> None:
    for number in range(3_000):
        folder = Path("many", str(number // 1000))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(number)).write_text(f"file {number}")
    kt.put("many", "many", contents=True)
    store = BlobStore(service.home / "blobs")
    assert sum(1 for _ in store.iterate()) < 10
    kt.get("many", "out", contents=True)
    assert sum(1 for path in Path("out").rglob("*") if path.is_file()) == 3_000
    assert Path("out/2/2013").read_text() == "file 2013"


def flip(service: Service, *, smallest: int = 0) -> None:
    """Damage the first byte of each blob of the store that has some size."""
    store = BlobStore(service.home / "blobs")
    for blob in list(store.iterate()):
        if blob.size >= smallest:
            path = store.path(blob.digest)
            with path.open("r+b") as file:
                byte = file.read(1)
                file.seek(0)
                file.write(bytes([byte[0] ^ 1]))


def put(session: Session, key: str, path: str, *, is_forced: bool = False) -> int:
    """Put a path at a key; returns the bytes that moved."""
    progress = Progress("storing", key)
    files.put(
        session,
        "default",
        key,
        [path],
        progress,
        contents=True,
        filter_options=None,
        is_forced=is_forced,
        lifespan=None,
    )
    return progress.moved


def get(session: Session, key: str, folder: str) -> None:
    Download(session, "default", Progress("getting", key)).get(key, folder, contents=True)


@pytest.fixture(params=[True, False], ids=["folder", "http"])
def client(service: Service, request: pytest.FixtureRequest) -> Iterator[Session]:
    """The session of a program that writes to the folder of the store, and of one elsewhere."""
    session = Session(
        lambda: Controller(HttpClient(service.url, service.token, timeout=60)),
        patience=60,
        is_local=request.param,
    )
    yield session
    session.close()


def write_model() -> dict[str, bytes]:
    contents = {"large": os.urandom(9 * MIB), "small": b"small", "other": b"another"}
    Path("model").mkdir(exist_ok=True)
    for name, content in contents.items():
        Path("model", name).write_bytes(content)
    return contents


def test_a_forced_put_replaces_damage_that_nobody_has_read(
    service: Service, client: Session
) -> None:
    contents = write_model()
    put(client, "model", "model")
    flip(service)
    assert put(client, "model", "model", is_forced=True) >= 9 * MIB
    get(client, "model", "out")
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == contents
    assert put(client, "model", "model", is_forced=True) == 0, "what is whole is not sent"


def test_a_forced_put_replaces_a_blob_that_was_cut(service: Service, client: Session) -> None:
    contents = write_model()
    put(client, "model", "model")
    store = BlobStore(service.home / "blobs")
    for blob in list(store.iterate()):
        os.truncate(store.path(blob.digest), blob.size // 2)
    put(client, "model", "model", is_forced=True)
    get(client, "model", "out")
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == contents


def test_a_get_names_the_files_that_are_damaged_in_the_store_and_what_helps(
    service: Service, client: Session
) -> None:
    write_model()
    put(client, "model", "model")
    flip(service, smallest=MIB)
    with pytest.raises(kt.DataStoreError) as raised:
        get(client, "model", "out")
    assert "the store's copy of model/large is damaged: " in str(raised.value)
    assert "kt store verify model says what else is; put it again" in str(raised.value)
    assert "kt put --force" in str(raised.value)
    assert not Path("out").exists()


def test_a_get_of_a_key_whose_list_of_files_is_damaged_names_the_key(
    service: Service, client: Session
) -> None:
    write_model()
    put(client, "model", "model")
    flip(service)
    with pytest.raises(kt.DataStoreError, match=r"the store's copy of model is damaged: "):
        get(client, "model", "out")


#: A put or a get in a process of its own, which says by how much its memory grew.
LARGE = """
    import sys
    from pathlib import Path

    from kubetorch.lib.http_client import HttpClient
    from kubetorch.sdk.controller import Controller
    from kubetorch.sdk.data import files
    from kubetorch.sdk.data.download import Download
    from kubetorch.sdk.data.progress import Progress
    from kubetorch.sdk.transport.session import Session

    verb, url, token, is_local = sys.argv[1:]
    session = Session(
        lambda: Controller(HttpClient(url, token, timeout=60)), is_local=bool(is_local)
    )

    def peak():
        # Not `ru_maxrss`, which begins with that of the parent.
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024

    def put(key, path):
        files.put(
            session, "default", key, [path], Progress("storing", key), contents=False,
            filter_options=None, is_forced=False, lifespan=None,
        )

    def get(key):
        Download(session, "default", Progress("getting", key)).get(key, "out/", contents=False)

    put("small", "small")
    get("small")
    before = peak()
    put("large", "large") if verb == "put" else get("large")
    print(peak() - before)
"""


def memory_peak(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("is_local", ["local", ""], ids=["folder", "http"])
def test_memory_of_a_put_and_a_get_does_not_grow_with_the_file(
    service: Service, is_local: str
) -> None:
    content = os.urandom(MIB)
    Path("small").write_bytes(content)
    with Path("large").open("wb") as file:
        for number in range(256):  # no two pieces are alike
            file.write(number.to_bytes(4, "little") + content[4:])
    grown = {}
    before = memory_peak(service.pid)
    for verb in ("put", "get"):
        command = [sys.executable, "-c", textwrap.dedent(LARGE)]
        command += [verb, service.url, service.token, is_local]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert completed.returncode == 0, completed.stderr
        grown[verb] = int(completed.stdout)
    grown["store"] = memory_peak(service.pid) - before
    assert filecmp.cmp("large", "out/large", shallow=False)
    assert all(size < 128 * MIB for size in grown.values()), grown
