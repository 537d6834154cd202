"""Every example runs, and prints what its reader would expect."""

import re
import shutil
import sys
import warnings

import pytest

import shared
from benchmarks import wheels
from example_programs import EDITS, EXAMPLES, EXPECTED, FRAMEWORKS, PICTURE, STARTED, run


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_BUCKET_NETWORKS", "127.0.0.1/32")  # of bucket_folder.py
        yield shared_service_home


@pytest.fixture
def folder(tmp_path_factory):
    """A new copy of the examples in the folder of the one before: what they write stays there.

    Another folder would be another project, whose services are not its own.
    """
    folder = tmp_path_factory.getbasetemp() / "examples"
    shutil.rmtree(folder, ignore_errors=True)
    return shutil.copytree(EXAMPLES, folder)


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == {
        *EXPECTED,
        *FRAMEWORKS,
        "autoscale.py",
        "notebook.ipynb",
        "curl.sh",
        "edit_loop.py",
        "image_steps.py",
        "long_run.py",
    }


@pytest.mark.parametrize("name", EXPECTED)
def test_a_program_prints_what_it_should(name, folder):
    if name == "bucket_folder.py":
        pytest.importorskip("moto", reason="bucket_folder.py needs moto[server]")
        pytest.importorskip("obstore")
    assert run(sys.executable, f"examples/{name}", cwd=folder.parent) == EXPECTED[name]


def test_the_first_example_shows_its_new_code_after_an_edit(folder):
    assert "{'loss': 0.05}" in run(sys.executable, "hello_world.py", cwd=folder)
    program = folder / "hello_world.py"
    program.write_text(program.read_text().replace("lr / steps", "lr * steps"))

    assert "{'loss': 5.0}" in run(sys.executable, "hello_world.py", cwd=folder)


def test_a_service_that_scales_prints_a_picture_of_its_pods(folder):
    assert PICTURE.fullmatch(run(sys.executable, "autoscale.py", cwd=folder, timeout=200))


def test_twenty_edits_are_live_one_after_the_other(folder):
    assert EDITS.fullmatch(run(sys.executable, "edit_loop.py", cwd=folder))


def test_a_long_run_goes_on_after_a_crash_and_another_program_comes_back_to_it(folder):
    started = STARTED.fullmatch(run(sys.executable, "long_run.py", cwd=folder))
    assert started

    output = run(sys.executable, "long_run.py", started[1], cwd=folder)

    assert output == "result: {'steps': 6, 'the last attempt began at': 3}\n"


def test_the_app_is_live_after_an_edit(folder):
    program = folder / "app_asgi.py"
    program.write_text(program.read_text().replace("hello", "good evening"))

    assert run(sys.executable, "app_asgi.py", cwd=folder) == "200 good evening\n"


def test_the_script_runs_from_a_shell_too(folder):
    output = run("kt", "run", "python", "app_script.py", "2", cwd=folder)

    assert output == "step 1 of 2\nstep 2 of 2\n"


def test_an_image_gets_one_more_step_without_a_restart(service_home, folder, tmp_path):
    index = tmp_path / "index"  # instead of those on the network
    wheels.build(index, "humanize", "1.0", "def naturalsize(n): return f'{n / 1e6:.1f} MB'\n")
    wheels.build(
        index,
        "tabulate",
        "1.0",
        "def tabulate(rows): return '\\n'.join('  '.join(row) for row in rows)\n",
    )
    wheels.build(
        index,
        "python_slugify",
        "1.0",
        "def slugify(text): return text.lower().replace(' ', '-')\n",
        module="slugify",
    )

    output = run(
        sys.executable,
        "image_steps.py",
        cwd=folder,
        UV_FIND_LINKS=str(index),
        UV_OFFLINE="1",
    )

    assert "model  3.0 MB\ndata  12.5 MB\n" in output
    assert "\none-more-step\nthe same pod: True\nFROM " in output


@pytest.mark.timeout(300)
def test_curl_calls_a_function_with_a_token(folder):
    with shared.turn("port-forward"):  # documents forward the same port of the machine
        output = run("sh", "curl.sh", cwd=folder)

    assert '{"loss":0.05}' in output.replace(" ", "")
    assert "status 500" in output
    assert '"error_type":"ZeroDivisionError"' in output.replace(": ", ":")


def test_a_notebook_deploys_its_own_functions_and_classes(folder):
    import nbformat

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nbclient import NotebookClient

        notebook = nbformat.read(folder / "notebook.ipynb", as_version=4)
        client = NotebookClient(
            notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        client.execute()

    outputs = [
        output.get("text") or output["data"]["text/plain"]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    # In a notebook lines from pods have a colour.
    shown = [re.sub(r"\x1b\[\d*m|(?<=\(area)-[^)]*", "", output) for output in outputs]
    line = "(area) computing in a pod\n"
    backend_line = "kubetorch: pods run on this machine (the setting backend is local)\n"
    assert shown == [backend_line, line, "12.566", "(7, 10)", line, "3.1"]
    assert (folder / "area_fn.py").is_file()
    assert (folder / "Counter_cls.py").is_file()
