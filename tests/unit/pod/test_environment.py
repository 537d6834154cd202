import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from kubetorch.pod import environment
from kubetorch.specs.callable import AppSpec, CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.logging import LoggingConfig
from kubetorch.specs.secret import SecretRef
from kubetorch.specs.volume import VolumeSpec
from kubetorch.specs.workload import RuntimeSpec, WorkloadSpec
from kubetorch.wire.podenv import PodEnv

POD = PodEnv(
    namespace="ns",
    workload="demo",
    pod="demo-0",
    controller_file="c",
    credentials_file="s",
    host="127.0.0.1",
    port=1,
    root="/root",
    working_dir="/work",
    environments="/environments",
)


def spec(env_vars=(), runtime=None, **ref) -> WorkloadSpec:
    callable_fields = {"kind": "fn", "name": "f", "module": "m", "qualname": "f", **ref}
    return WorkloadSpec(
        "ns",
        "demo",
        CallableRef(**callable_fields),
        compute=ComputeSpec(env_vars=env_vars, logging=LoggingConfig(level="warning")),
        runtime=runtime or RuntimeSpec(),
    )


def test_a_worker_inherits_what_user_code_needs_to_deploy_and_nothing_of_the_agents_own():
    environ = {"PATH": "/bin", "KT_LOCAL_DIR": "/home/kt", **POD.write()}
    env = environment.worker_environ(environ, POD, spec())
    assert env["PATH"] == "/bin"
    assert env["KT_LOCAL_DIR"] == "/home/kt"
    assert (env["KT_BACKEND"], env["KT_NAMESPACE"]) == ("local", "ns")
    assert not any(name.startswith("KT_POD_") for name in env)


def test_a_worker_knows_who_it_is_whatever_the_user_declares():
    env = environment.worker_environ({}, POD, spec((("POD_NAME", "x"), ("KT_SERVICE", "y"))))
    assert (env["POD_NAME"], env["KT_SERVICE"], env["KT_LOG_LEVEL"]) == (
        "demo-0",
        "demo",
        "warning",
    )


@pytest.mark.parametrize(
    ("value", "expanded"),
    [
        ("$A/bin", "1/bin"),
        ("${A}B", "1B"),
        ("$MISSING ${MISSING}", "$MISSING ${MISSING}"),
        ("$", "$"),
        ("$$A", "$1"),
        ("100%", "100%"),
        ("${A", "${A"),
        ("$Aé", "1é"),
    ],
)
def test_names_are_expanded_and_unknown_ones_stay(value, expanded):
    assert environment.expand(value, {"A": "1"}) == expanded


def test_earlier_variables_are_visible_to_later_ones():
    env = environment.worker_environ({"P": "p"}, POD, spec((("A", "$P/a"), ("P", "$A:$P"))))
    assert (env["A"], env["P"]) == ("p/a", "p/a:p")


def worker(spec: WorkloadSpec, code: Path | None):
    prepared = environment.Prepared(environment.interpreter(spec), {"A": "1"}, spec.runtime.path)
    return environment.worker_spec(3, spec, pod=POD, prepared=prepared, code=code, init_args="{}")


def test_root_and_project_come_first_and_libraries_last():
    runtime = RuntimeSpec(python="/py", path=("/lib", "/code/proj"), preload=("numpy",))
    worker_spec = worker(spec(root="src", runtime=runtime), Path("/code/proj"))
    assert worker_spec.sys_path == ("/code/proj/src", "/code/proj", "/lib")
    assert worker_spec.library_path == ("/lib", "/code/proj")
    assert (worker_spec.python, worker_spec.preload, worker_spec.cwd) == (
        "/py",
        ("numpy",),
        "/work",
    )
    assert (worker_spec.generation, worker_spec.init_args, worker_spec.env) == (3, "{}", {"A": "1"})


def test_code_of_the_container_is_found_relative_to_the_working_directory():
    assert worker(spec(remote_dir="app"), None).sys_path == ("/work/app",)
    assert worker(spec(remote_dir="/opt/app"), None).sys_path == ("/opt/app",)
    assert worker(spec(), None).sys_path == ()
    assert worker(spec(), None).python == sys.executable


def test_a_level_that_an_image_sets_is_that_of_the_worker():
    for level, expected_level in (("DEBUG", "debug"), ("loud", "warning")):
        prepared = environment.Prepared("/py", {"KT_LOG_LEVEL": level})
        worker_spec = environment.worker_spec(
            1, spec(), pod=POD, prepared=prepared, code=None, init_args=None
        )
        assert worker_spec.log_level == expected_level


def test_names_in_pickles_of_a_script_are_translated():
    assert worker(spec(is_script=True), None).modules == {"__main__": "m"}
    assert worker(spec(), None).modules == {}


def test_references_of_kubernetes_are_expanded_too():
    assert environment.expand("$(A)2 $$(A) $(NONE)", {"A": "1"}) == "12 $(A) $(NONE)"


@pytest.mark.parametrize(
    ("value", "expanded"),
    [
        ("${A:-x}${E:-x}${NONE:-x}", "1xx"),
        ("/x${A:+:$A}${E:+:$A}${NONE:+:$A}", "/x:1"),
        ("${NONE:-${E:-$A/b}}", "1/b"),
        ("${A:?x} ${A:-x", "${A:?x} ${A:-x"),
    ],
)
def test_words_for_what_is_set_and_what_is_not_are_as_in_a_dockerfile(value, expanded):
    assert environment.expand(value, {"A": "1", "E": ""}) == expanded


@pytest.mark.parametrize(
    ("folder", "code", "expected_folder"),
    [
        (None, "/code/shop", "/work"),
        ("jobs", "/code/shop", "/code/shop/jobs"),
        ("", "/code/shop", "/code/shop"),
        ("jobs", None, "/work/jobs"),
        ("/app", None, "/app"),
    ],
)
def test_an_app_runs_in_a_folder_of_its_project_or_else_of_its_pod(folder, code, expected_folder):
    app_spec = spec(kind="app", app=AppSpec("make", folder=folder))
    prepared = environment.Prepared("/py", {})
    run = environment.app_run(
        1, app_spec, pod=POD, prepared=prepared, code=None if code is None else Path(code)
    )
    assert run.folder == expected_folder


@pytest.mark.parametrize(
    ("env_vars", "own_port", "port"),
    [((), None, "8000"), ((("PORT", "9000"),), None, "9000"), ((("PORT", "9000"),), 8123, "8123")],
)
def test_an_app_has_its_declared_port_also_where_the_image_has_another(env_vars, own_port, port):
    app_spec = spec(env_vars, kind="app", app=AppSpec("serve {port}", port=8000))
    variables = {"PORT": "8080", **dict(env_vars)}
    run = environment.app_run(
        1,
        app_spec,
        pod=POD,
        prepared=environment.Prepared("/py", variables),
        code=None,
        own_port=own_port,
    )
    assert run.env["PORT"] == port
    assert run.env["KT_APP_PORT"] == str(run.port) == str(own_port or 8000)


def test_a_home_that_cannot_be_written_to_is_replaced(tmp_path):
    environ = environment.user_environ({"HOME": "/nowhere", "A": "1"}, tmp_path)
    assert (environ["HOME"], environ["A"]) == ("/root", "1")
    assert environment.user_environ({"HOME": str(tmp_path)}, tmp_path)["HOME"] == str(tmp_path)


def test_what_the_user_of_a_pod_cannot_use_is_named(tmp_path):
    volume = VolumeSpec("data", "/nowhere/data")
    secret = SecretRef("aws", "kt.secret.aws", "volume", path="/nowhere/aws")
    compute = ComputeSpec(volumes=(volume,), secrets=(secret,))
    pod = structs.replace(POD, working_dir=str(tmp_path))
    denials = environment.denials(replace(spec(), compute=compute), pod)
    assert denials == [
        "there is no /nowhere/data, the volume 'data'",
        "there is no /nowhere/aws, the secret 'aws'",
    ]
    (tmp_path / "file").touch()
    compute = ComputeSpec(volumes=(replace(volume, mount_path=str(tmp_path / "file" / "data")),))
    [denial] = environment.denials(replace(spec(), compute=compute), pod)
    assert denial.partition(", as")[0] == f"user {os.geteuid()}"
    assert f"cannot write to {tmp_path}/file/data, the volume 'data'" in denial
