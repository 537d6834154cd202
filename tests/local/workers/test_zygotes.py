"""Zygotes: what is preloaded, when forks are sound, what follows when they are not."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import clock_loop
from kubetorch.errors import WorkerDiedError
from kubetorch.pod.tuning import LIMITS
from kubetorch.pod.worker_process.zygotes import ZygoteHandle, ZygoteSpec, launch_zygote
from tests.local.worker_harness import agent, environment, run

SHOP = """
import os, sys

class Shop:
    def loaded(self): return sorted(name for name in sys.modules if "." not in name)
    def parent(self): return os.getppid()
    def variable(self, name): return os.environ.get(name)
    def version(self):
        import plugin
        return plugin.VERSION
    def numbers(self, n):
        import ctypes, pathlib, random
        import numpy as np
        a = np.random.default_rng(0).random((600, 600))
        first = a @ a
        ok = bool(np.allclose(first, np.einsum("ij,jk->ik", a, a)))
        [path] = [p for p in pathlib.Path(np.__file__).parents[1].glob("numpy.libs/*openblas*")]
        library = ctypes.CDLL(str(path))
        return {
            "ok": ok,
            "threads": library.scipy_openblas_get_num_threads64_(),
            "tasks": len(os.listdir("/proc/self/task")),
            "draws": [random.random(), float(np.random.rand())],
        }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for name, source in {
        "plugin": "VERSION = 1",
        "quiet": "import plugin",
        "starts_thread": "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()",
        "fails": "raise ValueError('no')",
        "exits": "import sys; sys.exit(3)",
        "ends": "import os; os._exit(3)",
        "jax": "import os; RANK = os.environ.get('RANK')",
    }.items():
        (libraries / f"{name}.py").write_text(source)
    return tmp_path


def test_workers_are_forks_that_have_the_preloaded_modules(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            options = {"library_path": (str(folder / "libraries"),), "preload": ("quiet",)}
            worker = await a.worker("Shop", **options)
            loaded = await a.call(worker, method="loaded")
            assert {"quiet", "plugin", "shop"} <= set(loaded)
            assert await a.call(worker, method="parent") == a.host.zygote_pid
            first = a.host.zygote_pid
            second_worker = await a.worker("Shop", **options)
            assert await a.call(second_worker, method="parent") == first
            assert ("preloading", "quiet") in a.stages

    run(main())


def test_a_zygote_that_was_started_before_its_agent_is_used_where_it_fits(folder: Path) -> None:
    zygote = launch_zygote(sys.executable, environment())

    async def main() -> None:
        async with agent(folder, zygote=zygote) as a:
            options = {"library_path": (str(folder / "libraries"),), "preload": ("quiet",)}
            worker = await a.worker("Shop", env={"KT_SERVICE": "shop"}, **options)
            assert await a.call(worker, method="parent") == zygote.pid
            assert await a.call(worker, "KT_SERVICE", method="variable") == "shop"
            assert "plugin" in await a.call(worker, method="loaded")

    run(main())


def test_a_zygote_that_is_a_fork_is_like_one_that_was_started(folder: Path) -> None:
    program = f"""
import asyncio, json, os, sys
from pathlib import Path
from kubetorch.pod.worker_process import zygotes
sys.path.append({str(Path(__file__).parents[3])!r})
zygote = zygotes.fork_zygote()
from tests.local.worker_harness import agent, environment

async def main():
    async with agent(Path({str(folder)!r}), zygote=zygote) as a:
        worker = await a.worker("Shop", library_path=(str(a.folder / "libraries"),))
        assert await a.call(worker, method="parent") == zygote.pid
        assert await a.call(worker, "OMP_NUM_THREADS", method="variable") is None
        assert os.getsid(zygote.pid) == zygote.pid
        print(json.dumps(await a.call(worker, method="loaded")))

asyncio.run(main())
"""
    completed = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert completed.returncode == 0, completed.stderr
    loaded = set(json.loads(completed.stdout))
    assert "shop" in loaded and not {"msgspec", "uvloop", "httptools"} & loaded


def test_a_zygote_with_another_environment_ends_unused(folder: Path) -> None:
    zygote = launch_zygote(sys.executable, environment())

    async def main() -> None:
        async with agent(folder, zygote=zygote) as a:
            worker = await a.worker("Shop", env={"LIMIT": "7"})
            assert await a.call(worker, method="parent") != zygote.pid
            assert await a.call(worker, "LIMIT", method="variable") == "7"
        while Path("/proc", str(zygote.pid)).exists():
            await asyncio.sleep(0.01)

    run(main())


def test_more_modules_are_preloaded_by_the_same_zygote(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            path = (str(folder / "libraries"),)
            await a.worker("Shop", library_path=path)
            first = a.host.zygote_pid
            worker = await a.worker("Shop", library_path=path, preload=("plugin",))
            assert a.host.zygote_pid == first
            assert "plugin" in await a.call(worker, method="loaded")

    run(main())


def test_a_zygote_can_be_made_ready_before_it_is_needed(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            spec = a.spec("Shop", library_path=(str(folder / "libraries"),), preload=("plugin",))
            zygote = ZygoteSpec(spec.python, spec.env, spec.library_path, spec.preload)
            await a.host.prewarm(zygote)
            first = a.host.zygote_pid
            worker = await a.host.start(spec, lambda *stage: a.stages.append(stage))
            await worker.load(20)
            assert a.stages == []
            assert await a.call(worker, method="parent") == first

    run(main())


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("starts_thread", "importing starts_thread starts threads"),
        ("ends", "while it imported ends"),
    ],
)
def test_an_import_that_is_not_safe_to_fork_leads_to_a_fresh_interpreter(
    folder: Path, module: str, reason: str
) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            options = {"library_path": (str(folder / "libraries"),), "preload": (module,)}
            worker = await a.worker("Shop", **options)
            assert any(
                stage == "starting" and "fresh interpreter" in message and reason in message
                for stage, message in a.stages
            )
            assert module not in await a.call(worker, method="loaded")
            # Known by now: it is not tried again.
            a.stages.clear()
            await a.worker("Shop", **options)
            assert [stage for stage, _ in a.stages] == ["starting"]
            # What is sound is forked again.
            a.stages.clear()
            await a.worker("Shop")
            assert a.stages == []

    run(main())


@pytest.mark.parametrize("preload", [(), ("plugin",)])
def test_a_zygote_that_an_abandoned_import_made_unfit_starts_no_worker(
    folder: Path, preload: tuple[str, ...]
) -> None:
    gate = folder / "gate"
    os.mkfifo(gate)
    (folder / "libraries" / "slow.py").write_text(
        f"open({str(gate)!r}).read()\nimport starts_thread"
    )

    async def main() -> None:
        async with agent(folder) as a:
            path = (str(folder / "libraries"),)
            abandoned = asyncio.create_task(a.start("Shop", library_path=path, preload=("slow",)))
            # It is imported from here on.
            writing = await asyncio.to_thread(gate.open, "w")
            first = a.host.zygote_pid
            abandoned.cancel()
            await asyncio.wait([abandoned])
            starting = asyncio.create_task(a.worker("Shop", library_path=path, preload=preload))
            writing.close()
            worker = await starting
            assert a.host.zygote_pid != first
            assert await a.call(worker, method="parent") == a.host.zygote_pid
            loaded = await a.call(worker, method="loaded")
            assert "slow" not in loaded
            assert set(preload) <= set(loaded)
            assert not any("fresh" in message for _, message in a.stages)

    run(main())


def test_a_worker_that_dies_meanwhile_does_not_end_a_preload(folder: Path) -> None:
    gate = folder / "gate"
    os.mkfifo(gate)
    (folder / "libraries" / "slow.py").write_text(f"open({str(gate)!r}).read()")

    async def main() -> None:
        async with agent(folder) as a:
            path = (str(folder / "libraries"),)
            worker = await a.worker("Shop", library_path=path)
            first = a.host.zygote_pid
            starting = asyncio.create_task(a.worker("Shop", library_path=path, preload=("slow",)))
            # It is imported from here on.
            writing = await asyncio.to_thread(gate.open, "w")
            os.kill(worker.pid, signal.SIGTERM)
            error = await a.exit()
            assert isinstance(error, WorkerDiedError)
            assert error.exit_code == -signal.SIGTERM
            writing.close()
            second_worker = await starting
            assert a.host.zygote_pid == first
            assert "slow" in await a.call(second_worker, method="loaded")
            assert await a.call(second_worker, method="parent") == first

    run(main())


def test_a_preload_is_given_up_only_if_it_fails_again_and_again(folder: Path) -> None:
    flag = folder / "flag"
    flaky = folder / "libraries" / "flaky.py"
    flaky.write_text(
        f"import os, pathlib\nflag = pathlib.Path({str(flag)!r})\n"
        "if flag.exists():\n    flag.unlink()\n    os._exit(3)"
    )

    async def main() -> None:
        async with agent(folder) as a:
            options = {"library_path": (str(folder / "libraries"),), "preload": ("flaky",)}
            for _ in range(LIMITS.preload_losses):
                flag.touch()
                worker = await a.worker("Shop", **options)
                assert not flag.exists()
                assert "flaky" in await a.call(worker, method="loaded")
                assert not any("fresh" in message for _, message in a.stages)
                os.utime(flaky, (0, 0))  # another zygote has to preload it

    run(main())


def test_a_zygote_that_takes_long_to_end_does_not_stop_the_end_of_the_agent() -> None:
    async def main() -> None:
        zygote = ZygoteHandle(launch_zygote(sys.executable, environment()), ())
        await zygote.close()  # the time for it is over at once
        with contextlib.suppress(ChildProcessError):  # the time was enough
            os.waitpid(zygote.pid, 0)

    clock_loop.run(main())


@pytest.mark.parametrize("module", ["fails", "exits", "not_there"])
def test_an_import_that_fails_is_left_to_the_worker(folder: Path, module: str) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            options = {"library_path": (str(folder / "libraries"),), "preload": (module, "plugin")}
            worker = await a.worker("Shop", **options)
            assert "plugin" in await a.call(worker, method="loaded")
            assert not any("fresh" in message for _, message in a.stages)

    run(main())


def test_libraries_that_read_a_ranks_variables_are_not_preloaded(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker(
                "Shop", library_path=(str(folder / "libraries"),), preload=("jax", "plugin")
            )
            loaded = await a.call(worker, method="loaded")
            assert "jax" not in loaded
            assert "plugin" in loaded

    run(main())


def test_a_changed_environment_needs_another_zygote(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            first = a.host.zygote_pid
            same = await a.worker("Shop", env={"KT_GENERATION": "2"})
            assert a.host.zygote_pid == first
            assert await a.call(same, "KT_GENERATION", method="variable") == "2"
            second_worker = await a.worker("Shop", env={"WORD": "new"})
            assert a.host.zygote_pid != first
            assert await a.call(second_worker, "WORD", method="variable") == "new"
            # The first one stands by until its workers have ended.
            assert await a.call(worker, method="parent") == first
            await worker.drain(1)
            await same.drain(1)
            for _ in range(2000):
                if not Path(f"/proc/{first}").exists():
                    break
                await asyncio.sleep(0.01)
            assert not Path(f"/proc/{first}").exists()

    run(main())


def test_a_package_that_was_changed_is_imported_anew(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            options = {
                "library_path": (str(folder / "libraries"),),
                "sys_path": (str(folder), str(folder / "libraries")),
                "preload": ("plugin",),
            }
            worker = await a.worker("Shop", **options)
            assert await a.call(worker, method="version") == 1
            first = a.host.zygote_pid
            (folder / "libraries" / "plugin.py").write_text("VERSION = 22")
            changed = await a.worker("Shop", **options)
            assert await a.call(changed, method="version") == 22
            assert a.host.zygote_pid != first

    run(main())


def test_a_zygote_that_is_killed_is_replaced_and_its_workers_live_on(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            first = a.host.zygote_pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            second_worker = await a.worker("Shop")
            assert a.host.zygote_pid != first
            assert await a.call(worker, "HOME", method="variable") == os.environ["HOME"]
            assert await a.call(second_worker, method="parent") == a.host.zygote_pid
            os.kill(worker.pid, signal.SIGKILL)
            await a.exit()

    run(main())


def test_a_stopped_zygote_does_not_hang_the_agent(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            await a.worker("Shop")
            first = a.host.zygote_pid
            assert first is not None
            os.kill(first, signal.SIGSTOP)
            worker = await a.worker("Shop")
            assert a.host.zygote_pid != first
            assert await a.call(worker, method="parent") == a.host.zygote_pid

    run(main())


@pytest.mark.parametrize(("threads", "preload"), [("3", ("numpy",)), (None, ("numpy",)), ("1", ())])
def test_numeric_code_has_its_threads_and_its_own_random_numbers(
    folder: Path, threads: str | None, preload: tuple[str, ...]
) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            env = {} if threads is None else {"OPENBLAS_NUM_THREADS": threads}
            results = []
            for _ in range(2):
                worker = await a.worker("Shop", preload=preload, env=env)
                results.append(await a.call(worker, 1, method="numbers"))
            expected = len(os.sched_getaffinity(0)) if threads is None else int(threads)
            for result in results:
                assert result["ok"]
                assert result["threads"] == expected
            assert results[0]["draws"] != results[1]["draws"]
            assert not any("fresh" in message for _, message in a.stages)

    run(main())


TORCH = """
import os, sys
def loaded(): return "torch" in sys.modules
LOADED_BEFORE = loaded()
import torch
from torch.utils.data import DataLoader, TensorDataset

def train(expected):
    x = torch.randn(256, 256, requires_grad=True)
    (x @ x).sum().backward()
    data = TensorDataset(torch.arange(40, dtype=torch.float32))
    loader = DataLoader(data, batch_size=10, num_workers=2)
    total = sum(float(batch.sum()) for (batch,) in loader)
    return [LOADED_BEFORE, torch.get_num_threads(), total, bool(x.grad is not None)]
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torch_works_in_a_fork(folder: Path) -> None:
    (folder / "trainer.py").write_text(TORCH)

    async def main() -> None:
        async with agent(folder, python=sys.executable) as a:
            worker = await a.worker(
                "train", module="trainer", preload=("torch",), env={"OMP_NUM_THREADS": "2"}
            )
            assert await a.call(worker, 2) == [True, 2, 780.0, True]
            assert not any("fresh" in message for _, message in a.stages)

    run(main())
