"""Python as users write it: nothing of a program is lost between the caller and its pods."""

import asyncio
import importlib
import pickle
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

import kubetorch as kt
from benchmarks import wheels
from shared import WHOLE
from tests.local.calling import until

#: What takes longer than a sample may.
whole = pytest.mark.skipif(not WHOLE, reason="needs KT_TEST_WHOLE=1")


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture
def deployed(project):
    """Deploys what a module defines; its service is torn down at the end."""
    handles = []

    def deploy(source, name, **options):
        module = project.module(source)
        factory = kt.cls if name[:1].isupper() else kt.fn
        handle = factory(getattr(module, name), name=f"{name}-{project.suffix}".lower())
        handles.append(
            handle.to(kt.Compute(cpus="0.1", image=options.pop("image", None)), **options)
        )
        return module, handles[-1]

    yield deploy
    for handle in handles:
        handle.teardown()


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """An image whose requirements come from a folder."""
    folder = tmp_path_factory.mktemp("index")
    for name, version, requires in (
        ("alpha", "1.0", []),
        ("alpha", "2.0", []),
        ("gamma", "1.0", ["nothing-like-this"]),
        ("eager", "1.0", ["alpha"]),
        ("eager", "2.0", ["alpha>=2"]),
    ):
        wheels.build(folder, name, version, f"VALUE = '{version}'\n", requires=requires)
    return lambda: kt.Image().set_env_vars({"UV_FIND_LINKS": str(folder), "UV_OFFLINE": "1"})


ERRORS = """
import kubetorch as kt

class AppError(kt.KubetorchError):
    def __init__(self, message, order):
        super().__init__(message, hint="look again")
        self.order = order

class Bare(kt.KubetorchError):
    def __init__(self, order):
        self.order = order

class Mixed(ValueError, kt.KubetorchError):
    pass

class OutOfStock(kt.CallError, LookupError):
    status = 410

class Plain(Exception):
    pass

def f(kind):
    error = {
        "app": lambda: AppError("no such order", (7, b"x")),
        "bare": lambda: Bare(8),
        "mixed": lambda: Mixed("wrong", 3),
        "stock": lambda: OutOfStock("none left"),
        "plain": lambda: Plain("few"),
        "large": lambda: Plain("many", list(range(5000))),
    }[kind]()
    error.add_note("while it was packed")
    error.rows = [list(range(10)) for _ in range(20_000 if kind == "large" else 2)]
    raise error
"""


def test_errors_of_the_users_arrive_as_themselves(deployed):
    module, remote = deployed(ERRORS, "f")
    kinds = {"app": "AppError", "bare": "Bare", "mixed": "Mixed", "stock": "OutOfStock"}
    raised = {}
    for kind, name in {**kinds, "plain": "Plain"}.items():
        with pytest.raises(getattr(module, name)) as caught:
            remote(kind)
        raised[kind] = caught.value
        assert type(caught.value) is getattr(module, name)
        assert caught.value.__notes__ == ["while it was packed"]
        assert caught.value.rows == [list(range(10))] * 2
        assert "line" in caught.value.remote_traceback
    assert str(raised["app"]) == "no such order\nhint: look again"
    assert raised["app"].order == (7, b"x")
    assert raised["bare"].order == 8
    assert (raised["bare"].args, str(raised["bare"])) == ((8,), "8")
    assert (raised["mixed"].args, str(raised["mixed"])) == (("wrong", 3), "('wrong', 3)")
    assert raised["stock"].status == 410


def test_an_attribute_that_is_too_large_says_so(deployed):
    module, remote = deployed(ERRORS, "f")
    with pytest.raises(module.Plain) as caught:
        remote("large")
    assert caught.value.args[0] == "many"
    for left_out in (caught.value.rows, caught.value.args[1]):
        assert "too large" in left_out
        assert "list" in left_out
    assert caught.value.__notes__ == ["while it was packed"]


MODEL = """
import functools
import kubetorch as kt

class Model:
    limit = 3
    act = None

    def __init__(self):
        self.total = 7
        self.predict = functools.partial(max, 5)
        self.act = self.add

    @property
    def size(self):
        return 1

    def add(self, n):
        return self.total + n

    async def later(self, n):
        return n

def names_in_a_pod(name):
    handle = kt.cls(name=name)
    return handle.predict(9), hasattr(handle, "total")
"""


def there_is_no(handle, name, *parts):
    with pytest.raises(AttributeError) as caught:
        getattr(handle, name)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_only_callables_are_attributes_of_a_handle(deployed):
    module, remote = deployed(MODEL, "Model")
    by_name = kt.cls(name=remote.name)
    for handle in (remote, by_name, pickle.loads(pickle.dumps(remote))):
        assert handle.add(1) == 8
        assert handle.predict(9) == 9
        assert handle.act(2) == 9
        assert handle.later(4) == 4
        assert handle.add
        assert handle.predict
        there_is_no(handle, "ad", "has no method 'ad'", "did you mean add?")
        there_is_no(handle, "total", "a value of type int", "a method that returns it")
        there_is_no(handle, "limit", "a value of type int")
        there_is_no(handle, "size", "is a property")
        assert not hasattr(handle, "anything")

    async def on_a_loop():
        handle = kt.cls(name=remote.name)
        return await handle.later(4, async_=True), hasattr(handle, "total")

    assert asyncio.run(on_a_loop()) == (4, False)
    nested = kt.fn(module.names_in_a_pod, name=f"{remote.name}-names")
    try:
        assert nested.to(kt.Compute(cpus="0.1"))(remote.name) == [9, False]
    finally:
        nested.teardown()


def test_what_is_known_follows_new_code(deployed, project):
    _, remote = deployed(MODEL, "Model")
    by_name = kt.cls(name=remote.name)
    assert by_name.add(1) == 8
    there_is_no(by_name, "multiply")
    edited = project.module(MODEL.replace("async def later", "def multiply"))
    kt.cls(edited.Model, name=remote.name).to(kt.Compute(cpus="0.1"))
    assert by_name.multiply(3) == 3


def test_what_is_not_known_is_not_true(project):
    module = project.module(MODEL)
    handle = kt.cls(module.Model)
    assert handle.add
    there_is_no(handle, "size", "is a property")
    for name in ("predict", "act", "anything"):
        with pytest.raises(TypeError, match=f"whether .* has a method '{name}' is not known"):
            bool(getattr(handle, name))


NOTES = """
import asyncio, os, signal, sqlite3, sys, threading, time

class Notes:
    def __init__(self):
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table notes (text)")
        self.signals = []
        self.gate = threading.Event()
        signal.signal(signal.SIGUSR1, lambda number, _: self.signals.append(number))
        signal.signal(signal.SIGUSR2, self.on_signal)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def add(self, text):
        with self.database:
            self.database.execute("insert into notes values (?)", [text])
        return self.database.execute("select count(*) from notes").fetchone()[0]

    def all(self):
        for row in self.database.execute("select text from notes"):
            yield row[0]

    def ask(self, number):
        os.kill(os.getpid(), number)
        deadline = time.monotonic() + 60
        while not self.signals and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.signals

    def on_signal(self, number, _):
        self.signals.append(number)
        sys.exit(3)

    def ring(self, path):
        self.gate.set()
        deadline = time.monotonic() + 60
        while not (os.path.exists(path) and self.is_idle()) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.signals = []
        return self.ask(signal.SIGUSR2)

    def is_idle(self):
        frame = sys._current_frames()[threading.main_thread().ident]
        return frame.f_code.co_name == "_wait_at_gate"

    def hang(self, text, path):
        self.add(text)
        open(path, "w").close()
        while True:
            time.sleep(0.01)

    def wait(self, path):
        self.gate.clear()
        open(path, "w").close()
        return self.gate.wait(60)

    def open(self):
        self.gate.set()
        return self.is_here()

    def is_here(self):
        return threading.current_thread() is threading.main_thread()

    def sums(self, n):
        async def later():
            await asyncio.sleep(0)
            return n + 1
        return asyncio.run(later())

    def coroutine(self, n):
        async def later():
            await asyncio.sleep(0.01)
            return n + 2
        return later()

    def alarm(self):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        return True

def alarm():
    import signal
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
"""


def waiting_there(notes, threads, folder):
    """A call that waits on the thread of the instance: it goes elsewhere if that has another."""
    for number in range(100):
        begun = folder / f"wait {number}"
        waits = threads.submit(notes.wait, str(begun))
        until(begun.exists)
        if not notes.is_here():
            return waits
        notes.open()
        waits.result(60)
    raise AssertionError("no call waits on the thread of the instance")


def test_what_is_bound_to_a_thread_works_between_the_constructor_and_methods(deployed, tmp_path):
    _, notes = deployed(NOTES, "Notes")
    assert [notes.add(str(n)) for n in range(300)] == list(range(1, 301))
    assert list(notes.all()) == [str(n) for n in range(300)]
    assert notes.ask(10) == [10]
    assert notes.sums(3) == 4
    assert notes.coroutine(3) == 5
    assert notes.alarm() is True
    # A call that is running there sends the others elsewhere, and gives the thread back.
    with ThreadPoolExecutor(1) as threads:
        waits = waiting_there(notes, threads, tmp_path)
        notes.open()
        assert waits.result(60) is True
    assert notes.open() is True
    assert notes.add("after") == 301
    # So does one that is interrupted there.
    hangs = notes.hang.spawn("kept", str(tmp_path / "hangs"))
    until((tmp_path / "hangs").exists)
    hangs.cancel()
    with pytest.raises(kt.CallCancelledError):
        hangs.get(timeout=60)
    assert notes.add("and again") == 303


def test_a_signal_handler_that_a_call_cannot_set_has_a_hint(deployed):
    _, remote = deployed(NOTES, "alarm")
    with pytest.raises(ValueError, match="main thread") as caught:
        remote()
    assert "in the constructor of a class" in caught.value.hint
    assert caught.value.__notes__ == [f"hint: {caught.value.hint}"]


def test_a_handler_of_signals_may_raise_while_the_thread_waits(deployed, tmp_path):
    _, notes = deployed(NOTES, "Notes")
    with ThreadPoolExecutor(2) as threads:
        waits = waiting_there(notes, threads, tmp_path)
        rings = threads.submit(notes.ring, str(tmp_path / "answered"))
        assert waits.result(60) is True
        (tmp_path / "answered").touch()
        assert rings.result(60) == [12]
    assert notes.is_here() is True
    assert notes.add("after") == 1


VERSIONS = """
def versions(*names):
    return [__import__(name).VALUE for name in names]
"""


@pytest.mark.parametrize(
    ("first", "is_own"),
    [("alpha==1.0", False), pytest.param("--no-cache gamma --no-deps", True, marks=whole)],
)
def test_requirements_that_are_given_together_are_resolved_together(project, image, first, is_own):
    module = project.module(VERSIONS)
    remote = kt.fn(module.versions, name=f"versions-{project.suffix}")
    more = ["alpha==1.0", "eager"] if first.startswith("-") else ["--no-deps gamma", "eager"]

    def to(requirements):
        own_image = image()
        if is_own:
            own_image.run_bash("true")  # what follows is the pod's own
        own_image.pip_install(requirements)
        return remote.to(kt.Compute(cpus="0.1", image=own_image)), own_image

    try:
        deployed, own_image = to([first, *more])
        assert deployed("alpha", "eager", "gamma") == ["1.0", "1.0", "1.0"]
        lines = [f"RUN $KT_PIP_INSTALL_CMD {item}" for item in (first, *more)]
        assert own_image.contents.splitlines()[-3:] == lines
        if not WHOLE:
            return
        # A later item alone leaves what the earlier ones ask for; else the one command fails.
        assert to(["alpha==1.0"])[0]("alpha") == ["1.0"]
        assert to(["alpha==1.0", "eager"])[0]("alpha", "eager") == ["1.0", "1.0"]
        with pytest.raises(kt.ImageStepError, match=r"alpha==1\.0 'eager>1'"):
            to(["alpha==1.0", "eager>1"])
        assert deployed("alpha", "eager") == ["1.0", "1.0"]
    finally:
        remote.teardown()


CHILDREN = """
import multiprocessing, os, subprocess, sys
from concurrent.futures import ProcessPoolExecutor

def say(n):
    print("child", n)
    return os.getpid()

def in_pool(count):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(say, range(count), chunksize=1)

def in_executor(count):
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        # What is killed has nothing left to write.
        pids = set(pool.map(say, range(count)))
        for pid in pids:
            os.kill(pid, 9)

def in_program(count):
    code = f"import os, sitecustomize; [print('child', n) for n in range({count})]; os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True)
    return [entry for entry in sys.path if "user_process" in entry]
"""


@pytest.mark.parametrize(
    "call_form",
    ["in_pool", pytest.param("in_executor", marks=whole), pytest.param("in_program", marks=whole)],
)
def test_prints_of_child_interpreters_arrive_all_and_whole(project, call_form):
    project.write("jobs.py", CHILDREN)
    completed = project.run(
        project.write(
            "main.py",
            f"""
            import jobs, kubetorch as kt

            if __name__ == "__main__":
                remote = kt.fn(jobs.{call_form}, name="children-{call_form.replace("_", "-")}")
                remote.to(kt.Compute(cpus="0.1"))
                print("returned", remote(100))
                remote.teardown()
            """,
        )
    )
    assert completed.returncode == 0, completed.stderr
    *lines, last = completed.stdout.splitlines()
    assert last in ("returned None", "returned []")
    texts = sorted(line.partition(") ")[2] for line in lines)
    assert texts == sorted(f"child {n}" for n in range(100))


PROGRAM = """
import kubetorch as kt

def größe(n, *, ключ=0):
    return n + ключ

class Zähler:
    def zähle(self, n):
        return n + 1

def packed(n):
    import zipped
    return zipped.double(n)

if __name__ == "__main__":
    compute = kt.Compute(cpus="0.1")
    deployed = [kt.fn(größe).to(compute), kt.cls(Zähler).to(compute), kt.fn(packed).to(compute)]
    by_name = kt.cls(name="Zähler")
    print(deployed[0](1, ключ=3), deployed[1].zähle(1), by_name.zähle(2), deployed[2](4))
    for each in deployed:
        each.teardown()
"""


@pytest.mark.parametrize("alters", [False, pytest.param(True, marks=whole)])
def test_a_program_may_be_run_by_runpy_have_archives_and_any_names(project, alters):
    project.write("übung/größen.py", PROGRAM)
    archive = project.folder / "packed.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("zipped.py", "def double(n): return 2 * n\n")
    run = f"runpy.run_module('übung.größen', run_name='__main__', alter_sys={alters})"
    program = project.write("start.py", f"import runpy\n{run}\n")
    completed = project.run(program, PYTHONPATH=str(archive))
    assert completed.stdout.split() == ["4", "2", "3", "8"], completed.stderr


def test_a_callable_in_an_archive_is_refused(project, monkeypatch):
    archive = project.folder / "packed.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr(f"zipped{project.suffix}.py", "def double(n): return 2 * n\n")
    monkeypatch.syspath_prepend(str(archive))
    module = importlib.import_module(f"zipped{project.suffix}")
    with pytest.raises(kt.SpecError, match=r"lies in the archive .*packed\.zip"):
        kt.fn(module.double)


LISTING = """
import os

def listing(folder):
    folder = os.path.expanduser(folder)
    names = sorted(name for name in os.listdir(folder) if not name.startswith(".."))
    is_link = os.path.islink(f"{folder}/..data") and os.path.isdir(f"{folder}/..data")
    return names, is_link, open(f"{folder}/a").read(), oct(os.stat(f"{folder}/a").st_mode & 0o777)
"""


def test_the_folder_of_a_secret_is_laid_out_as_on_a_cluster(project):
    module = project.module(LISTING)
    secret = kt.Secret(
        f"laid-out-{project.suffix}", values={"a": "1", "b": "2"}, path="~/.laid-out"
    )
    remote = kt.fn(module.listing, name=f"listing-{project.suffix}")
    try:
        remote.to(kt.Compute(cpus="0.1", secrets=[secret]))
        assert remote("~/.laid-out") == [["a", "b"], True, "1", "0o600"]
    finally:
        remote.teardown()
