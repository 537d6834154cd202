"""`kt debug` attaches another terminal to a call that has stopped, or that runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request

import pytest

import kubetorch as kt
from tests.local import commands
from tests.local.calling import until
from tests.local.debugger.sessions import DEADLINE, PROMPT

SENTENCE = "Distributed breakpoint activated. To attach a debugger, run the following command:"
COMMAND = re.compile(r"kt debug (\S+) --port (\d+) --namespace (\S+) --mode (\S+) --pod-ip [\d.]+$")


def rest_of(program):
    return program.communicate(timeout=DEADLINE)[0]


def kt_debug(*words, typed=""):
    return commands.kt("debug", *words, stdin=typed, timeout=DEADLINE)


def pod_of(handle):
    return handle.service_config["pods"][0]["name"]


def test_without_a_terminal_the_call_prints_the_command_that_attaches(deployed, stopped, terminal):
    handle = deployed("price")
    program = stopped("f(4)", service="price")
    number = next(n for n, line in enumerate(program.lines) if SENTENCE in line)
    command = COMMAND.search(program.lines[number + 1])
    assert command is not None
    assert command.groups() == (pod_of(handle), "5678", "default", "pdb")
    attached = terminal(*command[0].split())
    assert "-> breakpoint()" in attached.until(PROMPT)
    assert "8" in attached.command("p total")
    attached.command("n")
    attached.command("n")
    assert "computed" in attached.command("n")
    attached.type("c\n")
    attached.end()
    assert attached.status == 0
    assert "result: 9" in rest_of(program)


def test_the_port_and_the_mode_of_a_stop_are_in_its_command(deployed, stopped):
    deployed("deep")
    program = stopped("f()", service="deep")
    assert any("--port 6001" in line for line in program.lines)
    refused = kt_debug("deep", "--port", "6002")
    assert refused.returncode == 1
    assert "others wait: " in refused.stderr
    assert kt_debug("deep", "--port", "6001", typed="c\n").returncode == 0
    assert "result: went on" in rest_of(program)


def test_a_stop_that_no_terminal_comes_to_goes_on_and_says_so(deployed, stopped):
    # The timeout, which stands during the stop, is for what comes before and after it.
    for wait in (1, 10, 40):
        service = f"forgotten-{wait}"
        compute = kt.Compute(env_vars={"KT_DEBUG_WAIT": str(wait)})
        deployed("price", service=service, compute=compute)
        program = stopped(f"f.options(timeout={0.7 * wait})(4)", service=service, until="")
        rest = rest_of(program)
        if "CallTimeoutError" not in rest:
            break
    assert f"no debugger was attached within {wait} s: the call goes on" in rest
    assert "result: 9" in rest


def test_a_wait_that_is_no_number_is_named_where_the_call_stops(deployed, stopped):
    deployed("price", service="soon", compute=kt.Compute(env_vars={"KT_DEBUG_WAIT": "soon"}))
    program = stopped("f(4)", service="soon")
    assert program.lines[-1].endswith("since KT_DEBUG_WAIT is 'soon', no number of seconds")
    assert kt_debug("soon", typed="c\n").returncode == 0
    assert "result: 9" in rest_of(program)


def test_a_stop_that_is_not_to_wait_says_so_and_not_how_to_attach(deployed, stopped):
    deployed("price", service="hurried", compute=kt.Compute(env_vars={"KT_DEBUG_WAIT": "0"}))
    output = "\n".join(stopped("f(4)", service="hurried", until="result: 9").lines)
    assert "KT_DEBUG_WAIT is 0, so no call waits for a debugger" in output
    assert "kt debug" not in output


def test_stops_of_a_service_are_told_apart_by_call_and_line(deployed, stopped):
    deployed("price")
    programs = [stopped(f"f({units})", service="price") for units in (4, 5)]
    shown = kt_debug("price", typed="c\n").stderr
    stops = re.findall(r"--port 5678: price \(request (\w+)\), shop/\S+:\d+ in price", shown)
    assert len(set(stops)) == 2
    assert kt_debug("price", typed="c\n").returncode == 0
    assert ["result: " in rest_of(program) for program in programs] == [True, True]


def test_a_second_terminal_is_refused_and_learns_who_is_attached(deployed, stopped, terminal):
    deployed("price")
    program = stopped("f(4)", service="price")
    attached = terminal("kt", "debug", "price")
    attached.until(PROMPT)
    assert "1 call is stopped in a debugger of " in commands.kt("status", "price").stdout
    refused = kt_debug("price")
    assert refused.returncode == 1
    assert re.search(r"\S+@\S+ has been attached to this debugger since \d\d:\d\d", refused.stderr)
    attached.type("q\n")
    attached.end()
    assert "result: 9" in rest_of(program)


def test_a_call_goes_on_when_its_terminal_is_killed(deployed, stopped, terminal):
    deployed("price")
    program = stopped("f(4)", service="price")
    attached = terminal("kt", "debug", "price")
    attached.until(PROMPT)
    attached.kill()
    rest = rest_of(program)
    assert "the terminal of the debugger is gone: the call goes on" in rest
    assert "result: 9" in rest


def test_a_terminal_learns_that_the_caller_is_gone(deployed, stopped, terminal):
    deployed("price")
    program = stopped("f(4)", service="price")
    attached = terminal("kt", "debug", "price")
    attached.until(PROMPT)
    program.send_signal(signal.SIGINT)
    assert "kubetorch: " in attached.end()
    assert program.wait(DEADLINE) != 0
    assert kt_debug("price").returncode == 1


def test_a_terminal_learns_that_the_worker_is_gone(deployed, stopped, terminal):
    deployed("price")
    program = stopped("f(4)", service="price")
    attached = terminal("kt", "debug", "price")
    attached.until(PROMPT)
    os.kill(int(attached.command("p __import__('os').getpid()").split()[0]), signal.SIGKILL)
    assert "the stopped program has ended" in attached.end()
    assert "WorkerDiedError" in rest_of(program)


def test_a_terminal_learns_that_the_agent_is_gone(deployed, stopped, terminal):
    deployed("price", service="lost")
    program = stopped("f(4)", service="lost")
    attached = terminal("kt", "debug", "lost")
    attached.until(PROMPT)
    zygote = attached.command("p __import__('os').getppid()").split()[0]
    agent = subprocess.check_output(["ps", "-o", "ppid=", "-p", zygote], text=True)
    os.kill(int(agent), signal.SIGKILL)
    assert "the connection to the pod is lost" in attached.end()
    assert "Error" in rest_of(program)


def test_much_output_at_the_prompt_comes_as_fast_as_the_terminal_reads(deployed, stopped):
    deployed("price")
    program = stopped("f(4)", service="price")
    text = "p 'x' * 100_000_000\np 'end ' + 'of it'\nc\n"
    attached = subprocess.Popen(
        ["kt", "debug", "price"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    attached.stdin.write(text.encode())
    attached.stdin.close()
    count, tail = 0, b""
    with attached.stdout as output:
        while piece := output.read(1 << 20):
            count += len(piece)
            tail = (tail + piece)[-2000:]
    assert attached.wait(DEADLINE) == 0
    assert count > 100_000_000
    assert b"end of it" in tail
    assert "result: 9" in rest_of(program)


@pytest.mark.parametrize("name", ["spin", "crowded", "sleepy", "tick", "count"])
def test_a_running_call_stops_where_it_is(deployed, terminal, name):
    argument = "600"
    handle = deployed(name)
    running = handle.options(request_id=f"request-{name}").spawn(int(argument))
    attached = terminal("kt", "debug", name, "--call", f"request-{name}")
    attached.until(PROMPT)
    assert argument in attached.command("p seconds")
    attached.command("n")
    attached.type("q\n")
    attached.end()
    running.cancel()


@pytest.mark.parametrize("name", ["tick", "sleepy"])
def test_a_running_call_whose_debugger_was_left_is_stopped_again(deployed, terminal, name):
    running = deployed(name).spawn(600)
    for _ in range(2):
        attached = terminal("kt", "debug", "--call", running.id)
        attached.until(PROMPT)
        attached.type("q\n")
        attached.end()
    running.cancel()


def test_two_running_calls_of_a_process_are_stopped_one_after_the_other(deployed, terminal):
    handle = deployed("tick")
    calls = [handle.spawn(seconds) for seconds in (600, 700)]
    prompts = []
    for call, seconds in zip(calls, ("600", "700"), strict=True):
        prompts.append(terminal("kt", "debug", "--call", call.id))
        prompts[-1].until(PROMPT)
        assert seconds in prompts[-1].command("p seconds")
    for attached, call in zip(prompts, calls, strict=True):
        attached.command("n")
        attached.type("q\n")
        attached.end()
        call.cancel()


def test_a_call_that_was_to_stop_and_ended_leaves_no_trace(deployed):
    handle = deployed("traces")
    for turn in range(4):
        call = handle.spawn(0.2 * turn)
        kt_debug("--call", call.id, typed="c\n")
        assert call.get(DEADLINE) is None
        assert handle(0) is None


def test_a_terminal_learns_that_a_running_call_does_not_stop_yet(deployed, terminal):
    handle = deployed("wait")
    running = handle.spawn(600)
    attached = terminal("kt", "debug", "--call", running.id)
    attached.until("it stops at its next line of Python")
    attached.until("in wait")  # where it hangs
    attached.interrupt()
    attached.end()
    running.cancel()


def test_what_a_debugger_elsewhere_does_leaves_no_empty_lines(deployed, stopped, terminal):
    deployed("spin", service="watched")
    program = stopped(
        "print('id', (h := f.spawn(600)).id, flush=True) or h.get()", service="watched", until="id "
    )
    attached = terminal("kt", "debug", "--call", program.lines[-1].split()[1])
    attached.until(PROMPT)
    attached.command("n")
    attached.type("!seconds = 0\nc\n")
    assert "the call has ended, and its debugger" in attached.end()
    rest = rest_of(program).splitlines()
    assert rest[-1] == "result: True"
    assert all(line.partition(") ")[2] for line in rest[:-1])


def test_a_running_call_is_found_by_its_id_alone(deployed, terminal):
    handle = deployed("sleepy")
    running = handle.spawn(600)
    attached = terminal("kt", "debug", "--call", running.id)
    attached.until(PROMPT)
    attached.type("q\n")
    attached.end()
    running.cancel()


def test_mistakes_are_said(deployed):
    deployed("plain")
    for wrong, words in (
        (("plain", "--mode", "gdb"), "it must be 'pdb', 'pdb-ui' or 'dap'"),
        (("plain",), "no call of plain waits for a debugger"),
        (("plain", "--call", "nothing"), "no call 'nothing' runs"),
        ((), "needs a pod or a service"),
    ):
        refused = kt_debug(*wrong)
        assert refused.returncode == 1
        assert words in refused.stderr


def test_a_wrong_debugger_is_a_value_error(deployed):
    handle = deployed("plain")
    with pytest.raises(ValueError, match=r"debug is 'x'; it must be True"):
        handle(1, debug="x")
    with pytest.raises(ValueError, match="mode is 'gdb'"):
        deployed("deep")(mode="gdb")
    assert handle(1, debug=False) == 2


def test_a_stopped_call_holds_its_slot_and_the_status_says_so(deployed, stopped):
    deployed("price", service="single", compute=kt.Compute(concurrency=1))
    program = stopped("f(4)", service="single")
    until(lambda: "it waits for a debugger" in commands.kt("status", "single").stdout, DEADLINE)
    assert kt_debug("single", typed="c\n").returncode == 0
    assert "result: 9" in rest_of(program)


def test_the_status_says_that_a_call_is_stopped_and_how_to_attach(deployed, stopped):
    deployed("price")
    program = stopped("f(4)", service="price")
    line = "1 call is stopped in a debugger: kt debug price attaches"
    until(lambda: line in commands.kt("status", "price").stdout)
    (pod,) = json.loads(commands.kt("status", "price", "--json").stdout)["pods"]
    assert pod["stopped"] == 1
    stacks = commands.kt("stacks", "price").stdout
    assert stacks.index("stopped in a debugger") < stacks.index(" in price")
    assert "breakpoints.py" not in stacks
    assert kt_debug("price", typed="c\n").returncode == 0
    assert "result: 9" in rest_of(program)
    until(lambda: "in a debugger" not in commands.kt("status", "price").stdout)


def test_the_configuration_of_vs_code_is_written_before_a_call_stops(deployed, tmp_path):
    deployed("plain")
    asked = commands.kt("debug", "plain", "--vscode", "--launch-json", cwd=tmp_path)
    file = tmp_path / ".vscode" / "launch.json"
    assert f"Wrote 'kubetorch: plain' to {file}" in asked.stdout + asked.stderr
    (configuration,) = json.loads(file.read_text())["configurations"]
    assert configuration["name"] == "kubetorch: plain"
    assert asked.returncode == 1
    assert "no call of plain waits for a debugger" in asked.stderr


def test_a_debugger_of_the_user_is_called_instead(deployed):
    compute = kt.Compute(env_vars={"PYTHONBREAKPOINT": "0"})
    assert deployed("price", service="own-debugger", compute=compute)(4) == 9


@pytest.mark.parametrize("mode", ["pdb-ui", "dap"])
def test_a_caller_at_a_terminal_gets_the_command_of_another_debugger(deployed, caller, mode):
    deployed("plain")
    program = caller(f"f(4, debug=kt.DebugConfig(mode={mode!r}))", service="plain")
    program.until(f"kt debug {pod_of(deployed('plain'))} --port 5678 ")
    program.until(f"--mode {mode}")
    program.until("waits 300 s for a debugger")
    assert kt_debug("plain", typed="c\n").returncode == 0
    assert "result: 5" in program.end()
    assert PROMPT not in program.output


class Page:
    """The page of `kt debug NAME --mode pdb-ui`."""

    def __init__(self, name):
        self.process = subprocess.Popen(
            ["kt", "debug", name, "--mode", "pdb-ui"],
            env={**os.environ, "KT_NO_BROWSER": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        matches = (re.search(r"http://\S+", line) for line in self.process.stdout)
        self.url = next(match[0] for match in matches if match)
        self.base, self._token = self.url.split("/?token=")

    def post(self, line, **headers):
        headers = {"X-Kubetorch-Token": self._token, **headers}
        request = urllib.request.Request(f"{self.base}/command", line.encode(), headers)
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            return json.load(answer)

    def end(self):
        self.process.communicate(timeout=DEADLINE)
        return self.process.returncode


@pytest.fixture
def page_of():
    """Opens the page of a service whose call has stopped."""
    pages = []

    def open_page(name):
        pages.append(Page(name))
        return pages[-1]

    yield open_page
    for page in pages:
        page.process.kill()
        page.process.communicate()


def test_a_page_in_the_browser_has_source_stack_variables_and_a_prompt(deployed, stopped, page_of):
    deployed("price")
    program = stopped("f(4)", service="price")
    page = page_of("price")
    with urllib.request.urlopen(page.url, timeout=DEADLINE) as answer:
        assert b"kt debug" in answer.read()
    state = page.post("")
    assert "->" in state["source"]
    assert "price()" in state["stack"]
    assert "'units': 4" in state["variables"]
    assert "8" in page.post("p total")["output"]
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{page.base}/?token=", timeout=DEADLINE)
    assert page.post("c")["is_over"]
    assert page.end() == 0
    assert "result: 9" in rest_of(program)


@pytest.mark.security
@pytest.mark.parametrize(
    "headers",
    [{"X-Kubetorch-Token": "wrong"}, {"Host": "evil.example"}, {"Origin": "http://evil.example"}],
    ids=lambda headers: next(iter(headers)),
)
def test_the_page_refuses_others_so_that_they_see_it(deployed, stopped, page_of, headers):
    deployed("price")
    stopped("f(4)", service="price")
    page = page_of("price")
    # Longer than what the server reads with the headers: unread, it would reset the connection.
    for command in ("p total", f"p {'1' * 50_000}"):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            page.post(command, **headers)


def test_the_page_ends_with_its_debugger(deployed, stopped, page_of):
    deployed("price")
    program = stopped("f(4)", service="price")
    page = page_of("price")
    assert page.post("")["stack"]
    program.send_signal(signal.SIGINT)  # which cancels the call
    assert page.end() == 0
