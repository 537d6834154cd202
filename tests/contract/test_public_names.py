"""The names that programs import, and that nothing else comes with them."""

import inspect
import os
import pickle
import subprocess
import sys

import pytest

import kubetorch as kt
from kubetorch import errors

NAMES = {
    "App",
    "BroadcastWindow",
    "CallHandle",
    "Cls",
    "Compute",
    "Data",
    "EXCEPTION_REGISTRY",
    "Endpoint",
    "Fn",
    "Image",
    "InstanceReplacedWarning",
    "LoggingConfig",
    "Module",
    "Ref",
    "RemoteTraceback",
    "ScalingStats",
    "Secret",
    "Volume",
    "__version__",
    "app",
    "async_",
    "autoscale",
    "batched",
    "calls",
    "cls",
    "compute",
    "config",
    "distribute",
    "distributed",
    "fn",
    "get",
    "get_async",
    "globals",
    "images",
    "ls",
    "ls_async",
    "metric",
    "on_preempt",
    "progress",
    "put",
    "put_async",
    "ref",
    "rm",
    "rm_async",
    "secret",
    "service",
}
#: Names of what later releases bring; they can be imported.
LATER = {
    "DebugConfig",
    "MetricsConfig",
    "deep_breakpoint",
}


def test_the_public_names_are_these():
    assert set(kt.__all__) == NAMES | LATER | set(errors.EXCEPTION_REGISTRY)
    assert dir(kt) == kt.__all__


def test_the_settings_of_a_debugger_are_checked():
    assert kt.DebugConfig().to_dict() == {"mode": "pdb", "port": 5678}
    assert kt.DebugConfig("pdb-ui", 6000).port == 6000
    for wrong in ({"mode": "gdb"}, {"port": 0}, {"port": "5678"}):
        with pytest.raises(kt.SpecError):
            kt.DebugConfig(**wrong)
    for wrong in ({"debug_mode": "gdb"}, {"debug_port": 0}):
        with pytest.raises(ValueError, match="it must be"):
            kt.deep_breakpoint(**wrong)


def test_metrics_can_be_asked_for():
    assert (kt.MetricsConfig().interval, kt.MetricsConfig(scope="pod").scope) == (30, "pod")
    for wrong in ({"interval": 0}, {"scope": "node"}):
        with pytest.raises(kt.SpecError):
            kt.MetricsConfig(**wrong)


def test_a_name_that_nobody_knows_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Imag'"):
        _ = kt.Imag


def in_a_new_process(code):
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.strip()


@pytest.mark.parametrize(
    "first",
    [
        "import kubetorch.config.settings",
        "import kubetorch.sdk.fn, kubetorch.sdk.cls, kubetorch.errors",
        "kt.globals; kt.fn; kt.cls; kt.config",
        "from kubetorch import *",
    ],
)
def test_names_mean_the_same_whatever_was_imported_before(first):
    code = (
        f"import kubetorch as kt\n{first}\n"
        "print(type(kt.config).__name__, type(kt.fn).__name__, type(kt.cls).__name__,"
        " kt.globals.__name__, kt.globals.config is kt.config)"
    )

    assert in_a_new_process(code) == (
        "KubetorchConfig function function kubetorch.sdk.backend True"
    )


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_program_says_where_its_pods_run_unless_it_is_to_be_quiet(is_quiet, tmp_path):
    quiet = "kt.globals.be_quiet()" * is_quiet
    code = f"import sys, kubetorch as kt\n{quiet}\nkt.globals.session(); sys.stderr.write('end')"
    terminal, child_terminal = os.openpty()
    with os.fdopen(terminal, "rb", buffering=0) as shown:
        environ = {"HOME": str(tmp_path)}
        subprocess.run(
            [sys.executable, "-c", code], stderr=child_terminal, env=environ, timeout=100
        )
        text = shown.read(1000)
        os.close(child_terminal)

    assert text.endswith(b"end")
    assert (b"pods run on this machine" in text) == (not is_quiet)


def test_settings_are_changed_and_never_replaced():
    with pytest.raises(AttributeError, match="attributes"):
        kt.config = None
    kt.config.namespace = "research"
    try:
        assert kt.Compute().namespace == "research"
    finally:
        kt.config.unset("namespace")


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    assert kt.__version__ == version("kubetorch")


def test_every_error_is_importable_by_the_name_that_its_pickle_has():
    for name, error in kt.EXCEPTION_REGISTRY.items():
        assert getattr(kt, name) is error
        assert pickle.loads(pickle.dumps(error)) is error


def test_every_documented_parameter_of_the_factories_is_there_in_order():
    expected = [
        "name",
        "get_if_exists",
        "reload_prefixes",
        "sync_dir",
        "remote_dir",
        "remote_import_path",
        "prefix_username",
    ]

    assert list(inspect.signature(kt.fn).parameters) == [
        "function_obj",
        *expected,
        "options",
        "record",
    ]
    of_class = ["class_obj", *expected, "on_replace", "options", "record"]
    assert list(inspect.signature(kt.cls).parameters) == of_class
    to = list(inspect.signature(kt.Fn.to).parameters)[1:7]
    assert to == [
        "compute",
        "init_args",
        "stream_logs",
        "get_if_exists",
        "reload_prefixes",
        "dryrun",
    ]
    assert list(inspect.signature(kt.Module.from_name).parameters) == [
        "name",
        "namespace",
        "reload_prefixes",
        "prefix_username",
    ]
