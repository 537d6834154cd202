"""Cells of a notebook that run in a pod, in a real kernel."""

import re

import pytest
from jupyter_client.manager import start_new_kernel

import notebooks

LOAD = "%load_ext kubetorch"


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebooks")
    (folder / "pyproject.toml").touch()
    (folder / "shapes.py").write_text("def area(side):\n    return side * side\n")
    return folder


@pytest.fixture(scope="module")
def notebook(folder, service):
    with notebooks.kernel_in(folder) as kernel:
        yield lambda *sources: notebooks.run(folder, LOAD, *sources, kernel=kernel)


def test_a_cell_runs_in_a_pod_and_its_names_come_back(notebook):
    shown = notebook(
        "import numpy as np\nimport os\nRATE = 3\nhere = os.getpid()\nrows = np.arange(4)",
        "def scaled(x):\n    return x * RATE",
        "%%kt --cpus 0.1\n"
        "import shapes\n"
        "total = int(scaled(rows).sum()) + shapes.area(2)\n"
        "doubled = 2 * rows\n"
        "is_elsewhere = os.getpid() != here\n"
        "print('from the pod')\n"
        "total",
        "total, doubled.tolist(), is_elsewhere",
    )

    assert "from the pod" in shown[3]
    assert shown[4] == "(22, [0, 2, 4, 6], True)"


def test_a_cell_changes_and_deletes_names_of_the_notebook(notebook):
    shown = notebook(
        "total, base, rows = 1, 2, [3]",
        "%%kt --cpus 0.1\nif base:\n    total += base\n    rows += [4]\ndel base",
        "total, rows",
    )

    assert shown[-1] == "(3, [3, 4])"
    with notebooks.a_cell_fails(match=r"the cell uses file.*cannot travel"):
        notebook("file = open('shapes.py')", "%%kt --cpus 0.1\nfile += 1")


def test_the_value_of_the_last_line_is_that_of_the_cell(notebook):
    shown = notebook("%%kt --cpus 0.1\nimport asyncio\nawait asyncio.sleep(0)\n6 * 7", "_")

    assert shown[-1] == "42"


def test_a_name_that_cannot_travel_is_named_and_stays_behind(notebook):
    shown = notebook(
        "%%kt --cpus 0.1\nimport threading\nlock = threading.Lock()\nnumber = 5\nlock",
        "number, 'lock' in globals()",
    )

    assert "what stays in the pod: lock" in shown[1]
    assert "<unlocked _thread.lock" in shown[1]
    assert shown[2] == "(5, False)"


def test_a_name_that_cannot_be_sent_is_refused_with_its_name(notebook):
    with notebooks.a_cell_fails(match=r"the cell uses file.*cannot travel"):
        notebook("file = open('shapes.py')", "%%kt --cpus 0.1\nfile.read()")


def test_an_error_of_the_cell_is_shown_with_its_line(notebook):
    with notebooks.a_cell_fails(match=r"line 2(.|\n)*1 / 0") as raised:
        notebook("%%kt --cpus 0.1\nx = 1\n1 / 0")
    assert raised.value.ename == "ZeroDivisionError"


@pytest.mark.parametrize("source", ["def f():\n    1 / 0\nf()", "await asyncio.sleep('x')"])
def test_a_traceback_of_a_cell_has_the_lines_of_the_user_alone(notebook, source):
    with notebooks.a_cell_fails() as raised:
        notebook(f"%%kt --cpus 0.1\nimport asyncio\n{source}")

    text = re.sub(r"\x1b\[[0-9;]*m", "", raised.value.traceback)
    assert '"<cell>", line' in text
    assert "run_cell_magic" in text  # the cell itself
    for ours in ("cell.py", "cell_magic.py", "remote.py", "caller.py", "interactiveshell.py"):
        assert ours not in text, text


@pytest.mark.parametrize("head", ["%%kt --cpus 0.1\n", ""])
def test_a_cell_that_stops_is_debugged_in_the_notebook(folder, service, head):
    manager, client = start_new_kernel(cwd=str(folder))
    commands, prompts, shown = iter(["p total", "c"]), [], []

    def answer(message):
        prompts.append(message["content"]["prompt"])
        client.input(next(commands))

    def run(source):
        options = {"allow_stdin": True, "stdin_hook": answer, "output_hook": shown.append}
        return client.execute_interactive(source, timeout=90, **options)["content"]["status"]

    try:
        assert run(LOAD) == "ok"
        if not head:
            assert run(f"{notebooks.DEPLOY}\ndef f():\n    total = 3\n    breakpoint()\n") == "ok"
        assert run(f"{head}total = 3\nbreakpoint()" if head else "deployed(f)()") == "ok"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert len(prompts) == 2
    text = "".join(message["content"].get("text", "") for message in shown)
    assert "c goes on, q ends the debugger" in text
    assert re.search(r"^3$", text, re.MULTILINE), text


REFUSED = """
try:
    get_ipython().run_cell_magic("kt", {!r}, "1")
except Exception as error:
    print(error)
"""


def test_lines_that_only_ipython_can_run_are_refused_with_their_text(notebook):
    for line in ("!echo hi", "%time 1", "files = !ls"):
        with notebooks.a_cell_fails() as raised:
            notebook(f"%%kt --cpus 0.1\nx = 1\n{line}")
        assert f"do not run in a pod: {line}" in str(raised.value)


def test_the_options_are_shown_without_a_cell(notebook):
    shown = notebook("%%kt --help", "%kt -h", "%%kt --help\n1")

    assert all("--compute COMPUTE" in text for text in shown[1:])
    with notebooks.a_cell_fails(match="needs two %"):
        notebook("%kt --cpus 4")


def test_an_option_that_is_wrong_is_refused_with_an_example(notebook):
    lines = ["--cpu 4", "--compute nothing", "--memory"]

    for message in notebook(*map(REFUSED.format, lines))[1:]:
        assert re.search(r"hint: .*%%kt --c", message), message
