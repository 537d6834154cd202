"""How fast files and tensors go to the data store and come back.

kubetorch_store PROJECT FILES
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy

import kubetorch as kt
from benchmarks import store
from benchmarks.programs import driving
from benchmarks.programs.answering import answer, arguments
from kubetorch.config.settings import config
from kubetorch.sdk import backend
from kubetorch.sdk.data import files, tensors
from kubetorch.sdk.data.progress import Progress
from kubetorch.sdk.transport.session import Session
from kubetorch.wire import routes

_SENT = "kubetorch_controller_data_sent_bytes "


def main() -> None:
    """Answer."""
    project, sources = arguments()
    kt.ls()
    sys.path.insert(0, project)
    getters = kt.fn(importlib.import_module("getters").get, name="getters")

    def put_files() -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix="kt-store-", dir=store.FOLDER) as folder:
            try:
                values = {
                    **_large(Path(sources, "large"), folder),
                    **_small(Path(sources, "small"), folder),
                    **_memory(),
                    **_broadcast(getters, folder),
                }
            finally:
                kt.rm("benchmark", recursive=True)
            return values

    def put_weights() -> dict[str, float]:
        weights = {"w": numpy.frombuffer(os.urandom(2**20) * (store.WEIGHTS // 2**20), "u1")}
        # Tensors of other bytes each: a store has equal chunks once.
        weights = {"w": weights["w"] + numpy.arange(store.WEIGHTS, dtype="u4").view("u1")[::4]}
        return {"seconds": driving.clock(lambda: kt.put("weights", src=weights))}

    def get_weights() -> dict[str, float]:
        dest = {"w": numpy.zeros(store.WEIGHTS, "u1")}
        return {"seconds": driving.clock(lambda: kt.get("weights", dest=dest))}

    def scattered() -> dict[str, float]:
        try:
            return _scattered()
        finally:
            kt.rm("benchmark", recursive=True)

    questions = {"files": put_files, "scattered": scattered}
    answer({**questions, "put_weights": put_weights, "get_weights": get_weights})


def _large(file: Path, folder: str) -> dict[str, float]:
    store.settle(has_deleted_files=True)
    put = driving.clock(lambda: kt.put("benchmark/large", file))
    store.settle()
    get = driving.clock(lambda: kt.get("benchmark/large", f"{folder}/out/"))
    shutil.rmtree(f"{folder}/out")
    store.change(file)
    progress = Progress("storing", "large")
    files.put(
        backend.session(),
        config.namespace,
        "benchmark/large",
        [str(file)],
        progress,
        contents=False,
        filter_options=None,
        is_forced=False,
        lifespan=None,
    )
    return {
        "put": store.SIZE / put,
        "get": store.SIZE / get,
        "changed": progress.moved / store.SIZE,
    }


def _small(source: Path, folder: str) -> dict[str, float]:
    store.settle()
    put = driving.clock(lambda: kt.put("benchmark/small", source))
    store.settle()
    get = driving.clock(lambda: kt.get("benchmark/small", f"{folder}/out"))
    kt.put("benchmark/small", source)  # files that were new are read once more
    unchanged = driving.clock(lambda: kt.put("benchmark/small", source))
    shutil.rmtree(f"{folder}/out")
    return {"put small": put, "get small": get, "unchanged": unchanged}


def _memory() -> dict[str, float]:
    """The peak of this process; that of `getrusage` begins with that of the parent."""
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return {"memory": float(peak.split()[1]) * 1024}


def _scattered() -> dict[str, float]:
    """A checkpoint of bfloat16, put from afar, of which 1 % of the elements change at random."""
    generator = numpy.random.default_rng()
    layers = {
        f"layer.{number}": (generator.standard_normal(store.CHECKPOINT // 16, "f4") * 0.02)
        .view("u4")
        .__rshift__(16)
        .astype("u2")
        for number in range(8)
    }
    far = Session(backend.session().controller, is_local=False)

    def put() -> Progress:
        progress = Progress("storing", "benchmark/checkpoint")
        tensors.put(far, config.namespace, "benchmark/checkpoint", layers, progress)
        return progress

    store.settle()
    first = driving.clock(put)
    for layer in layers.values():
        places = generator.integers(0, len(layer), len(layer) // 100)
        layer[places] ^= generator.integers(1, 256, len(places)).astype("u2")
    moved: list[int] = []
    store.settle()
    second = driving.clock(lambda: moved.append(put().moved))
    return {"scattered": moved[0] / store.CHECKPOINT, "scattered time": second / first}


def _broadcast(getters: kt.Fn[[str, str], float], folder: str) -> dict[str, float]:
    """Many pods get a key at the same time."""
    source = Path(folder, "shared")
    source.mkdir()
    with (source / "file").open("wb") as file:
        for _ in range(store.SHARED // 2**20):
            file.write(os.urandom(2**20))
    kt.put("benchmark/shared", source, contents=True)
    getters.to(kt.Compute(cpus="0.1", replicas=store.PODS))  # once, they are there
    before = _sent()
    seconds = driving.clock(lambda: getters("benchmark/shared", f"{folder}/pods"))
    copies = (_sent() - before) / store.SHARED
    return {"copies": copies, "copy": seconds / store.PODS}


def _sent() -> int:
    """Bytes that the store has sent."""
    text = backend.session().ask(lambda controller: controller.ask("GET", routes.METRICS)).decode()
    return int(next(line[len(_SENT) :] for line in text.splitlines() if line.startswith(_SENT)))


if __name__ == "__main__":
    main()
