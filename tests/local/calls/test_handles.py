"""Handles of services: found by name, found on the first call, pickled, used inside pods."""

import asyncio
import json
import os
import pickle
import urllib.request

import pytest

import kubetorch as kt
from kubetorch.local import lifetime
from tests.local.user_project import UserProject

SOURCE = """
import pickle

import kubetorch as kt

def double(n):
    print("doubling", n)
    return 2 * n

def keywords(**given):
    return given

class Counter:
    def __init__(self, start=0):
        self.n = start

    def add(self, k):
        self.n += k
        return self.n

    def __call__(self, k):
        return self.n * k

def through(handle, n):
    return pickle.loads(bytes(handle))(n)

class Page:
    body = b"<p>hi</p>"
    media_type = "text/html"

class JsonPage(Page):
    body = b'{"a": 1}'
    headers = {"content-type": "application/json"}

RAW = {"text": "h\u00e9llo", "bytes": bytes(1), "page": Page(), "json": JsonPage(), "value": [1]}

def raw(kind):
    return RAW[kind]

def raws():
    yield from RAW.values()

def by_name(name, n):
    return kt.fn(name=name)(n)

def deploy_and_call(n):
    remote = kt.fn(double, name="inner").to(kt.Compute(cpus="0.1"))
    try:
        return remote(n)
    finally:
        remote.teardown()
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    project = UserProject(tmp_path_factory.mktemp("handles") / "shop")
    yield project
    project.forget()


@pytest.fixture(scope="module")
def jobs(project, service):
    return project.module(SOURCE)


@pytest.fixture(scope="module")
def double(jobs):
    handle = kt.fn(jobs.double)
    handle.to(kt.Compute(cpus="0.1"))
    yield handle
    handle.teardown()


@pytest.fixture(scope="module")
def counter(jobs):
    handle = kt.cls(jobs.Counter)
    handle.to(kt.Compute(cpus="0.1", allowed_serialization=["json", "pickle"]))
    yield handle
    handle.teardown()


def test_a_service_is_found_by_its_name(double, counter):
    assert kt.fn(name="double")(4) == 8
    assert kt.Fn.from_name("double")(4) == 8
    assert isinstance(kt.cls(name="counter").add(1), int)
    assert kt.Cls.from_name("counter").callable_name == "Counter"


def test_the_base_class_finds_what_a_service_is(double, counter):
    assert isinstance(kt.Module.from_name("double"), kt.Fn)
    assert isinstance(kt.Module.from_name("counter"), kt.Cls)


def test_what_is_found_knows_what_it_runs_on(counter):
    handle = kt.cls(name="counter")

    assert handle.compute.cpus == "0.1"
    assert handle.compute.allowed_serialization == ["json", "pickle"]
    assert handle.compute.service_name == handle.service_name == "counter"
    assert handle.service_config["status"] == "Ready"


def test_the_constructors_arguments_of_a_service_are_known_again(jobs, counter):
    handle = kt.cls(jobs.Counter, name="started")
    handle.to(kt.Compute(cpus="0.1"), init_args={"start": 5})
    try:
        assert kt.cls(name="started").init_args == {"start": 5}
        assert kt.cls(name="counter").init_args is None
    finally:
        handle.teardown()


def test_a_name_that_nobody_has_says_where_was_looked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no git repository, so no branch
    with pytest.raises(ValueError, match="'nobody' in namespace 'default'") as caught:
        kt.fn(name="nobody")

    assert isinstance(caught.value, LookupError)
    with pytest.raises(ValueError, match="'main-nobody' or 'bob-nobody'"):
        kt.fn(name="nobody", reload_prefixes=["main", "bob"])
    with pytest.raises(ValueError, match="namespace 'research'"):
        kt.Fn.from_name("nobody", namespace="research")


def test_a_class_is_no_function(double, counter):
    with pytest.raises(kt.SpecError, match="counter is a class") as caught:
        kt.fn(name="counter")
    assert "kt.cls" in caught.value.hint
    with pytest.raises(kt.SpecError, match="double is a function"):
        kt.cls(name="double")


def test_the_first_call_of_what_was_never_deployed_here_finds_the_service(jobs, double, counter):
    assert kt.fn(jobs.double)(5) == 10
    assert isinstance(kt.cls(jobs.Counter).add(1), int)
    assert kt.fn(jobs.by_name, name="double")(5) == 10


def test_the_first_call_without_a_service_says_what_to_do(jobs):
    with pytest.raises(kt.ServiceNotFoundError, match="byname") as caught:
        kt.fn(jobs.by_name)("double", 1)

    assert ".to(" in caught.value.hint


def test_a_service_of_a_user_or_branch_is_found_by_the_bare_name(jobs, monkeypatch):
    monkeypatch.setenv("KT_USERNAME", "alice")
    handle = kt.fn(jobs.double, name="shared")
    handle.to(kt.Compute(cpus="0.1"))
    try:
        assert handle.service_name == "alice-shared"
        assert kt.fn(name="shared")(1) == 2
        monkeypatch.setenv("KT_USERNAME", "bob")
        with pytest.raises(kt.ServiceNotFoundError):
            kt.fn(name="shared")
        assert kt.fn(name="shared", reload_prefixes="alice")(1) == 2
        monkeypatch.setenv("GITHUB_REF_NAME", "alice")
        assert kt.fn(name="shared")(1) == 2
    finally:
        handle.teardown()


def test_without_the_prefix_a_bare_name_is_deployed_and_found_alone(jobs, double, monkeypatch):
    monkeypatch.setenv("KT_USERNAME", "alice")
    handle = kt.fn(jobs.double, name="shared")
    handle.to(kt.Compute(cpus="0.1"))
    try:
        with pytest.raises(kt.ServiceNotFoundError, match="no service 'shared' in"):
            kt.Fn.from_name("shared", prefix_username=False)
        with pytest.raises(kt.ServiceTakenError):  # of whoever has no user name
            kt.fn(jobs.double).to(kt.Compute(cpus="0.1"), prefix_username=False)
        bare_handle = kt.fn(name="double", prefix_username=False)
        assert (bare_handle.service_name, bare_handle(1), bare_handle.prefix_username) == (
            "double",
            2,
            False,
        )
        monkeypatch.setenv("KT_PREFIX_USERNAME", "false")
        with pytest.raises(kt.ServiceNotFoundError):
            kt.fn(jobs.double, name="shared")(1)
        assert kt.fn(jobs.double, name="shared", prefix_username=True)(1) == 2
    finally:
        handle.teardown()


def test_an_existing_service_is_taken_without_a_deploy(jobs, counter):
    before = counter.add(0)
    generation = counter.service_config["generation"]
    handle = kt.cls(jobs.Counter)

    taken = handle.to(kt.Compute(cpus=3), get_if_exists=True)

    assert taken is handle
    assert taken.add(1) == before + 1
    assert handle.compute.cpus == "0.1"
    assert handle.service_config["generation"] == generation


def test_the_instance_itself_can_be_called(counter):
    assert counter(10) == counter.add(0) * 10


def test_a_method_that_is_not_there_is_named(counter):
    with pytest.raises(AttributeError, match="subtract"):
        counter.subtract(1)
    with pytest.raises(kt.CallableNotFoundError, match="subtract"):
        counter["subtract"](1)


def test_an_attribute_of_the_instance_cannot_be_set_on_the_handle(counter):
    with pytest.raises(
        AttributeError, match=r"'n' cannot be set on Cls.*its pods would not know"
    ) as error:
        counter.n = 5
    assert "\nhint: give the class a method that sets it" in str(error.value)
    with pytest.raises(AttributeError, match="'add' cannot be set"):
        counter.add = lambda k: k


def test_methods_have_options_and_run_over_many_items(counter):
    start = counter.add(0)

    assert counter.add.options(timeout=60)(1) == start + 1
    assert len(list(counter.add.map([0] * 5))) == 5
    assert counter.add.spawn(0).get(timeout=60) == start + 1


def test_a_pickled_handle_works_in_another_process(project, double):
    path = project.folder / "handle.pickle"
    path.write_bytes(pickle.dumps(double))

    completed = project.run(
        "-c", "import pickle; print(pickle.load(open('handle.pickle', 'rb'))(21))"
    )

    assert completed.stdout.splitlines()[-1] == "42", completed.stderr


def test_a_handle_with_options_is_pickled_with_them(project, double, counter):
    path = project.folder / "options.pickle"
    keyed = double.options(idempotency_key=f"pickled-{path}", on_progress=print)
    assert keyed(5) == 10
    path.write_bytes(pickle.dumps([keyed, counter.add.options(timeout=60)]))

    completed = project.run(
        "-c",
        "import pickle\n"
        "keyed, add = pickle.load(open('options.pickle', 'rb'))\n"
        "print(keyed(6), list(add.map([0])) == [add(0)], keyed.options(idempotency_key='k')(7))\n"
        "print(len(pickle.dumps(keyed)) > 0)\n",
        KT_STREAM_LOGS="false",
    )

    assert (completed.returncode, completed.stdout.split()) == (0, ["10", "True", "14", "True"]), (
        completed.stderr
    )


def test_what_the_configuration_says_of_logs_counts_for_handles_that_were_called(double, capsys):
    keyed = double.options(timeout=60)
    double(1)
    keyed(1)
    assert capsys.readouterr().out.count("doubling 1") == 2
    kt.config.stream_logs = False
    try:
        double(2)
        keyed(2)
        double.spawn(2).result()
        assert "doubling" not in capsys.readouterr().out
        keyed.options(stream_logs=True)(3)
        double.logging_config = kt.LoggingConfig(stream_logs=True)
        double(3)
        assert capsys.readouterr().out.count("doubling 3") == 2
        double.logging_config = kt.LoggingConfig()
        kt.config.stream_logs = True
        double(4)
        assert "doubling 4" in capsys.readouterr().out
    finally:
        kt.config.unset("stream_logs")


def test_a_keyword_may_be_called_self(jobs):
    remote = kt.fn(jobs.keywords).to(kt.Compute(cpus="0.1"))
    keywords = {"self": 1, "args": 2, "kwargs": 3, "options": 4, "method": 5}
    try:
        assert remote(**keywords) == keywords
        assert remote.options(timeout=60)(**keywords) == keywords
        assert remote.spawn(**keywords).result() == keywords
        assert list(remote.starmap([()], kwargs=keywords)) == [keywords]
        assert asyncio.run(remote(**keywords, async_=True)) == keywords
    finally:
        remote.teardown()


def test_a_handle_is_passed_to_another_service_and_called_there(jobs, double, capsys):
    through = kt.fn(jobs.through)
    through.to(kt.Compute(cpus="0.1"))
    try:
        assert through(list(pickle.dumps(double)), 3) == 6
        pod = double.service_config["pods"][0]["name"]
        assert f"({pod}) doubling 3" in capsys.readouterr().out
    finally:
        through.teardown()


def test_a_call_in_none_gives_values_of_json_and_all_else_raw(jobs):
    remote = kt.fn(jobs.raw).to(kt.Compute(cpus="0.1"))
    remote.serialization = "none"
    try:
        called = [remote(kind) for kind in jobs.RAW]
        spawned = [remote.spawn(kind).get(timeout=60) for kind in jobs.RAW]
        async_ = [asyncio.run(remote(kind, async_=True)) for kind in jobs.RAW]
    finally:
        remote.teardown()
    expected = ["h\u00e9llo", b"\x00", "<p>hi</p>", {"a": 1}, [1]]
    assert called == spawned == async_ == expected
    assert [response.text for response in called[:3]] == ["h\u00e9llo", "\x00", "<p>hi</p>"]
    assert called[2].content_type == "text/html"


def test_the_values_of_a_generator_in_none_are_raw_too(jobs):
    remote = kt.fn(jobs.raws).to(kt.Compute(cpus="0.1"))
    try:
        values = list(remote(serialization="none"))
    finally:
        remote.teardown()
    assert values == ["h\u00e9llo", b"\x00", "<p>hi</p>", {"a": 1}, [1]]


def test_code_in_a_pod_finds_deploys_and_calls_services(jobs, double):
    for function, arguments in ((jobs.by_name, ["double", 4]), (jobs.deploy_and_call, [4])):
        handle = kt.fn(function)
        handle.to(kt.Compute(cpus="0.1"))
        try:
            assert handle(*arguments) == 8
        finally:
            handle.teardown()
    with pytest.raises(kt.ServiceNotFoundError):
        kt.fn(name="inner")


def test_the_endpoint_and_the_headers_serve_any_client(double, counter):
    request = urllib.request.Request(
        double.endpoint(), data=json.dumps({"args": [4]}).encode(), headers=double.request_headers
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response) == 8

    assert counter.endpoint("add") == f"{counter.base_endpoint}/Counter/add"


def test_the_controller_is_reached_through_globals(double):
    controller = kt.globals.controller_client()

    assert kt.globals.config is kt.config
    assert kt.globals.service_url() == controller.base_url == lifetime.status().running.url
    assert "double" in [view.spec.name for view in controller.list_workloads("default")]
    assert controller.get_status().pid == lifetime.status().running.pid


def test_namespaces_keep_services_apart(jobs, double):
    research_double = kt.fn(jobs.double)
    research_double.to(kt.Compute(cpus="0.1", namespace="research"))
    try:
        assert research_double.namespace == "research"
        assert kt.Fn.from_name("double", namespace="research")(1) == 2
        research_double.teardown()
        assert double(1) == 2
    finally:
        research_double.teardown()


def test_without_a_kubeconfig_the_kubernetes_backend_says_so(monkeypatch):
    monkeypatch.setenv("KT_BACKEND", "kubernetes")
    monkeypatch.delenv("KUBECONFIG", raising=False)

    with pytest.raises(kt.ConfigError, match="there is no kubeconfig") as caught:
        kt.fn(name="double")

    assert "KT_BACKEND=local" in caught.value.hint


def test_a_service_that_the_user_named_in_full_is_not_prefixed_again(jobs, monkeypatch):
    handle = kt.fn(jobs.double, name="alice-full")
    handle.to(kt.Compute(cpus="0.1"))
    try:
        monkeypatch.setenv("KT_USERNAME", "alice")
        assert kt.fn(jobs.double, name="alice-full")(2) == 4
        assert os.environ["KT_USERNAME"] == "alice"
    finally:
        handle.teardown()
