"""The words that users of Modal, Ray, SkyPilot and futures type, and what they are told.

A new public name of a handle, of an image or of `kt` adds a line to the tables here: what others
call it, and whether a method of a user's class can be hidden by it.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kubetorch as kt
from kubetorch.cli.main import COMMANDS
from kubetorch.sdk.compute_parameters import PARAMETERS
from kubetorch.specs import autoscaling, distribution, hints
from kubetorch.specs.callable import OVERRIDABLE_METHODS
from kubetorch.specs.foreign_words import WORDS

#: What is asked, the foreign word, and a part of the hint: our word.
TABLE = {
    "handle": {
        "remote": "f(...)",
        "submit": "f.spawn(...)",
        "delete": "f.teardown()",
        "logs": "kt logs",
        "for_each": "f.map(items)",
        "with_options": "f.options(",
        "url": "f.endpoint()",
        "exec": "kt ssh",
        "scale": "f.autoscale(min_scale=1)",
        "keep_warm": "f.autoscale(min_scale=1)",
        "restart": "f.deploy()",
    },
    "callable": {"remote": "(...)", "submit": ".spawn(...)", "aio": "async_=True"},
    "spawned call": {"kill": ".cancel()", "join": ".wait()", "exception": ".get()"},
    "kubetorch": {
        "remote": "@kt.compute(cpus=1)",
        "function": "@kt.compute(cpus=1)",
        "init": "nothing",
        "web_endpoint": "kt.app(port=8000)",
        "debian_slim": "kt.images.debian()",
    },
    "to": {"cpus": "kt.Compute(cpus=...)", "num_gpus": "gpus=1", "name": "kt.fn(f, name="},
    "kt.Compute": {
        "timeout": "f.options(timeout=60)",
        "accelerators": 'gpus=1, gpu_type="A100"',
        "name": "kt.fn(f, name=",
        "num_gpus": "did you mean gpus?",
        "num_cpus": "did you mean cpus?",
        "env": "did you mean env_vars?",
        "mem": "did you mean memory?",
        "max_containers": ".autoscale(",
    },
    "autoscale": {
        "min": "did you mean min_scale?",
        "max": "did you mean max_scale?",
        "min_containers": "did you mean min_scale?",
        "max_containers": "did you mean max_scale?",
        "buffer_containers": "did you mean buffer?",
        "cron": 'min_scale={"0 8 * * 1-5": 4',
        "min_workers": "did you mean min_scale?",
        "max_scal": "did you mean max_scale?",
    },
    "distribute": {"num_workers": "did you mean workers?", "nproc_per_node": "num_proc"},
    "kt.Image": {
        "apt_install": ".run_bash(",
        "from_registry": "image_id=",
        "add_local_dir": ".copy(",
        "env": ".set_env_vars(",
        "debian_slim": "kt.images.debian()",
    },
    "kt": {
        "ps": "kt list",
        "stop": "kt teardown me",
        "delete": "kt teardown me",
        "restart": "kt deploy",
        "version": "kt --version",
    },
}

#: Public names of class handles that hide a method of the user's of the same name: these, since
#: programs use them. A later name goes behind the user's (see `OF_COMPUTE` in `sdk/cls.py`).
HIDING = {
    "async_",
    "base_endpoint",
    "callable_name",
    "compute",
    "container_project_root",
    "declare",
    "deploy",
    "deploy_async",
    "endpoint",
    "from_name",
    "init_args",
    "is_decorated",
    "kind",
    "logging_config",
    "name",
    "namespace",
    "prefix_username",
    "reload_prefixes",
    "remote_import_path",
    "remote_root_path",
    "request_headers",
    "serialization",
    "service_config",
    "service_name",
    "stream_logs",
    "sync_dir",
    "teardown",
    "teardown_async",
    "to",
    "to_async",
}
#: Verbs of functions and methods.
VERBS = {"local", "map", "map_async", "options", "spawn", "starmap", "starmap_async"}


class Counter:
    def add(self, n):
        return n


class Busy:
    """Has methods of the names that are ours elsewhere."""

    def ssh(self):
        return "mine"

    def logs(self):
        return "mine"

    def local(self):
        return "mine"

    def remote(self):
        return "mine"

    def stats(self):
        return "mine"


def refusal(subject, word):
    """The error of a program that uses a foreign word."""
    value = {word: 1}
    ask = {
        "handle": lambda: getattr(kt.fn(refusal, name="f"), word),
        "callable": lambda: getattr(kt.cls(Counter)["add"], word),
        "spawned call": lambda: getattr(kt.CallHandle("0" * 32), word),
        "kubetorch": lambda: getattr(kt, word),
        "to": lambda: kt.fn(refusal).to(**value),
        "kt.Compute": lambda: kt.Compute(**value),
        "autoscale": lambda: kt.Compute().autoscale(**value),
        "distribute": lambda: kt.Compute().distribute(**value),
        "kt.Image": lambda: getattr(kt.Image(), word),
    }[subject]
    with pytest.raises((AttributeError, TypeError, kt.SpecError)) as error:
        ask()
    return error.value


def refused(subject, word):
    """What a program is told that uses a foreign word."""
    return str(refusal(subject, word))


@pytest.mark.parametrize("subject", [subject for subject in TABLE if subject != "kt"])
def test_a_word_of_another_tool_is_refused_with_ours(subject):
    for word, ours in TABLE[subject].items():
        assert ours in refused(subject, word), (word, refused(subject, word))


@pytest.mark.parametrize("subject", [subject for subject in WORDS if subject not in ("kt", "call")])
def test_every_foreign_word_that_is_known_leads_on(subject):
    for word in WORDS[subject]:
        if subject == "handle" and word in VERBS:
            continue
        name = {"callable": "handle.add", "spawned call": "0" * 32}.get(subject, "f")
        assert hints.hint(subject, word, name) in refused(subject, word), word


@pytest.mark.parametrize("subject", ["handle", "callable", "spawned call", "kubetorch", "kt.Image"])
def test_python_suggests_no_other_name_behind_a_hint(subject, capsys):
    for word in WORDS[subject].keys() - (VERBS if subject == "handle" else set()):
        error = refusal(subject, word)
        sys.__excepthook__(type(error), error, None)
    assert "Did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("word", TABLE["kt"])
def test_a_command_of_another_tool_is_refused_with_ours(word):
    kt_command = Path(sys.executable).parent / "kt"
    completed = subprocess.run(
        [kt_command, word, "-n", "team", "me"], capture_output=True, text=True, timeout=100
    )
    assert completed.returncode == 2
    assert TABLE["kt"][word] in completed.stderr


def test_no_word_of_others_is_one_of_ours():
    images = {name for name in dir(kt.Image) if not name.startswith("_")}
    assert not WORDS["kt"].keys() & COMMANDS.keys()
    assert not WORDS["kubetorch"].keys() & set(kt.__all__)
    assert not WORDS["handle"].keys() & set(dir(kt.Fn)) - {"local"}
    assert not WORDS["handle"].keys() & set(dir(kt.Cls))
    assert not WORDS["kt.Compute"].keys() & PARAMETERS.keys()
    assert not WORDS["kt.Image"].keys() & images
    scaling = {*autoscaling._FIELD_NAMES, *autoscaling.ALIASES}
    assert not WORDS["autoscale"].keys() & scaling
    assert not WORDS["distribute"].keys() & {
        *distribution.ARGUMENTS,
        *distribution.SUPERVISOR_OPTIONS,
    }


def test_what_the_hints_name_exists():
    scaling = {*autoscaling._FIELD_NAMES, *autoscaling.ALIASES}
    spread = {*distribution.ARGUMENTS, *distribution.SUPERVISOR_OPTIONS}
    known_words = {"kt.Compute": set(PARAMETERS), "autoscale": scaling, "distribute": spread}
    for subject, words in WORDS.items():
        for word, text in words.items():
            meant = re.match(r"did you mean (\w+)\?", text)
            assert meant is None or meant[1] in known_words[subject], (subject, word, text)
            named = set(re.findall(r"\bkt\.([a-z]\w*|[A-Z]\w*)", text))
            assert named <= set(kt.__all__), (subject, word, text)
            commands = set(re.findall(r"\bkt ([a-z][\w-]*)", text))
            assert commands <= COMMANDS.keys(), (subject, word, text)


def test_the_public_names_of_class_handles_are_those_that_hide_a_users():
    handle = kt.cls(Counter)
    public = {name for name in {*dir(type(handle)), *vars(handle)} if not name.startswith("_")}
    assert public - set(OVERRIDABLE_METHODS) == HIDING


def test_the_verbs_of_functions_are_these():
    verbs = {name for name in set(dir(kt.Fn)) - HIDING if not name.startswith("_")}
    assert verbs == VERBS | set(OVERRIDABLE_METHODS)


@pytest.mark.parametrize("name", ["ssh", "logs", "local", "remote", "stats"])
def test_a_method_of_the_users_class_is_the_users_whatever_others_call_so(name):
    handle = kt.cls(Busy)
    handle.compute = kt.Compute(cpus=1)
    assert repr(getattr(handle, name)) == f"{handle!r}.{name}"


def test_the_service_of_a_handle_has_what_a_users_method_hides():
    handle = kt.cls(Busy)
    handle.compute = compute = kt.Compute(cpus=1)
    service = kt.service(handle)
    assert service.ssh.__func__ is kt.Compute.ssh
    assert service.stats.__func__ is kt.Module.stats
    assert service.compute is handle.compute
    assert compute.cpus == service.compute.cpus
    service.serialization = "pickle"
    assert (handle.serialization, service.name) == ("pickle", "busy")
    assert {"ssh", "run_bash", "rsync", "to", "endpoint"} <= set(dir(service))
    with pytest.raises(AttributeError, match=r"hint: kt logs busy"):
        _ = service.logs


def test_the_service_of_what_is_no_handle_is_a_type_error():
    with pytest.raises(TypeError, match="takes a handle; this is 3"):
        kt.service(3)
    with pytest.raises(kt.SpecError, match="has no compute"):
        _ = kt.service(kt.cls(Busy)).ssh


def test_a_function_runs_here_by_its_local_and_by_what_it_wraps():
    function = kt.fn(doubled)
    assert (function.local(4), function.__wrapped__(4)) == (8, 8)
    assert kt.cls(Counter).__wrapped__().add(3) == 3


def doubled(x):
    return 2 * x


def test_the_handle_of_a_service_alone_has_nothing_to_run_here():
    with pytest.raises(kt.SpecError, match="whose code is not here"):
        kt.Fn("elsewhere").local(1)


def test_a_spawned_call_is_asked_itself_and_not_the_data_store():
    for handles in (kt.CallHandle("0" * 32), [kt.CallHandle("0" * 32)]):
        with pytest.raises(TypeError, match=r"hint: handle.get\(\) waits for a spawned call"):
            kt.get(handles)


def test_kt_image_itself_answers_to_a_constructor_of_others():
    with pytest.raises(AttributeError, match="image_id="):
        kt.Image.from_registry("python:3.12")


def test_a_mistake_that_nobody_else_makes_is_python_s_own_with_a_suggestion():
    with pytest.raises(AttributeError) as error:
        _ = kt.fn(doubled).optons
    assert (error.value.name, isinstance(error.value.obj, kt.Fn)) == ("optons", True)
