"""How workers load: paths, failures of user code, module-level deploys, environment."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from kubetorch.errors import WorkerDiedError
from kubetorch.pod.worker_process.worker import LoadFailed
from kubetorch.wire.exceptions import Failure
from tests.local.worker_harness import Agent, agent, run

#: What the SDK does in `.to()`.
DEPLOY = '''
import sys

class Handle:
    """Stands for kubetorch's own."""
    def __init__(self, function): self.__wrapped__ = function
    def to(self):
        importing = sys.modules.get("kubetorch.pod.user_process.loader")
        if importing is not None and importing.is_deploying():
            return self
        raise AssertionError("deployed")
Handle.__module__ = "kubetorch.sdk.fn"
'''


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


async def load_failure(a: Agent, name: str, **options: Any) -> Failure:
    worker = await a.start(name, **options)
    with pytest.raises(LoadFailed) as caught:
        await worker.load(20)
    return caught.value.failure


@pytest.mark.parametrize(
    ("source", "error_type", "shown"),
    [
        ("def train(:\n    pass", "SyntaxError", "def train(:"),
        ("raise ValueError('at import')", "ValueError", "raise ValueError('at import')"),
        ("import sys\nsys.exit(4)", "SystemExit", "sys.exit(4)"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", "raise KeyboardInterrupt"),
        ("x = 1", "CallableNotFoundError", "no 'train'"),
        ("def f():\n  class train: pass", "CallableNotFoundError", "no 'train'"),
        ("def train(): pass\ntrain = 5", "CallableNotFoundError", "type int, not a function"),
        ("class train: pass", "CallableNotFoundError", "is a class, not a function"),
    ],
)
def test_an_import_that_fails_is_the_users_failure(
    tmp_path: Path, source: str, error_type: str, shown: str
) -> None:
    write(tmp_path, "shop.py", source)

    async def main() -> None:
        async with agent(tmp_path) as a:
            failure = await load_failure(a, "train")
            assert failure.error_type == error_type
            # Without a frame of the user there is no traceback to show.
            assert shown in (failure.traceback or failure.message)
            assert "kubetorch/pod" not in failure.traceback
            assert a.exits == []
            write(tmp_path, "shop.py", "def train(): return 'repaired'")
            assert await a.call(await a.worker("train")) == "repaired"

    run(main())


def test_a_constructor_that_fails_is_the_users_failure(tmp_path: Path) -> None:
    write(tmp_path, "shop.py", "class Shop:\n    def __init__(self, n): self.n = 1 / n\n")

    async def main() -> None:
        async with agent(tmp_path) as a:
            failure = await load_failure(a, "Shop", init_args='{"n": 0}')
            assert failure.error_type == "ZeroDivisionError"
            assert "self.n = 1 / n" in failure.traceback
            failure = await load_failure(a, "Shop")
            assert failure.error_type == "TypeError"
            assert "'n'" in failure.message

    run(main())


def test_a_name_that_is_no_class_any_more_is_the_users_failure(tmp_path: Path) -> None:
    write(tmp_path, "shop.py", "class Shop: pass\nShop = Shop()\n")

    async def main() -> None:
        async with agent(tmp_path) as a:
            failure = await load_failure(a, "Shop", init_args="{}")
            assert failure.error_type == "CallableNotFoundError"
            assert "a value of type Shop, not a class" in failure.message

    run(main())


def test_a_function_may_be_any_object_that_can_be_called(tmp_path: Path) -> None:
    source = """
        import functools
        class Adder:
            def __call__(self, n): return n + 1
        train, half = Adder(), functools.partial(divmod, 8)
    """
    write(tmp_path, "shop.py", textwrap.dedent(source))

    async def main() -> None:
        async with agent(tmp_path) as a:
            assert await a.call(await a.worker("train"), 1) == 2
            assert await a.call(await a.worker("half"), 3) == [2, 2]

    run(main())


@pytest.mark.parametrize("ending", ["os._exit(3)", "os.kill(os.getpid(), 11)"])
def test_an_import_that_ends_the_interpreter_ends_only_its_worker(
    tmp_path: Path, ending: str
) -> None:
    write(tmp_path, "shop.py", f"import os\nprint('here')\n{ending}\n")

    async def main() -> None:
        async with agent(tmp_path) as a:
            worker = await a.start("train")
            with pytest.raises(WorkerDiedError, match="while it loaded train") as caught:
                await worker.load(20)
            assert caught.value.exit_code in (3, -11)
            assert caught.value.pod_name == "pod-0"
            assert "here" in a.texts
            write(tmp_path, "shop.py", "def train(): return 1")
            assert await a.call(await a.worker("train")) == 1

    run(main())


def test_an_import_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    write(tmp_path, "shop.py", "import time\ntime.sleep(60)\n")

    async def main() -> None:
        async with agent(tmp_path) as a:
            worker = await a.start("train")
            with pytest.raises(WorkerDiedError, match="was not loaded within 0 s"):
                await worker.load(0.3)
            assert not worker.is_alive

    run(main())


def test_a_missing_module_is_explained(tmp_path: Path) -> None:
    write(tmp_path, "shop.py", "import sklearn_not_there.linear\n")
    write(tmp_path, "other.py", "import skimage.color\ndef train(): pass\n")

    async def main() -> None:
        async with agent(tmp_path) as a:
            failure = await load_failure(a, "train")
            assert failure.error_type == "ModuleNotFoundError"
            assert str(tmp_path) in failure.message
            assert "pip install sklearn_not_there" in failure.message
            failure = await load_failure(a, "train", module="other")
            assert "pip install scikit-image" in failure.message
            failure = await load_failure(a, "train", module="nowhere")
            assert "nowhere" in failure.message

    run(main())


def test_packages_scripts_and_files_named_like_library_modules_load(tmp_path: Path) -> None:
    write(tmp_path, "pkg/__init__.py", "")
    write(tmp_path, "pkg/inner/__init__.py", "")
    write(tmp_path, "pkg/inner/job.py", "from ..helper import value\ndef train(): return value\n")
    write(tmp_path, "pkg/helper.py", "value = 5\n")
    write(tmp_path, "queue.py", "def train(): return 'mine'\n")
    write(
        tmp_path,
        "shop.py",
        "import inspect, sys\n"
        "class Model:\n    pass\n"
        "def train():\n"
        "    import __main__\n"
        "    return [__name__, __main__.Model is Model, sys.argv, 'def train' in"
        " inspect.getsource(train), __spec__.name]\n",
    )

    async def main() -> None:
        async with agent(tmp_path) as a:
            assert await a.call(await a.worker("train", module="pkg.inner.job")) == 5
            assert await a.call(await a.worker("train", module="queue")) == "mine"
            script = await a.worker("train", is_script=True)
            assert await a.call(script) == ["shop", True, ["shop.py"], True, "shop"]

    run(main())


def test_classes_of_a_script_are_found_in_pickles_that_call_it_main(tmp_path: Path) -> None:
    write(
        tmp_path,
        "shop.py",
        "class Point:\n    def __init__(self, x): self.x = x\ndef train(p): return p.x\n",
    )

    async def main() -> None:
        async with agent(tmp_path) as a:
            worker = await a.worker("train", is_script=True, modules={"__main__": "shop"})
            import pickle
            import types

            module = types.ModuleType("__main__")
            exec((tmp_path / "shop.py").read_text(), module.__dict__)
            before = sys.modules["__main__"]
            sys.modules["__main__"] = module
            try:
                data = pickle.dumps({"args": [module.Point(7)], "kwargs": {}})
            finally:
                sys.modules["__main__"] = before
            assert await a.call(worker, codec="pickle", arguments=[data]) == 7

    run(main())


# ------------------------------------------------------------------------- module-level .to()


def test_the_import_of_the_deployed_file_ends_at_its_first_to(tmp_path: Path) -> None:
    write(tmp_path, "fake.py", DEPLOY)
    write(
        tmp_path,
        "shop.py",
        "from fake import Handle\n"
        "before = 1\n"
        "def train(): return [before, globals().get('after'), __name__]\n"
        "handle = Handle(train).to()\n"
        "after = 2\n"
        "raise AssertionError('the deploying program ran')\n",
    )

    async def main() -> None:
        async with agent(tmp_path) as a:
            assert await a.call(await a.worker("train")) == [1, None, "shop"]

    run(main())


def test_a_deploy_inside_a_function_or_a_loop_ends_the_import_too(tmp_path: Path) -> None:
    write(tmp_path, "fake.py", DEPLOY)
    write(
        tmp_path,
        "shop.py",
        "import asyncio\n"
        "from fake import Handle\n"
        "def train(): return 'ok'\n"
        "async def main():\n"
        "    try:\n"
        "        Handle(train).to()\n"
        "    except Exception:\n"
        "        raise AssertionError('caught')\n"
        "asyncio.run(main())\n"
        "raise AssertionError('the deploying program ran')\n",
    )

    async def main() -> None:
        async with agent(tmp_path) as a:
            worker = await a.worker("train")
            assert await a.call(worker) == "ok"

    run(main())


def test_a_to_before_the_callable_is_defined_does_nothing(tmp_path: Path) -> None:
    write(tmp_path, "fake.py", DEPLOY)
    write(
        tmp_path,
        "shop.py",
        "from fake import Handle\n"
        "def other(): pass\n"
        "other_handle = Handle(other).to()\n"
        "class Shop:\n"
        "    def get(self): return 'fine'\n"
        "Handle(Shop).to()\n"
        "raise AssertionError('the deploying program ran')\n",
    )

    async def main() -> None:
        async with agent(tmp_path) as a:
            assert await a.call(await a.worker("Shop"), method="get") == "fine"

    run(main())


def test_a_to_in_an_imported_module_does_nothing(tmp_path: Path) -> None:
    write(tmp_path, "fake.py", DEPLOY)
    write(
        tmp_path,
        "helper.py",
        "from fake import Handle\ndef f(): pass\nHandle(f).to()\ncomplete = True\n",
    )
    write(
        tmp_path,
        "shop.py",
        "def train(): return [helper.complete, later]\nimport helper\nlater = 1\n",
    )

    async def main() -> None:
        async with agent(tmp_path) as a:
            assert await a.call(await a.worker("train")) == [True, 1]

    run(main())


def test_a_to_in_user_code_at_run_time_deploys(tmp_path: Path) -> None:
    write(tmp_path, "fake.py", DEPLOY)
    write(tmp_path, "shop.py", "from fake import Handle\ndef train():\n    Handle(train).to()\n")

    async def main() -> None:
        async with agent(tmp_path) as a:
            failure = await a.failure(await a.worker("train"))
            assert failure.message == "deployed"

    run(main())


def test_a_name_that_is_bound_to_a_handle_loads_what_it_wraps(tmp_path: Path) -> None:
    write(tmp_path, "fake.py", DEPLOY)
    write(
        tmp_path,
        "shop.py",
        "import functools\n"
        "from fake import Handle\n"
        "def twice(f):\n"
        "    @functools.wraps(f)\n"
        "    def inner(*a): return [f(*a), f(*a)]\n"
        "    return inner\n"
        "@twice\n"
        "def train(x): return x\n"
        "train = Handle(train)\n"
        "train.to()\n",
    )

    async def main() -> None:
        async with agent(tmp_path) as a:
            # The handle is taken off, the user's own decorator stays.
            assert await a.call(await a.worker("train"), 3) == [3, 3]

    run(main())


def test_a_spawned_child_that_imports_the_file_again_does_not_deploy(tmp_path: Path) -> None:
    write(
        tmp_path,
        "fake.py",
        DEPLOY.replace(
            'sys.modules.get("kubetorch.pod.user_process.loader")',
            '__import__("kubetorch.pod.user_process.loader", fromlist=["loader"])',
        ),
    )
    write(
        tmp_path,
        "shop.py",
        "import multiprocessing\n"
        "from fake import Handle\n"
        "def square(x): return x * x\n"
        "def train():\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        return pool.map(square, [1, 2, 3])\n"
        "Handle(train).to()\n"
        "extra = 1\n",
    )

    async def main() -> None:
        async with agent(tmp_path) as a:
            assert await a.call(await a.worker("train", is_script=True)) == [1, 4, 9]

    run(main())


# --------------------------------------------------------------------------------- environment


def test_a_worker_has_exactly_the_environment_it_was_given(tmp_path: Path) -> None:
    write(
        tmp_path,
        "shop.py",
        "import os, random, signal, subprocess, sys, time\n"
        "def train():\n"
        "    child = subprocess.run([sys.executable, '-c', 'import shop, os; "
        'print(os.environ["WORD"])\'], capture_output=True, text=True)\n'
        "    return {'env': dict(os.environ), 'cwd': os.getcwd(), 'zone': time.tzname[0],\n"
        "            'argv': sys.argv, 'path': sys.path[0], 'child': child.stdout.strip(),\n"
        "            'threads': os.environ.get('OMP_NUM_THREADS'), 'random': random.random(),\n"
        "            'leader': os.getsid(0) == os.getpid() == os.getpgid(0),\n"
        "            'term': signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,\n"
        "            'stdin': sys.stdin.read()}\n",
    )

    async def main() -> None:
        async with agent(tmp_path) as a:
            first = await a.call(await a.worker("train", env={"WORD": "one", "TZ": "Asia/Tokyo"}))
            assert first["env"]["WORD"] == first["child"] == "one"
            assert first["zone"] == "JST"
            assert first["cwd"] == first["path"] == str(tmp_path)
            assert first["leader"]
            assert first["term"]
            assert first["stdin"] == ""
            assert first["threads"] == os.environ.get("OMP_NUM_THREADS")
            assert first["env"]["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)
            second = await a.call(await a.worker("train", env={"WORD": "two", "KT_X": "1"}))
            assert second["env"]["WORD"] == "two"
            assert "TZ" not in second["env"] or second["env"]["TZ"] == os.environ.get("TZ")
            assert first["random"] != second["random"]

    run(main())


def test_a_folder_that_is_not_there_is_a_failure_that_names_it(tmp_path: Path) -> None:
    write(tmp_path, "shop.py", "def train(): pass")

    async def main() -> None:
        async with agent(tmp_path) as a:
            failure = await load_failure(a, "train", cwd="/does/not/exist")
            assert failure.error_type == "FileNotFoundError"
            assert "/does/not/exist" in failure.message

    run(main())


def test_an_interpreter_that_is_not_there_is_a_typed_error(tmp_path: Path) -> None:
    async def main() -> None:
        async with agent(tmp_path, python="/does/not/exist/python") as a:
            with pytest.raises(WorkerDiedError, match="/does/not/exist/python"):
                await a.start("train")

    run(main())


def test_user_code_sees_its_call_and_reports_progress(tmp_path: Path) -> None:
    write(
        tmp_path,
        "shop.py",
        "import sys\n"
        "def train(n):\n"
        "    context = sys.modules['kubetorch.pod.user_process.current_call']\n"
        "    for i in range(n):\n"
        "        context.progress(i, n, f'step {i}')\n"
        "    return context.request_id()\n",
    )

    async def main() -> None:
        async with agent(tmp_path) as a:
            worker = await a.worker("train")
            call = a.open(worker, 10_000)
            assert await call.result() == "request-7"
            assert call.progress[0] == (0, 10_000, "step 0")
            assert call.progress[-1] == (9_999, 10_000, "step 9999")
            assert len(call.progress) < 200

    run(main())


def test_the_package_of_the_agent_is_used_whatever_the_interpreter_has(tmp_path: Path) -> None:
    write(tmp_path, "kubetorch/__init__.py", "raise AssertionError('the wrong package')\n")
    write(
        tmp_path,
        "shop.py",
        "import kubetorch, sys\n"
        "def train():\n"
        "    return [kubetorch.__file__, [name.partition('.')[0] for name in sys.modules]]\n",
    )

    async def main() -> None:
        async with agent(tmp_path) as a:
            file, modules = await a.call(await a.worker("train"))
            import kubetorch

            assert file == kubetorch.__file__
            assert not {"msgspec", "uvloop", "httptools", "zstandard", "blake3"} & set(modules)

    run(main())
