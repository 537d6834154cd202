"""Generations on a real agent: what is served, what fails, what is reported."""

import contextlib
import json
import os
import signal
import time
from dataclasses import replace

import psutil
import pytest

from agent_harness import AgentProcess, CallFailed, FakeController, wait_until
from kubetorch.wire.frames import Kind
from kubetorch.wire.messages import Activity, LogReport, Observed, Reload, StageReport

ANSWERS_ONE = "def f(x=0): return ['one', x]\n"
ANSWERS_TWO = "def f(x=0): return ['two', x]\n"


@pytest.fixture
def controller(tmp_path):
    controller = FakeController(tmp_path)
    yield controller
    controller.close()


@pytest.fixture
def agent(tmp_path, controller):
    agent = AgentProcess(tmp_path, controller)
    yield agent
    if agent.process.poll() is None:
        agent.stop()


def test_an_edit_is_served_and_stages_are_reported(agent, controller):
    assert controller.deploy(1, ANSWERS_ONE, "f") == Observed(generation=1, serving=1)
    assert agent.post("/f", 1) == (200, ["one", 1])
    controller.send(Reload(generation=2, spec=controller.spec(ANSWERS_TWO, "f")))
    stages = [controller.wait_for(StageReport).stage for _ in range(2)]
    assert stages == ["fetching", "importing"]
    assert controller.wait_for(Observed) == Observed(generation=2, serving=2)
    assert agent.post("/f", 1) == (200, ["two", 1])


def test_a_worker_is_a_fork_of_the_agent_where_both_have_one_interpreter_and_environment(
    agent, controller
):
    controller.deploy(1, "import os\n\ndef f(): return os.getpid()\n", "f")
    _, pid = agent.post("/f")
    assert psutil.Process(pid).cmdline() == psutil.Process(agent.pid).cmdline()


def test_a_same_size_edit_within_a_second_is_served(agent, controller):
    for generation in range(1, 6):
        source = f"def f(): return {generation}\n"
        assert controller.deploy(generation, source, "f").serving == generation
        assert agent.post("/f") == (200, generation)


def test_the_same_code_deployed_again_has_fresh_state(agent, controller):
    source = "class C:\n    n = 0\n    def add(self):\n        self.n += 1\n        return self.n\n"
    controller.deploy(1, source, "C", kind="cls")
    assert agent.post("/C/add")[1] == 1
    assert agent.post("/C/add")[1] == 2
    controller.deploy(2, source, "C", kind="cls")
    assert agent.post("/C/add")[1] == 1


def test_deleted_files_vanish_and_others_are_seen_in_the_working_directory(agent, controller):
    source = (
        "import os\n"
        "def f(): return [sorted(n for n in os.listdir('proj') if n != '__pycache__'),"
        " os.getcwd()]\n"
    )
    controller.deploy(1, source, "f", files={"data.txt": "a", "sub/more.txt": "b"})
    status, (names, cwd) = agent.post("/f")
    assert (status, names) == (200, ["data.txt", "program.py", "sub"])
    assert cwd == str(agent.work)
    controller.deploy(2, source, "f", files={"other.txt": "c"})
    assert agent.post("/f")[1][0] == ["other.txt", "program.py"]
    assert (agent.work / "proj").is_symlink()


def test_sibling_packages_are_imported_from_the_project(agent, controller):
    files = {"pkg/__init__.py": "VALUE = 7\n"}
    controller.deploy(1, "import pkg\ndef f(): return pkg.VALUE\n", "f", files=files)
    assert agent.post("/f") == (200, 7)
    files = {"pkg/__init__.py": "VALUE = 8\n"}
    controller.deploy(2, "import pkg\ndef f(): return pkg.VALUE\n", "f", files=files)
    assert agent.post("/f") == (200, 8)


def test_the_workers_environment(agent, controller):
    source = "import os\ndef f(*names): return [os.environ.get(n) for n in names]\n"
    env = (("FIRST", "a$MARK"), ("SECOND", "${FIRST}/$NOWHERE"), ("POD_NAME", "not mine"))
    controller.deploy(1, source, "f", env=env)
    names = ["MARK", "FIRST", "SECOND", "POD_NAME", "POD_NAMESPACE", "KT_SERVICE_NAME"]
    names += ["KT_SERVICE", "KT_BACKEND", "KT_NAMESPACE", "KT_LOG_LEVEL", "HOSTNAME", "KT_POD_ROOT"]
    assert agent.post("/f", *names)[1] == [
        *["inherited", "ainherited", "ainherited/$NOWHERE", "demo-0", "default", "demo"],
        *["demo", "local", "default", "info", "demo-0", None],
    ]


def test_a_call_under_way_ends_in_the_code_that_it_began_in(agent, controller):
    slow = "import time\ndef f(s=0):\n    time.sleep(s)\n    return 'slow'\n"
    controller.deploy(1, slow, "f")
    client = agent.client()
    client.open(1, 1.0)
    assert controller.deploy(2, ANSWERS_TWO, "f").serving == 2
    client.open(2, 5)
    results = {}
    while len(results) < 2:
        kind, number, meta, payload = client.next()
        if kind == Kind.RESULT:
            results[number] = (payload, meta.generation)
    assert results == {1: (b'"slow"', 1), 2: (b'["two",5]', 2)}
    client.close()
    wait_until(lambda: processes(agent) == 2)


@pytest.mark.parametrize(
    ("source", "error_type"),
    [
        ("raise KeyError('at import')\n", "KeyError"),
        ("def f(:\n", "SyntaxError"),
        ("import not_there\n", "ModuleNotFoundError"),
        ("x = 1\n", "CallableNotFoundError"),
        ("import os\nos._exit(3)\n", "WorkerDiedError"),
        ("import sys\nsys.exit(3)\n", "SystemExit"),
    ],
)
def test_code_that_cannot_be_loaded_leaves_the_old_code_serving(
    agent, controller, source, error_type
):
    controller.deploy(1, ANSWERS_ONE, "f")
    observed = controller.deploy(2, source, "f")
    assert (observed.generation, observed.serving) == (2, 1)
    assert observed.failure is not None
    assert observed.failure["error_type"] == error_type
    assert agent.post("/f", 1) == (200, ["one", 1])
    assert controller.deploy(3, ANSWERS_TWO, "f").serving == 3
    assert agent.post("/f", 1) == (200, ["two", 1])


def test_a_constructor_that_raises_fails_the_deploy_with_its_traceback(agent, controller):
    source = "class C:\n    def __init__(self, n):\n        raise ValueError(f'no {n}')\n"
    observed = controller.deploy(1, source, "C", kind="cls", init_args={"n": 5})
    assert observed.serving == 0
    assert observed.failure is not None
    assert observed.failure["message"] == "no 5"
    assert "raise ValueError" in observed.failure["traceback"]
    status, body = agent.post("/C/x")
    assert (status, body["error_type"], body["started"]) == (503, "CallRefusedError", False)
    assert "ValueError: no 5" in body["message"]
    assert "raise ValueError" in body["traceback"]


def test_a_generation_that_failed_is_tried_again_when_it_is_asked_for_again(agent, controller):
    source = (
        "import os, pathlib\nif not pathlib.Path('now').exists(): raise OSError('not yet')\n"
        "def f(): return 'now'\n"
    )
    spec = controller.spec(source, "f")
    controller.send(Reload(generation=1, spec=spec))
    assert controller.wait_for(Observed).failure is not None
    (agent.work / "now").touch()
    controller.send(Reload(generation=1, spec=spec))
    assert controller.wait_for(Observed) == Observed(generation=1, serving=1)
    assert agent.post("/f") == (200, "now")


def test_a_newer_generation_supersedes_one_that_is_being_loaded(agent, controller):
    slow = "import time\nprint('loading')\ntime.sleep(60)\ndef f(): return 'never'\n"
    controller.deploy(1, ANSWERS_ONE, "f")
    controller.send(Reload(generation=2, spec=controller.spec(slow, "f")))
    controller.wait_for(LogReport)
    begin = time.monotonic()
    assert controller.deploy(3, ANSWERS_TWO, "f") == Observed(generation=3, serving=3)
    assert time.monotonic() - begin < 30
    wait_until(lambda: processes(agent) == 2)
    assert agent.post("/f", 1) == (200, ["two", 1])


def test_the_generation_that_is_served_is_confirmed_without_a_new_worker(agent, controller):
    source = "import os\ndef f(): return os.getpid()\n"
    spec = controller.spec(source, "f")
    controller.send(Reload(generation=1, spec=spec))
    controller.wait_for(Observed)
    pid = agent.post("/f")
    controller.send(Reload(generation=1, spec=spec))
    assert controller.wait_for(Observed) == Observed(generation=1, serving=1)
    assert agent.post("/f") == pid


def test_calls_wait_for_the_first_generation_while_it_is_loaded(agent, controller):
    slow = (
        "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
        "def f(): return 'ready'\n"
    )
    client = agent.client()
    with pytest.raises(CallFailed, match="CallRefusedError: nothing is deployed"):
        client.call(1)
    assert agent.http("GET", "/ready")[0] == 503
    controller.send(Reload(generation=1, spec=controller.spec(slow, "f")))
    controller.wait_for(StageReport)
    client.open(2)
    client.open(3, queue_timeout=0.2)
    with pytest.raises(CallFailed, match=r"CallTimeoutError: .*no process took it") as caught:
        client.result(3)
    assert caught.value.failure["started"] is False
    (agent.work / "go").touch()
    assert client.result(2) == "ready"
    client.close()


def test_a_codec_that_the_new_generation_forbids_is_refused_for_calls_that_waited(
    agent, controller
):
    slow = "import time\ntime.sleep(0.7)\ndef f(x): return x\n"
    client = agent.client()
    spec = controller.spec(slow, "f", codecs_allowed=("json",))
    controller.send(Reload(generation=1, spec=spec))
    controller.wait_for(StageReport)
    with pytest.raises(CallFailed, match="'pickle' not allowed") as caught:
        client.call(1, 1, codec="pickle")
    assert caught.value.failure["started"] is False
    status, _, body = agent.http("POST", "/f", b"{}", {"X-Serialization": "pickle"})
    assert (status, b"not allowed" in body) == (400, True)
    client.close()


def test_lines_of_the_load_are_reported_with_their_generation(agent, controller):
    source = "import logging\nprint('p')\nlogging.getLogger().warning('w')\ndef f(): return 1\n"
    controller.send(Reload(generation=1, spec=controller.spec(source, "f")))
    lines = [controller.wait_for(LogReport) for _ in range(2)]
    assert [(m.generation, m.text, m.source, m.level) for m in lines] == [
        (1, "p", "stdout", None),
        (1, "w", "logger", "WARNING"),
    ]
    assert b'"text":"p"' in agent.http("GET", "/v1/logs")[2]


def test_a_chatty_load_is_cut_with_a_line_that_says_so(agent, controller):
    source = "for i in range(3000): print(i)\ndef f(): return 1\n"
    controller.send(Reload(generation=1, spec=controller.spec(source, "f")))
    texts = []
    while True:
        message = controller.messages.get(timeout=20)
        if isinstance(message, LogReport):
            texts.append(message.text)
        if isinstance(message, Observed):
            break
    assert len(texts) == 1000
    assert texts[:999] == [str(i) for i in range(999)]
    assert "kt logs" in texts[-1]


def test_the_controller_hears_when_the_pod_becomes_busy_and_idle(agent, controller):
    source = "import os, time\ndef f():\n    while not os.path.exists('go'): time.sleep(0.01)\n"
    controller.deploy(1, source, "f")
    begin = time.time()
    client = agent.client()
    client.open(1)
    busy = controller.wait_for(Activity, lambda m: m.calls == 1)
    assert busy.workers == 1
    assert begin <= busy.last <= time.time()
    ended = time.time()
    (agent.work / "go").touch()
    client.result(1)
    idle = controller.wait_for(Activity, lambda m: m.calls == 0)
    assert ended <= idle.last
    client.close()


def test_a_missing_blob_is_named_and_waited_for_while_the_generation_before_serves(
    agent, controller
):
    controller.deploy(1, ANSWERS_ONE, "f")
    spec = controller.spec(ANSWERS_TWO, "f")
    digest = next(d for d, data in controller.blobs.items() if data == ANSWERS_TWO.encode())
    del controller.blobs[digest]
    controller.send(Reload(generation=2, spec=spec))
    waiting = controller.wait_for(StageReport, lambda report: "waits" in report.message)
    assert digest in waiting.message
    assert agent.post("/f", 1) == (200, ["one", 1])
    controller.blobs[digest] = ANSWERS_TWO.encode()
    assert controller.wait_for(Observed) == Observed(generation=2, serving=2)
    assert agent.post("/f", 1) == (200, ["two", 1])


def test_a_newer_generation_ends_the_wait_for_a_missing_blob(agent, controller):
    spec = controller.spec(ANSWERS_TWO, "f")
    controller.blobs.clear()
    controller.send(Reload(generation=1, spec=spec))
    controller.wait_for(StageReport, lambda report: "waits" in report.message)
    assert controller.deploy(2, ANSWERS_ONE, "f").serving == 2


def test_a_poisoned_blob_fails_the_reload_and_is_fetched_again(agent, controller):
    controller.deploy(1, ANSWERS_ONE, "f")
    spec = controller.spec(ANSWERS_TWO, "f")
    digest = next(d for d, data in controller.blobs.items() if data == ANSWERS_TWO.encode())
    controller.blobs[digest] = b"evil" + ANSWERS_TWO.encode()[4:]
    controller.send(Reload(generation=2, spec=spec))
    observed = controller.wait_for(Observed)
    assert observed.failure is not None
    assert "poisoned" in observed.failure["message"]
    controller.blobs[digest] = ANSWERS_TWO.encode()
    controller.send(Reload(generation=2, spec=spec))
    assert controller.wait_for(Observed).serving == 2


def test_a_worker_that_dies_again_and_again_by_itself_is_started_ever_more_slowly(
    agent, controller
):
    source = (
        "import os, threading, time\n"
        "def end():\n"
        "    while not os.path.exists('end'): time.sleep(0.01)\n"
        "    threading.Timer(0.1, os._exit, (5,)).start()\n"
        "print('up', time.time())\n"
        "threading.Thread(target=end, daemon=True).start()\n"
        "def f(): return 1\n"
    )
    assert controller.deploy(1, source, "f").serving == 1
    (agent.work / "end").touch()

    def starts() -> list[float]:
        lines = agent.http("GET", "/v1/logs?tail=1000")[2].splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        return [float(text.split()[1]) for text in texts if text.startswith("up")]

    wait_until(lambda: len(starts()) >= 4)
    _, second, third, fourth, *_ = starts()
    assert third - second >= 0.5
    assert fourth - third >= 1.0
    controller.deploy(2, ANSWERS_ONE, "f")
    assert agent.post("/f", 1) == (200, ["one", 1])


def test_code_changed_on_disk_by_a_call_is_put_right_when_the_worker_is_replaced(agent, controller):
    source = "import os\nVALUE = 'as deployed'\ndef f(): return [VALUE, os.getpid()]\n"
    controller.deploy(1, source, "f")
    _, (_, pid) = agent.post("/f")
    program = agent.work / "proj" / "program.py"
    program.write_text(source.replace("as deployed", "tampered"))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid))
    # The agent may learn of the end later than this program does.
    answers = []
    wait_until(lambda: answers.append(agent.post("/f")) or answers[-1][0] == 200)
    assert answers[-1][1][0] == "as deployed"


def test_an_interpreter_that_is_not_there_fails_the_reload(agent, controller):
    spec = controller.spec(ANSWERS_ONE, "f")
    spec = replace(spec, runtime=replace(spec.runtime, python="/nowhere/python"))
    controller.send(Reload(generation=1, spec=spec))
    observed = controller.wait_for(Observed)
    assert observed.failure is not None
    assert "/nowhere/python" in observed.failure["message"]


def processes(agent: AgentProcess) -> int:
    """How many processes live below the agent: its zygote, and workers."""
    alive = 0
    for child in psutil.Process(agent.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            alive += child.status() != psutil.STATUS_ZOMBIE
    return alive
