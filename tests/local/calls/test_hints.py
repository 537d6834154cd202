"""Errors and warnings of programs that lead on: what was meant, and what to write instead."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import zipapp
from urllib.parse import urlsplit

import numpy as np
import pytest

import kubetorch as kt
from tests.local.user_project import UserProject


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture
def project(tmp_path):
    """A folder for programs, whose services are torn down at the end."""
    project = UserProject(tmp_path / "shop")
    yield project
    for view in kt.globals.controller_client().list_workloads():
        kt.Module.from_name(view.spec.name, view.spec.namespace).teardown()
    project.forget()


@pytest.fixture
def module(project):
    return project.module


COMPUTE = kt.Compute(cpus="0.1")


def errors_of(project, name, source):
    completed = project.run(project.write(name, source))
    assert completed.returncode == 1
    return completed.stderr


# ------------------------------------------------------------------------------- event loops

IN_LOOP = """
import asyncio
import kubetorch as kt

async def one(x):
    return x

def helper(remote):
    return remote(3)

async def main():
    remote = kt.fn(one).to(kt.Compute(cpus="0.1"))
    for x in range(2):
        assert remote(x) == x
    assert helper(remote) == 3
    assert list(remote.map([4])) == [4]
    assert remote.spawn(5).get() == 5
    {then}

asyncio.run(main())
"""


def test_calls_that_block_an_event_loop_warn_once_and_name_async(project):
    completed = project.run(project.write("looped.py", IN_LOOP.format(then="pass")))
    assert completed.returncode == 0, completed.stderr
    warnings = [line for line in completed.stderr.splitlines() if "blocks the event loop" in line]
    assert [line.rpartition("; ")[2] for line in warnings] == [
        "await one(..., async_=True) lets other coroutines run",
        "async for value in one.map_async(...) lets other coroutines run",
        "await handle lets other coroutines run",
    ]


def test_gather_of_calls_is_explained_before_its_type_error(project):
    text = errors_of(
        project, "gather.py", IN_LOOP.format(then="await asyncio.gather(remote(1), remote(2))")
    )
    assert "await one(..., async_=True)" in text.partition("Traceback")[0]
    assert "TypeError" in text


def test_calls_outside_of_a_loop_and_awaited_calls_warn_of_nothing(project):
    source = """
    import asyncio
    import kubetorch as kt

    def one(x):
        return x

    async def main():
        print(await asyncio.gather(remote(1, async_=True), asyncio.to_thread(remote, 2)))

    remote = kt.fn(one).to(kt.Compute(cpus="0.1"))
    remote(1)
    asyncio.run(main())
    """
    completed = project.run(project.write("quiet.py", source))
    assert (completed.stdout, "blocks" in completed.stderr) == ("[1, 2]\n", False)


# ------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("codec", ["json", "pickle"])
def test_a_lock_is_named_with_its_place_and_where_it_is_made_instead(module, codec):
    compute = kt.Compute(cpus="0.1", allowed_serialization=[codec])
    remote = kt.fn(module("def echo(x):\n    return x\n").echo).to(compute)
    with pytest.raises(kt.SerializationError) as error:
        remote({"of": [1, threading.Lock()]})
    assert error.value.message.startswith('args[0]["of"][1] is a')
    assert "lock" in error.value.message
    assert "at the top level of the module" in error.value.hint
    assert "pickle" not in error.value.hint


def test_an_array_that_plain_http_cannot_carry_says_tolist(module):
    source = "import numpy\n\ndef array(n):\n    return numpy.zeros(n)\n"
    remote = kt.fn(module(source).array).to(COMPUTE)
    assert np.array_equal(remote(2), np.zeros(2))
    url = urlsplit(remote.endpoint())
    client = http.client.HTTPConnection(url.hostname, url.port, timeout=100)
    client.request("POST", url.path, b'{"args": [2]}', remote.request_headers)
    answer = json.loads(client.getresponse().read())
    client.close()
    assert answer["error_type"] == "SerializationError"
    assert "return its .tolist()" in answer["state"]["hint"]


# ------------------------------------------------------------------------- names of handles


def test_a_decorated_function_in_its_own_pod_says_how_to_get_a_handle_of_itself(project):
    source = """
    import kubetorch as kt

    @kt.compute(cpus="0.1")
    def recursive(n):
        return n if n == 0 else recursive.spawn(n - 1).result()

    if __name__ == "__main__":
        recursive.deploy()
        recursive(1)
    """
    text = errors_of(project, "selfspawn.py", source)
    assert "is the function itself, and no handle: kt.fn(name='recursive').spawn\n" in text


def test_a_class_that_can_be_called_says_where_its_map_is(module):
    source = """
    class Predictor:
        def __call__(self, x):
            return x + 1

        def other(self):
            pass
    """
    remote = kt.cls(module(source).Predictor).to(COMPUTE)
    for verb in ("map", "spawn", "options"):
        with pytest.raises(AttributeError, match=rf'hint: methods .*\["__call__"\].{verb}\('):
            getattr(remote, verb)
    with pytest.raises(AttributeError, match=r"hint: kt logs predictor"):
        _ = remote.logs
    assert list(remote["__call__"].map([1, 2])) == [2, 3]


def test_a_decorated_function_that_is_not_deployed_says_deploy(project):
    source = """
    import kubetorch as kt

    @kt.compute(cpus="0.1")
    def undeployed(x):
        return x

    undeployed(1)
    """
    assert "hint: deploy it with undeployed.deploy()" in errors_of(project, "lazy.py", source)


def test_a_name_that_is_bound_below_the_deploy_says_that_the_import_ended_there(project):
    source = """
    import kubetorch as kt

    def inner(x):
        return x

    def outer(x):
        return f(x) + wrong(x)

    f = kt.fn(inner).to(kt.Compute(cpus="0.1"))
    g = kt.fn(outer).to(kt.Compute(cpus="0.1"))
    g(1)
    """
    text = errors_of(project, "below.py", source)
    assert "hint: in pods the import of below.py ended at line 10, which deploys or calls" in text
    assert "so 'f' is not defined there: define it above that line" in text
    # A name that is bound nowhere is Python's own error.
    text = errors_of(project, "below.py", source.replace("return f(x) + ", "return "))
    assert "NameError: name 'wrong' is not defined" in text
    assert "the import of" not in text


# ------------------------------------------------------------------------------------ losses


def test_a_worker_that_dies_is_named_with_its_service(module):
    source = "import os, signal\n\ndef die(x):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    remote = kt.fn(module(source).die, name="mortal").to(COMPUTE)
    with pytest.raises(kt.WorkerDiedError, match="the worker of mortal in mortal-"):
        remote(1)


def test_a_spawned_call_whose_agent_is_started_again_says_what_to_do(module):
    source = "import time\n\ndef slow(x):\n    time.sleep(x)\n"
    remote = kt.fn(module(source).slow, name="orphaned").to(COMPUTE)
    handle = remote.spawn(1000)
    os.kill(remote.service_config["pods"][0]["pid"], signal.SIGKILL)
    with pytest.raises(kt.PodTerminatedError) as error:
        handle.get(timeout=100)
    assert "f.spawn(...) anew" in str(error.value.hint)


# ---------------------------------------------------------------------------- files and imports


def test_a_program_whose_folder_was_deleted_says_so(project):
    source = """
    import os, shutil
    import kubetorch as kt
    {module}

    def here(x):
        return x

    folder = os.path.dirname(os.path.abspath(__file__))
    os.chdir("/")
    shutil.rmtree(folder)
    kt.fn({callable}).to(kt.Compute(cpus="0.1"))
    """
    for module, name in (("", "here"), ("import other", "other.there")):
        project.folder.mkdir(exist_ok=True)
        project.write("other.py", "def there(x):\n    return x\n")
        text = errors_of(project, "gone.py", source.format(module=module, callable=name))
        assert ".py, which this program has loaded, has been moved or deleted since" in text


def test_a_program_whose_working_directory_was_deleted_says_so(project):
    source = """
    import os, tempfile
    import kubetorch as kt

    os.chdir(tempfile.mkdtemp())
    os.rmdir(os.getcwd())
    kt.fn(name="absent")
    """
    text = errors_of(project, "nowhere.py", source)
    assert "the working directory of this program has been deleted\nhint: " in text


def test_a_zipapp_says_that_pods_cannot_import_from_it(project):
    project.write(
        "packed/__main__.py",
        """
        import kubetorch as kt

        def inside(x):
            return x

        kt.fn(inside).to(kt.Compute(cpus="0.1"))
        """,
    )
    zipapp.create_archive(project.folder / "packed", project.folder / "packed.pyz")
    completed = project.run(project.folder / "packed.pyz")
    assert (
        f"lies in the archive {project.folder / 'packed.pyz'}, which pods cannot"
        in completed.stderr
    )


def test_an_import_error_in_a_pod_is_explained_once(project):
    source = """
    import os
    import kubetorch as kt

    if os.environ.get("KT_SERVICE_NAME"):
        import nosuchpackage

    def imports(x):
        return x

    if __name__ == "__main__":
        kt.fn(imports).to(kt.Compute(cpus="0.1"))
    """
    text = errors_of(project, "absent.py", source)
    assert (text.count("searched the project's roots"), text.count("hint: ")) == (1, 1)
    assert text.endswith('pip_install(["nosuchpackage"])) installs it in the pods\n')


def test_cells_of_a_notebook_that_call_warn_of_nothing():
    """As the cells run: plain code in a coroutine of the kernel's own."""
    program = """
import asyncio, sys
from kubetorch.sdk.calls import blocking

def run(module):
    names = {"__name__": module, "cell": cell}
    exec("async def run_code():\\n    cell()", names)
    asyncio.run(names["run_code"]())

def cell():
    blocking.warn_in_loop("f(...)", "await f(..., async_=True)")

run(sys.argv[1])
"""
    for module, lines in (("IPython.core.interactiveshell", 0), ("__main__", 1)):
        words = [sys.executable, "-c", program, module]
        completed = subprocess.run(words, capture_output=True, text=True, timeout=100)
        assert completed.stderr.count("blocks the event loop") == lines, completed.stderr
