"""Programs as users write them: scripts that deploy at module level, `__main__`, interpreters."""

import textwrap

import pytest

import kubetorch as kt
from tests.local.user_project import UserProject


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture
def project(tmp_path):
    return UserProject(tmp_path / "shop")


@pytest.fixture
def run(project):
    """Runs a program, with its output; its services are torn down at the end."""

    def run(name, source, *arguments, **environ):
        completed = project.run(project.write(name, source), *arguments, **environ)
        assert completed.returncode == 0, completed.stderr
        return completed.stdout.splitlines()

    yield run
    for view in kt.globals.controller_client().list_workloads():
        kt.Module.from_name(view.spec.name, view.spec.namespace).teardown()


AT_MODULE_LEVEL = """
import kubetorch as kt

def train(steps):
    return helper(steps)

def helper(steps):
    return 2 * steps

class Counter:
    def __init__(self):
        self.n = 0

    def add(self, k):
        self.n += k
        return self.n

compute = kt.Compute(cpus="0.1")
remote = kt.fn(train).to(compute)
counter = kt.cls(Counter).to(compute)
print(remote(4), counter.add(3), AFTER)
"""


def test_a_program_may_deploy_and_call_at_module_level(run):
    source = AT_MODULE_LEVEL.replace("AFTER", "'end'")

    assert run("train.py", source) == ["8 3 end"]
    assert run("train.py", source) == ["8 3 end"]


def test_a_deploy_above_the_definition_has_no_effect_in_the_pod(run):
    early = "first = kt.fn(train).to(kt.Compute())\nfirst(1)\nfirst.teardown()\n\nclass Counter"
    source = AT_MODULE_LEVEL.replace("class Counter", early).replace("AFTER", "'end'")

    assert run("train.py", source) == ["8 3 end"]


def test_a_program_may_call_at_module_level_what_another_module_deployed(run, project):
    project.write(
        "pipeline.py",
        """
        import kubetorch as kt
        import steps

        remote = kt.fn(steps.double).to(kt.Compute(cpus="0.1"))
        value = remote(2)
        """,
    )
    project.write("steps.py", "def double(n):\n    return 2 * n\n")
    program = """
    import kubetorch as kt
    import pipeline

    def report():
        return "value is " + str(pipeline.value)

    print(kt.fn(report).to(kt.Compute(cpus="0.1"))())
    print(pipeline.value)
    """

    # In the pod of `report`, the deploying statements of `pipeline` have no effect.
    assert run("main.py", program) == ["value is None", "4"]


def test_an_asyncio_program_may_deploy_at_module_level(run):
    source = """
    import asyncio
    import kubetorch as kt

    async def fetch(n):
        return n + 1

    async def main():
        remote = await kt.fn(fetch).to_async(kt.Compute(cpus="0.1"))
        print(await remote(1, async_=True))

    asyncio.run(main())
    """

    assert run("main.py", source) == ["2"]


@pytest.mark.parametrize(
    "statements",
    [
        """
        with ThreadPoolExecutor() as pool:
            one, two = pool.map(lambda f: kt.fn(f).to(compute), [double, negate])
        """,
        """
        one, two = kt.fn(double), kt.fn(negate)
        threads = [threading.Thread(target=handle.to, args=(compute,)) for handle in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        """,
        """
        async def main():
            deploys = (asyncio.to_thread(kt.fn(f).to, compute) for f in (double, negate))
            return await asyncio.gather(*deploys)

        one, two = asyncio.run(main())
        """,
    ],
    ids=["pool", "threads", "to_thread"],
)
def test_a_program_may_deploy_in_threads_at_module_level(run, statements):
    source = f"""
    import asyncio
    import threading
    from concurrent.futures import ThreadPoolExecutor
    import kubetorch as kt

    def double(x):
        return 2 * x

    def negate(x):
        return -x

    compute = kt.Compute(cpus="0.1")
{textwrap.indent(textwrap.dedent(statements), "    ")}
    print(one(2), two(2))
    print({{kt.globals.controller_client().get_workload(handle.namespace, handle.service_name)
            .generation for handle in (one, two)}})
    """

    assert run("threads.py", source) == ["4 -2", "{1}"]


def test_a_process_that_a_pods_code_spawns_does_not_deploy_again(run):
    source = """
    import multiprocessing
    import kubetorch as kt

    def square(n):
        return n * n

    def train():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.map(square, [1, 2, 3])

    remote = kt.fn(train).to(kt.Compute(cpus="0.1"))
    squares = remote()
    if squares:  # in the spawned process the call has no effect
        print(squares)
    """

    assert run("train.py", source) == ["[1, 4, 9]"]


def test_objects_of_a_scripts_own_classes_travel_by_pickle_both_ways(run):
    source = """
    import kubetorch as kt

    class Point:
        def __init__(self, x):
            self.x = x

    class Wrong(Exception):
        pass

    def move(point):
        if point.x < 0:
            raise Wrong("negative")
        return Point(point.x + 1)

    if __name__ == "__main__":
        remote = kt.fn(move)
        remote.serialization = "pickle"
        remote.to(kt.Compute(cpus="0.1", allowed_serialization=["json", "pickle"]))
        moved = remote(Point(1))
        print(type(moved) is Point, moved.x)
        try:
            remote(Point(-1))
        except Wrong as error:
            print("caught", error)
        print(remote.spawn(Point(5)).get().x)
    """

    assert run("main.py", source) == ["True 2", "caught negative", "6"]


def test_a_module_that_is_run_by_its_name_is_deployed_by_its_name(run, project):
    project.write("jobs/__init__.py", "")
    project.write("jobs/names.py", "NAME = 'names'\n")
    project.write(
        "jobs/train.py",
        """
        import kubetorch as kt
        from . import names

        def train():
            return names.NAME, __name__

        if __name__ == "__main__":
            print(kt.fn(train).to(kt.Compute(cpus="0.1"))())
        """,
    )

    completed = project.run("-m", "jobs.train")

    assert completed.stdout == "['names', 'jobs.train']\n", completed.stderr


def test_a_single_file_without_a_project_travels_alone(run, project):
    (project.folder / "pyproject.toml").unlink()
    project.write("other.py", "")
    source = """
    import pathlib
    import kubetorch as kt

    def files():
        return sorted(path.name for path in pathlib.Path(__file__).parent.glob("*.py"))

    if __name__ == "__main__":
        print(kt.fn(files).to(kt.Compute(cpus="0.1"))())
    """

    assert run("alone.py", source) == ["['alone.py']"]


def test_a_file_beside_a_single_file_is_named_when_it_is_missing(run, project):
    (project.folder / "pyproject.toml").unlink()
    project.write("sib.py", "")
    source = """
    import kubetorch as kt
    import sib

    def f():
        return 1

    if __name__ == "__main__":
        try:
            kt.fn(f).to(kt.Compute(cpus="0.1"))
        except ModuleNotFoundError as error:
            print(str(error).splitlines()[-1].partition(":")[0], error.name)
    """

    assert run("alone.py", source) == ["only alone.py was sent, and not sib.py sib"]


def test_a_script_that_is_run_by_a_link_travels_with_what_it_imports(project, tmp_path):
    project.write("sib.py", "VALUE = 7\n")
    project.write(
        "main.py",
        """
        import kubetorch as kt
        import sib

        def f():
            return sib.VALUE, __file__.endswith("main.py")

        if __name__ == "__main__":
            remote = kt.fn(f).to(kt.Compute(cpus="0.1"))
            print(remote())
            remote.teardown()
        """,
    )
    link = tmp_path / "bin" / "main2.py"
    link.parent.mkdir()
    link.symlink_to("../shop/main.py")

    completed = project.run(str(link))

    assert completed.stdout == "[7, True]\n", completed.stderr


def test_code_that_is_not_synced_is_imported_from_where_it_is(run, project, tmp_path):
    container = tmp_path / "container"
    container.mkdir()
    (container / "ready.py").write_text("def train():\n    return __file__\n")
    source = f"""
    import sys
    import kubetorch as kt

    sys.path.append({str(container)!r})
    import ready

    remote = kt.fn(ready.train, sync_dir=False, remote_dir={str(container)!r})
    print(remote.to(kt.Compute(cpus="0.1"))())
    """

    assert run("main.py", source) == [str(container / "ready.py")]


def test_folders_of_the_programs_own_path_are_found_in_the_pods(run, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "tool.py").write_text("VALUE = 7\n")
    source = """
    import kubetorch as kt
    import tool

    def train():
        return tool.VALUE

    if __name__ == "__main__":
        print(kt.fn(train).to(kt.Compute(cpus="0.1"))())
    """

    assert run("main.py", source, PYTHONPATH=str(tools)) == ["7"]


@pytest.mark.parametrize("insertion", ["append(", "insert(0, "])
@pytest.mark.parametrize("is_project", [True, False])
def test_a_folder_beside_the_program_is_found_in_the_pods_wherever_it_stands_on_the_path(
    run, project, tmp_path, insertion, is_project
):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "beside.py").write_text("VALUE = 7\n")
    if not is_project:
        (project.folder / "pyproject.toml").unlink()
    source = f"""
    import os, sys
    sys.path.{insertion}os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "shared"))
    import beside
    import kubetorch as kt

    def train():
        return beside.VALUE

    if __name__ == "__main__":
        print(kt.fn(train).to(kt.Compute(cpus="0.1"))())
    """

    assert run("main.py", source) == ["7"]


def test_a_project_that_is_being_written_to_can_be_deployed(run, project):
    source = """
    import pathlib, threading
    import kubetorch as kt

    def train():
        return 7

    def write_on(end, folder):
        with open(folder / "run.log", "a") as log:
            while not end.wait(0.001):
                print("line", file=log, flush=True)
                (folder / "new").write_text("{}")
                (folder / "new").replace(folder / "metrics.json")

    if __name__ == "__main__":
        end = threading.Event()
        writer = threading.Thread(target=write_on, args=(end, pathlib.Path(__file__).parent))
        writer.start()
        try:
            for stage in "abc":
                compute = kt.Compute(cpus="0.1", env_vars={"STAGE": stage})
                print(kt.fn(train).to(compute)())
        finally:
            end.set()
            writer.join()
    """

    assert run("main.py", source) == ["7", "7", "7"]


def test_what_no_file_and_no_cell_has_cannot_be_deployed_and_says_so(project):
    program = """
import kubetorch as kt
exec(compile("def f(): return 1", "<nowhere>", "exec"))
try:
    kt.fn(f).to(kt.Compute())
except kt.NotebookError as error:
    print(error.hint)
"""

    assert ".py file" in project.run("-c", program).stdout


def test_progress_reaches_the_caller(run):
    source = """
    import kubetorch as kt

    def train():
        for step in range(3):
            kt.progress(step, 3, message="training")

    if __name__ == "__main__":
        remote = kt.fn(train).to(kt.Compute(cpus="0.1"))
        remote.options(on_progress=lambda *report: print(*report))()
    """

    # Reports that follow each other quickly are left out, but for the last.
    assert run("main.py", source)[-1] == "2.0 3.0 training"


def test_folders_of_the_project_that_the_program_imports_from_are_found_in_the_pods(run, project):
    project.write("src/shop/__init__.py", "def price():\n    return __file__\n")
    source = """
    import sys
    import kubetorch as kt
    import shop

    def train():
        return shop.price()

    if __name__ == "__main__":
        print(kt.fn(train).to(kt.Compute(cpus="0.1"))())
    """

    (imported_file,) = run("scripts/main.py", source, PYTHONPATH=str(project.folder / "src"))

    assert imported_file.endswith("/src/shop/__init__.py")
    assert not imported_file.startswith(str(project.folder))


def test_stdout_has_what_the_program_and_its_functions_print_and_nothing_else(run):
    printed = run(
        "program.py",
        """
import sys
import kubetorch as kt

print("loading")

def work():
    print("working")
    print("aside", file=sys.stderr)
    return "done"

if __name__ == "__main__":
    image = kt.Image().run_bash("echo from a step")
    compute = kt.Compute(cpus="0.1", image=image).autoscale(min_scale=1)
    print(kt.fn(work, name="quiet").to(compute)())
""",
    )
    assert [line.rpartition(") ")[2] for line in printed] == [
        "loading",
        "loading",
        "working",
        "aside",
        "done",
    ]
