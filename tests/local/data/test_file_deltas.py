"""Files of safetensors travel as the difference to the version before, far and back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest

from kubetorch.datastore.blobs import digest_of
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.data import files
from kubetorch.sdk.data.download import Download
from kubetorch.sdk.data.progress import Progress
from kubetorch.sdk.transport.session import Session
from tests.local.service_harness import FAKE, Service

MIB = 1024**2


@pytest.fixture(scope="module")
def service(shared_service_home: Path) -> Iterator[Service]:
    service = Service(shared_service_home, FAKE).start()
    yield service
    service.terminate()


class Machine:
    """A machine far from the store, with a cache of its own; `moved` is of the last transfer."""

    def __init__(self, session: Session, namespace: str, use: Callable[[], None]) -> None:
        self._session = session
        self._namespace = namespace
        self._use = use
        self.moved = 0

    def put(self, source: Path) -> None:
        self._use()
        progress = Progress("storing", "ckpt")
        files.put(
            self._session,
            self._namespace,
            "ckpt",
            [str(source)],
            progress,
            contents=True,
            filter_options=None,
            is_forced=False,
            lifespan=None,
        )
        self.moved = progress.moved

    def get(self, folder: Path) -> None:
        self._use()
        progress = Progress("getting", "ckpt")
        Download(self._session, self._namespace, progress).get("ckpt", str(folder), contents=True)
        self.moved = progress.moved


@pytest.fixture
def machine(
    service: Service, shared_service_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Machine]]:
    monkeypatch.setenv("KT_LOCAL_DIR", str(shared_service_home))
    with contextlib.ExitStack() as opened:

        def make(name: str) -> Machine:
            http = opened.enter_context(service.client())
            session = Session(lambda: Controller(http), is_local=False)
            use = lambda: monkeypatch.setenv("KT_CACHE_DIR", str(tmp_path / name))  # noqa: E731
            return Machine(session, f"n{digest_of(bytes(tmp_path))[:20]}", use)

        yield make


def write(path: Path, weights: numpy.ndarray, note: str = "") -> None:
    """A file of safetensors with a tensor of two bytes an element; the note is in its header."""
    header = {
        "__metadata__": {"note": note},
        "w": {"dtype": "BF16", "shape": [weights.size], "data_offsets": [0, weights.nbytes]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + weights.tobytes())


@pytest.mark.parametrize(("is_scattered", "share"), [(True, 0.05), (False, 0.03)])
def test_a_changed_checkpoint_travels_as_its_difference_in_both_directions(
    machine: Callable[[str], Machine], tmp_path: Path, is_scattered: bool, share: float
) -> None:
    generator = numpy.random.default_rng(7 + is_scattered)
    weights = generator.integers(0, 2**16, 8 * MIB, "u2")
    source, dest = tmp_path / "source", tmp_path / "dest"
    source.mkdir()
    file = source / "model.safetensors"
    write(file, weights)
    (source / "config.json").write_text("{}")
    putter, getter = machine("putter"), machine("getter")
    putter.put(source)
    assert putter.moved > 0.9 * file.stat().st_size
    getter.get(dest)

    count = weights.size // 100
    where = generator.choice(weights.size, count) if is_scattered else slice(0, count)
    weights[where] = generator.integers(0, 2**16, count)
    write(file, weights, note="a header that is longer than it was")  # tensors begin elsewhere
    file.chmod(0o640)
    putter.put(source)
    assert putter.moved <= share * file.stat().st_size
    getter.get(dest)
    assert getter.moved <= share * file.stat().st_size

    fetched = dest / "model.safetensors"
    assert fetched.read_bytes() == file.read_bytes()
    assert fetched.stat().st_mode & 0o777 == 0o640
    machine("stranger").get(tmp_path / "new")
    assert (tmp_path / "new" / "model.safetensors").read_bytes() == file.read_bytes()


def test_chunks_that_cannot_be_read_from_the_cache_travel_whole(
    machine: Callable[[str], Machine], tmp_path: Path
) -> None:
    weights = numpy.random.default_rng(3).integers(0, 2**16, 2 * MIB, "u2")
    source, dest = tmp_path / "source", tmp_path / "dest"
    source.mkdir()
    file = source / "model.safetensors"
    write(file, weights)
    client = machine("one")
    client.put(source)
    cached_blobs = [path for path in (tmp_path / "one" / "tensors").rglob("*") if path.is_file()]
    assert cached_blobs
    for path in cached_blobs:  # root can read files of other users, but no folder
        path.unlink()
        path.mkdir()
    weights[:10] = 0
    write(file, weights)
    client.put(source)
    client.get(dest)
    assert (dest / "model.safetensors").read_bytes() == file.read_bytes()


def test_a_file_that_grew_moves_what_is_new(
    machine: Callable[[str], Machine], tmp_path: Path
) -> None:
    data = numpy.random.default_rng(1).bytes(24 * MIB)
    source, dest = tmp_path / "source", tmp_path / "dest"
    source.mkdir()
    (source / "log").write_bytes(data[: 20 * MIB])
    client = machine("one")
    client.put(source)
    client.get(dest)
    (source / "log").write_bytes(b"first" + data)
    client.put(source)
    client.get(dest)
    assert client.moved < 14 * MIB
    assert (dest / "log").read_bytes() == b"first" + data
