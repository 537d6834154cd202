"""Deploying functions and classes to the local service: code, state, errors, teardown."""

import asyncio
import os
import signal
import threading

import pytest

import kubetorch as kt
from kubetorch.local import lifetime

SOURCE = """
import os

class Refused(Exception):
    pass

def train(steps, lr=0.1):
    print("step", steps)
    return {"loss": lr / steps}

def pod():
    return os.environ["POD_NAME"], os.environ["KT_SERVICE_NAME"], os.environ.get("STAGE")

def fail(text):
    raise Refused(text)

class Counter:
    def __init__(self, start=0):
        if start < 0:
            raise ValueError("start must not be negative")
        self.n = start

    def add(self, k):
        self.n += k
        return self.n

    def pod(self):
        return os.environ["POD_NAME"]
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture
def jobs(project):
    return project.module(SOURCE)


@pytest.fixture
def deployed():
    """Deploys, and tears down at the end."""
    handles = []

    def deploy(handle, *arguments, **keywords):
        handles.append(handle)
        return handle.to(kt.Compute(cpus="0.1"), *arguments, **keywords)

    yield deploy
    for handle in handles:
        handle.teardown()


def test_a_function_runs_in_a_pod_and_what_it_prints_is_shown(jobs, deployed, capsys):
    train = deployed(kt.fn(jobs.train))

    assert train(10, lr=0.5) == {"loss": 0.05}
    pod = train.service_config["pods"][0]["name"]
    assert capsys.readouterr().out == f"({pod}) step 10\n"


def test_a_class_keeps_its_state_until_it_is_deployed_again(jobs, deployed):
    handle = kt.cls(jobs.Counter)
    counter = deployed(handle, init_args={"start": 5})
    pod = counter.pod()

    assert [counter.add(2), counter.add(3)] == [7, 10]
    redeployed = deployed(handle, init_args={"start": 5})

    assert redeployed.add(2) == 7
    assert redeployed.pod() == pod


def test_other_constructor_arguments_make_another_instance(jobs, deployed):
    handle = kt.cls(jobs.Counter)

    assert deployed(handle, init_args={"start": 5}).add(1) == 6
    assert deployed(handle, init_args={"start": 50}).add(1) == 51
    assert deployed(handle).add(1) == 1


def test_an_edit_is_live_after_the_next_deploy_in_the_same_pod(project, jobs, deployed):
    handle = kt.fn(jobs.pod)
    before = deployed(handle)()

    project.module(SOURCE.replace('os.environ["KT_SERVICE_NAME"]', '"edited"'))
    after = deployed(handle)()

    assert before[0] == after[0]
    assert after[1] == "edited"


def test_a_deploy_without_changes_keeps_the_generation(jobs, deployed):
    handle = kt.fn(jobs.train)
    deployed(handle)
    first = handle.service_config["generation"]
    deployed(handle)

    assert handle.service_config["generation"] == first


def test_an_import_error_is_raised_with_its_traceback_and_the_old_code_serves(
    project, jobs, deployed
):
    handle = kt.fn(jobs.train)
    train = deployed(handle)
    project.write(f"jobs{project.suffix}.py", "import not_there_at_all\n" + SOURCE)

    with pytest.raises(ModuleNotFoundError, match="not_there_at_all") as caught:
        deployed(handle)

    assert "import not_there_at_all" in caught.value.remote_traceback
    assert train(1) == {"loss": 0.1}


def test_calling_what_never_loaded_raises_at_once_why_it_did_not(project, jobs, deployed):
    project.write(f"jobs{project.suffix}.py", "import not_there_at_all\n" + SOURCE)
    handle = kt.fn(jobs.train)
    with pytest.raises(ModuleNotFoundError):
        deployed(handle)

    for caller in (handle, kt.fn(name="train")):
        with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
            caller(1)


def test_a_syntax_error_is_raised_and_the_next_deploy_works(project, jobs, deployed):
    handle = kt.fn(jobs.train)
    project.write(f"jobs{project.suffix}.py", SOURCE + "\ndef (:\n")
    with pytest.raises(SyntaxError):
        deployed(handle)

    project.write(f"jobs{project.suffix}.py", SOURCE)
    assert deployed(handle)(1) == {"loss": 0.1}


def test_an_error_of_the_constructor_is_raised_by_the_deploy(jobs, deployed):
    handle = kt.cls(jobs.Counter)
    counter = deployed(handle, init_args={"start": 1})

    with pytest.raises(ValueError, match="must not be negative"):
        deployed(handle, init_args={"start": -1})
    with pytest.raises(TypeError, match="unknown"):
        deployed(handle, init_args={"unknown": 1})

    assert counter.add(1) == 2


def test_the_users_own_exception_is_raised_as_itself(jobs, deployed):
    fail = deployed(kt.fn(jobs.fail))

    with pytest.raises(jobs.Refused, match="too much") as caught:
        fail("too much")

    assert "raise Refused(text)" in caught.value.remote_traceback
    assert caught.value.pod_name


def test_lines_that_loading_prints_are_shown_with_the_services_name(project, deployed, capsys):
    jobs = project.module("print('loading')\ndef f():\n    return 1\n")
    capsys.readouterr()

    deployed(kt.fn(jobs.f, name="loud"))

    assert capsys.readouterr().out == "(loud) loading\n"


def test_lines_are_not_shown_when_the_user_does_not_want_them(project, deployed, capsys):
    jobs = project.module("print('loading')\ndef f():\n    print('called')\n    return 1\n")
    capsys.readouterr()

    f = deployed(kt.fn(jobs.f), stream_logs=False)
    f()
    quiet = capsys.readouterr().out
    f(stream_logs=True)

    assert quiet == ""
    assert "called" in capsys.readouterr().out


def test_the_pods_environment_has_what_was_declared(jobs):
    handle = kt.fn(jobs.pod)
    pod = handle.to(kt.Compute(env_vars={"STAGE": "test"}))

    assert pod()[1:] == ["pod", "test"]
    handle.teardown()


def test_pickle_is_refused_unless_it_is_allowed(jobs, deployed):
    train = deployed(kt.fn(jobs.train))
    with pytest.raises(kt.SerializationError, match="'pickle' not allowed"):
        train(1, serialization="pickle")

    handle = kt.fn(jobs.train)
    handle.serialization = "pickle"
    picky = handle.to(kt.Compute(allowed_serialization=["pickle"]))
    assert picky(1) == {"loss": 0.1}


def test_a_service_is_gone_after_its_teardown(jobs):
    handle = kt.fn(jobs.train)
    second_handle = kt.fn(jobs.train)
    train = handle.to(kt.Compute())
    train(1)

    assert handle.teardown() is None
    handle.teardown()

    for handle_without_service in (train, second_handle):
        with pytest.raises(kt.ServiceNotFoundError, match="train"):
            handle_without_service(1)


def test_one_compute_may_be_given_to_two_modules(jobs):
    compute = kt.Compute(cpus="0.1")
    first, second = kt.fn(jobs.train), kt.fn(jobs.pod)
    first.to(compute)
    second.to(compute)

    assert first(1) == {"loss": 0.1}
    assert second()[1] == "pod"
    assert first.compute is compute
    assert second.compute == compute
    assert [first.compute.service_name, second.compute.service_name] == ["train", "pod"]
    first.teardown()
    second.teardown()


def test_services_are_deployed_and_torn_down_from_coroutines_at_once(jobs):
    async def both():
        handles = [kt.fn(jobs.train), kt.cls(jobs.Counter)]
        train, counter = await asyncio.gather(*(h.to_async(kt.Compute()) for h in handles))
        values = await train(1, async_=True), await counter.add(1, async_=True)
        await handles[0].deploy_async()
        await asyncio.gather(*(h.teardown_async() for h in handles))
        return values

    assert asyncio.run(both()) == ({"loss": 0.1}, 1)


def deploy_at_once(handles):
    threads = [threading.Thread(target=handle.to, args=(kt.Compute(),)) for handle in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {handle.service_config["generation"] for handle in handles}


def test_two_programs_that_deploy_the_same_function_end_with_one_generation(jobs):
    handles = [kt.fn(jobs.train) for _ in range(4)]

    assert deploy_at_once(handles) == {1}
    assert [handle(1) for handle in handles] == [{"loss": 0.1}] * 4
    handles[0].teardown()


def test_two_programs_that_deploy_the_same_class_at_once_share_the_instance(jobs):
    handles = [kt.cls(jobs.Counter) for _ in range(4)]

    assert deploy_at_once(handles) == {1}
    assert [handle.add(1) for handle in handles] == [1, 2, 3, 4]
    handles[0].teardown()


def test_a_forked_child_calls_and_deploys_with_connections_of_its_own(jobs, deployed):
    handle = kt.fn(jobs.train)
    train = deployed(handle)
    train(1)
    child = os.fork()
    if child == 0:
        ok = train(2) == {"loss": 0.05} and handle.to(kt.Compute(cpus="0.1"))(1) is not None
        os._exit(0 if ok else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert train(4) == {"loss": 0.025}


def test_deploys_and_calls_go_on_after_the_local_service_was_killed(project, jobs, deployed):
    handle = kt.fn(jobs.train)
    train = deployed(handle)
    running = lifetime.status().running
    os.kill(running.pid, signal.SIGKILL)

    assert train(1) == {"loss": 0.1}
    project.module(SOURCE.replace("lr / steps", "lr * steps"))
    assert deployed(handle)(2) == {"loss": 0.2}
    assert lifetime.status().running.pid != running.pid


def test_the_controller_is_there_again_after_the_local_service_ended(service):
    kt.globals.controller_client()
    for _ in range(3):
        running = lifetime.status().running
        os.kill(running.pid, signal.SIGKILL)

        assert kt.globals.controller_client().list_workloads() == []


def test_what_failed_is_not_why_a_call_waits_for_the_old_code_of_a_pod_that_is_away(
    project, jobs, deployed
):
    handle = kt.fn(jobs.train)
    deployed(handle)
    project.write(f"jobs{project.suffix}.py", "import not_there_at_all\n" + SOURCE)
    with pytest.raises(ModuleNotFoundError):
        deployed(handle)
    (pod,) = kt.globals.session().get_workload(handle.namespace, handle.service_name).pods

    os.kill(pod.pid, signal.SIGSTOP)  # so that it does not connect at once
    try:
        os.kill(lifetime.status().running.pid, signal.SIGKILL)
        view = kt.globals.session().get_workload(handle.namespace, handle.service_name)
        assert (view.status, view.failure["error_type"]) == ("Creating", "ModuleNotFoundError")
        threading.Timer(1.0, os.kill, (pod.pid, signal.SIGCONT)).start()
        assert kt.Fn.from_name(handle.service_name)(1) == {"loss": 0.1}
    finally:
        os.kill(pod.pid, signal.SIGCONT)


def test_filters_of_the_environment_say_what_travels(project, monkeypatch):
    jobs = project.module(
        """
        import os

        def files():
            return sorted(os.listdir(os.path.dirname(__file__)))
        """
    )
    (project.folder / ".gitignore").write_text("*.log\n")
    for name in ("weights.bin", "run.log"):
        (project.folder / name).write_text("x")
    listed = kt.fn(jobs.files)
    plain = listed.to(kt.Compute(cpus="0.1"))()
    assert "weights.bin" in plain
    assert "run.log" not in plain
    monkeypatch.setenv("KT_RSYNC_FILTERS", "--exclude=*.bin")
    filtered = listed.to(kt.Compute(cpus="0.1"))()
    assert "weights.bin" not in filtered
    assert "run.log" in filtered
    monkeypatch.setenv("KT_RSYNC_FILTERS", "--delete")
    with pytest.raises(kt.SpecError, match="KT_RSYNC_FILTERS"):
        listed.to(kt.Compute(cpus="0.1"))
