"""A caller at a terminal gets the prompt of a call that stops, in its own program."""

from __future__ import annotations

import os
import re
import signal
import stat
from pathlib import Path

import pytest

from kubetorch.errors import CallCancelledError
from tests.local.debugger.sessions import DEADLINE, PROMPT


def test_a_breakpoint_gives_the_caller_a_prompt_and_c_goes_on(deployed, caller, project):
    deployed("price")
    program = caller("f(4)", service="price")
    stop = program.until(PROMPT)
    assert "computing" in stop
    assert "-> breakpoint()" in stop
    # Not the folder of the pod before, which fills a line of a terminal.
    assert re.search(rf"^> shop/jobs{project.suffix}\.py\(\d+\)price\(\)$", stop, re.MULTILINE)
    assert "kt debug" not in stop
    assert "(4, 2, 8)" in program.command("p units, each, total")
    program.command("n")
    program.command("n")
    assert "computed" in program.command("n")  # the call's own output comes before the prompt
    program.type("c\n")
    assert "result: 9" in program.end()
    history = Path("~/.kt/debug_history").expanduser()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "p units, each, total" in history.read_text()


def leave_debugger(program, leave):
    """Answer a prompt by keys, or by Ctrl-C."""
    if leave == "\x03":
        program.interrupt()
    else:
        program.type(leave)


@pytest.mark.parametrize("leave", ["q\n", "\x03", "\x04"])
def test_q_ctrl_c_and_ctrl_d_end_the_debugger_and_the_call_goes_on(deployed, caller, leave):
    deployed("lines")
    program = caller("f(3)", service="lines")
    program.until(PROMPT)
    leave_debugger(program, leave)
    output = program.end()
    assert "result: 3" in output
    assert output.count(PROMPT) == 1


@pytest.mark.parametrize("leave", ["q\n", "\x03"])
def test_threads_of_a_pool_stop_no_more_once_the_debugger_is_left(deployed, caller, leave):
    deployed("in_pool")
    for _ in range(2):  # the next call stops again
        program = caller("f(20)", service="in-pool")
        program.until(PROMPT)
        program.type("c\n")
        program.until(PROMPT)
        leave_debugger(program, leave)
        output = program.end()
        assert "result: 190" in output
        assert output.count(PROMPT) == 2
        # The caller may be interrupted before the pod has said that the debugger is left.
        normal_end = "PDB session ended normally: the call goes on"
        assert output.count("PDB session") == output.count(normal_end)
        assert output.count(normal_end) in ((1,) if leave == "q\n" else (0, 1))


def test_each_stop_of_a_call_has_its_prompt(deployed, caller):
    deployed("lines")
    program = caller("f(3)", service="lines")
    for _ in range(3):
        program.until(PROMPT)
        program.type("c\n")
    assert "result: 3" in program.end()


def test_debug_stops_in_the_users_own_frame_before_its_first_line(deployed, caller):
    deployed("plain")
    program = caller("f(4, debug=True)", service="plain")
    assert "-> z = x + y" in program.until(PROMPT)
    assert "(4, 1)" in program.command("p x, y")
    assert "call_runner" not in program.command("w")
    program.command("x = 10")
    program.type("c\n")
    assert "result: 11" in program.end()


def test_breakpoints_name_the_file_of_the_project(deployed, caller, project):
    deployed("plain")
    program = caller("f(4, debug=True)", service="plain")
    program.until(PROMPT)
    name = f"jobs{project.suffix}.py"
    line = 1 + (project.folder / name).read_text().splitlines().index("    return z")
    for path in (name, str(project.folder / name)):
        assert f"/{name}:{line}" in program.command(f"b {path}:{line}")
    assert "-> return z" in program.command("c")
    assert "5" in program.command("p z")
    program.type("c\n")
    assert "result: 5" in program.end()


@pytest.mark.parametrize(
    ("name", "expression", "result"),
    [("later", "f(4)", "5"), ("values", "list(f(2))", "[0, 1]"), ("in_thread", "f()", "joined")],
)
def test_coroutines_generators_and_threads_stop(deployed, caller, name, expression, result):
    deployed(name)
    program = caller(expression, service=name.replace("_", "-"))
    assert "-> breakpoint()" in program.until(PROMPT)
    for _ in range(result.count(",") + 1):
        program.type("c\n")
    assert f"result: {result}" in program.end()


def test_debug_stops_in_coroutines_and_generators(deployed, caller):
    deployed("later")
    deployed("values")
    for service, expression, line in (
        ("later", "f(4, debug=True)", "await asyncio.sleep(0)"),
        ("values", "list(f(2, debug=True))", "for number in range(count)"),
    ):
        program = caller(expression, service=service)
        assert line in program.until(PROMPT)
        program.type("q\n")
        assert "result: " in program.end()


def test_a_method_stops(deployed, caller):
    deployed("Counter")
    program = caller("f.add(2)", service="counter", kind="cls")
    program.until(PROMPT)
    assert "2" in program.command("p self.count")
    program.type("c\n")
    assert "result: 2" in program.end()


def test_a_process_that_a_call_forks_stops(deployed, caller):
    deployed("in_process")
    program = caller("f()", service="in-process")
    program.until(PROMPT)
    assert "3" in program.command("p units")
    program.type("c\n")
    assert "result: 0" in program.end()


def test_a_destructor_stops(deployed, caller):
    deployed("destroy")
    program = caller("f()", service="destroy")
    program.until(PROMPT)
    program.type("c\n")
    assert "result: destroyed" in program.end()


@pytest.mark.parametrize("at", ["the prompt", "the interpreter"])
def test_other_threads_print_to_the_log_while_a_statement_runs(deployed, caller, at):
    deployed("talk")
    program = caller("f()", service="talk")
    program.until(PROMPT)
    if at == "the interpreter":
        program.type("interact\n")
        program.until(">>> ")
    program.type("begun.set(), ended.wait(60), print('said at ' + 'the prompt')\n")
    program.until("said at the prompt")
    if at == "the interpreter":
        program.until(">>> ")
        program.type("\x04")
    program.until(PROMPT)
    program.type("c\n")
    lines = program.end().splitlines()
    (line,) = [line for line in lines if line.endswith("said by the thread")]
    assert re.match(r"\(talk-\S+\) ", line)
    assert "said at the prompt" in lines
    assert "result: talked" in lines


def test_an_interpreter_at_the_prompt_leaves_assignments_alone(deployed, caller):
    deployed("price")
    program = caller("f(4)", service="price")
    program.until(PROMPT)
    program.command("!total = 100")
    program.type("interact\n")
    program.until(">>> ")
    program.type("total\n")
    assert "100" in program.until(">>> ")
    program.type("\x04")
    program.until(PROMPT)
    assert "100" in program.command("p total")
    program.type("c\n")
    assert "result: 101" in program.end()


def test_an_error_waits_for_the_debugger_at_the_frame_that_raised(deployed, caller):
    deployed("divide")
    program = caller("f.options(post_mortem=True)(1, 0)", service="divide")
    stop = program.until(PROMPT)
    assert "post-mortem: ZeroDivisionError" in stop
    assert "-> quotient = x / y" in stop
    assert "(1, 0)" in program.command("p x, y")
    program.type("q\n")
    assert "ZeroDivisionError" in program.end().split("q\n")[-1]


def test_a_name_is_completed_with_what_the_frame_has(deployed, caller):
    deployed("price")
    program = caller("f(4)", service="price")
    program.until(PROMPT)
    program.complete("p tot", "al")
    program.type("\n")
    assert "8" in program.until(PROMPT)
    program.type("q\n")
    program.end()


def test_a_prompt_ends_when_the_worker_is_killed(deployed, caller):
    deployed("price")
    program = caller("f(4)", service="price")
    program.until(PROMPT)
    worker = program.command("p __import__('os').getpid()").split()[0]
    os.kill(int(worker), signal.SIGKILL)
    output = program.end()
    assert "the stopped program has ended" in output
    assert "WorkerDiedError" in output


def test_a_prompt_that_is_left_open_ends_when_its_call_is_cancelled(deployed, terminal):
    running = deployed("lines").spawn(1)
    program = terminal("kt", "debug", "--call", running.id)
    program.until(PROMPT)
    running.cancel()
    assert "kubetorch: " in program.end()
    with pytest.raises(CallCancelledError):
        running.get(DEADLINE)
