"""`kt.fn` and `kt.cls`: what they take and refuse, and what a module knows before a deploy."""

import functools
import pickle
from pathlib import Path

import pytest

import kubetorch as kt
from kubetorch.errors import SpecError
from kubetorch.sdk import module


def train(steps, lr=0.1):
    return lr / steps


class Counter:
    def add(self, k):
        return k

    class Inner:
        pass


@pytest.fixture
def username(monkeypatch):
    monkeypatch.setenv("KT_USERNAME", "alice")


def test_the_name_is_that_of_the_callable_cleaned():
    assert kt.fn(train).name == "train"
    assert kt.cls(Counter.Inner).name == "counterinner"
    assert kt.fn(train, "My_Func.v2").name == "myfuncv2"


def test_a_name_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="40"):
        kt.fn(train, name="a" * 41)
    with pytest.raises(ValueError, match="alphanumeric"):
        kt.fn(train, name="___")


@pytest.mark.parametrize("factory", [kt.fn, kt.cls])
def test_neither_a_callable_nor_a_name_is_refused(factory):
    with pytest.raises(ValueError, match="name"):
        factory()
    with pytest.raises(ValueError, match="callable"):
        factory(name="train", get_if_exists=False)


def test_what_is_no_callable_is_a_type_error():
    with pytest.raises(TypeError, match="'text'"):
        kt.fn("text")
    with pytest.raises(TypeError, match="5"):
        kt.cls(5)


def test_a_class_for_fn_and_a_function_for_cls_name_the_other():
    with pytest.raises(TypeError, match=r"kt\.cls"):
        kt.fn(Counter)
    with pytest.raises(TypeError, match=r"kt\.fn"):
        kt.cls(train)


def test_what_a_pod_could_not_import_is_refused_with_the_reason():
    def nested():
        pass

    with pytest.raises(kt.SpecError, match="top level"):
        kt.fn(nested)
    with pytest.raises(kt.SpecError, match="lambda"):
        kt.fn(lambda: 1)
    with pytest.raises(kt.SpecError, match="def"):
        kt.fn(functools.partial(train, 1))
    with pytest.raises(kt.SpecError, match=r"kt\.cls"):
        kt.fn(Counter().add)


def undecorated(function):
    def inner():
        return function()

    return inner


@undecorated
def bare():
    pass


def test_what_a_decorator_made_is_told_what_it_lacks():
    with pytest.raises(kt.SpecError, match=r"functools\.wraps") as caught:
        kt.fn(bare)
    assert "functools.wraps" in caught.value.hint


@pytest.mark.parametrize("name", [5, b"train", ["train"]])
def test_a_name_that_is_no_text_is_refused(name):
    for use in (lambda: kt.fn(train, name=name), lambda: kt.Fn(name), lambda: kt.fn(name=name)):
        with pytest.raises(kt.SpecError, match="the name is "):
            use()


@pytest.mark.parametrize(
    "pointers",
    [("a", "b"), ("a", "b", "c", "d"), "abc", (1, 2, 3), ("a", None, "c"), ("a", "b", ""), 5],
)
def test_pointers_that_are_not_three_texts_are_refused(pointers):
    with pytest.raises(kt.SpecError, match="pointers are "):
        kt.Fn("n", pointers)


@pytest.mark.parametrize(
    "settings",
    [
        {"sync_dir": 5},
        {"sync_dir": b"/tmp"},
        {"sync_dir": ""},
        {"sync_dir": __file__},
        {"remote_dir": 5},
        {"remote_dir": "/app", "remote_import_path": ["x"]},
    ],
)
def test_places_of_another_type_are_refused(settings):
    with pytest.raises(kt.SpecError, match=f"{list(settings)[-1]}( is |=)"):
        kt.fn(train, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"sync_dir": str(Path(__file__).parent), "remote_dir": "/app"},
        {"remote_import_path": "x"},
        {"sync_dir": "/nowhere/at/all"},
    ],
)
def test_contradicting_places_are_refused(settings):
    with pytest.raises(ValueError, match=r"dir|remote"):
        kt.fn(train, **settings)


def test_a_sync_dir_without_the_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="test_module"):
        kt.fn(train, sync_dir=tmp_path)


def test_paths_in_the_pods_follow_from_what_is_synced(tmp_path):
    jobs = tmp_path / "shop" / "jobs"
    jobs.mkdir(parents=True)
    (jobs / "train.py").touch()

    module = kt.Fn("job", (str(jobs), "train", "main"), sync_dir=tmp_path / "shop")
    module.compute = kt.Compute(working_dir="/work")

    assert module.callable_name == "main"
    assert module.container_project_root == "/work/shop"
    assert module.remote_root_path == "/work/shop/jobs"
    assert module.remote_import_path == "train"
    assert module.sync_dir == tmp_path / "shop"


def test_code_that_the_container_has_is_found_where_it_is():
    module = kt.fn(train, sync_dir=False, remote_dir="/app", remote_import_path="ml.jobs")

    assert module.remote_root_path == "/app"
    assert module.remote_import_path == "ml.jobs"
    assert module.container_project_root is None


def test_pointers_stand_for_a_callable_that_is_not_here(tmp_path):
    module = kt.Fn("job", (str(tmp_path), "ml.jobs", "train"), sync_dir=False)

    assert (module.callable_name, module.remote_import_path) == ("train", "ml.jobs")


def test_a_dry_run_sets_the_compute_and_touches_nothing():
    compute = kt.Compute(cpus="0.1", namespace="research")

    remote = kt.fn(train).to(compute, dryrun=True)

    assert remote.compute == compute
    assert remote.namespace == "research"
    assert remote.compute._manifest["metadata"]["name"] == "train"
    assert remote.compute.manifest["spec"]["template"]


def test_init_args_are_for_classes_and_of_what_can_travel():
    compute = kt.Compute()
    with pytest.raises(ValueError, match="train is a function"):
        kt.fn(train).to(compute, init_args={"x": 1}, dryrun=True)
    with pytest.raises(
        ValueError, match=r'init_args\["x"\] is an object.*\nhint: give plain values'
    ):
        kt.cls(Counter).to(compute, init_args={"x": object()}, dryrun=True)
    with pytest.raises(ValueError, match="dictionary"):
        kt.cls(Counter).to(compute, init_args=[1], dryrun=True)


def test_init_args_that_are_not_given_again_are_gone():
    module = kt.cls(Counter)
    module.to(kt.Compute(), init_args={"start": 1}, dryrun=True)
    assert module.init_args == {"start": 1}

    module.to(kt.Compute(), dryrun=True)
    assert module.init_args is None


def test_what_is_no_compute_is_refused():
    with pytest.raises(TypeError, match=r"kt\.Compute"):
        kt.fn(train).to({"cpus": 1})
    with pytest.raises(ValueError, match="no compute"):
        kt.fn(train).deploy()


def test_serialization_and_async_are_checked():
    module = kt.fn(train)
    assert (module.serialization, module.async_) == ("json", False)

    module.serialization = "pickle"
    module.async_ = True

    assert (module.serialization, module.async_) == ("pickle", True)
    with pytest.raises(ValueError, match="yaml"):
        module.serialization = "yaml"
    with pytest.raises(ValueError, match="async_"):
        module.async_ = "yes"


def test_whether_logs_are_shown_is_said_here_or_by_the_compute_or_by_the_settings(monkeypatch):
    module = kt.fn(train)
    assert module.stream_logs is True
    monkeypatch.setenv("KT_STREAM_LOGS", "false")
    assert module.stream_logs is False
    module.compute = kt.Compute(logging_config=kt.LoggingConfig(stream_logs=True))
    assert module.stream_logs is True
    module.stream_logs = False
    assert module.stream_logs is False


def test_prefixes_are_set_as_text_or_list():
    module = kt.fn(train)
    module.reload_prefixes = "main"
    assert module.reload_prefixes == ["main"]
    with pytest.raises(ValueError, match="reload_prefixes"):
        module.reload_prefixes = 3


def test_other_prefixes_mean_another_service(username):
    module = kt.fn(train)
    module.service_name = "bobs-train"
    assert module.service_name == "bobs-train"

    module.reload_prefixes = ["bob"]

    assert module.service_name == "train"


def test_a_private_attribute_of_a_class_is_no_remote_method():
    module = kt.cls(Counter)

    assert callable(module.add)
    assert not hasattr(module, "_add")
    with pytest.raises(AttributeError):
        module.__len__()


def test_the_callable_can_be_unwrapped():
    assert kt.fn(train).__wrapped__ is train
    assert kt.cls(Counter).__wrapped__ is Counter


def test_a_pickled_module_keeps_its_names_and_settings():
    module = kt.cls(Counter, name="counter-a")
    module.to(kt.Compute(cpus=1, namespace="research"), init_args={"start": 1}, dryrun=True)
    module.serialization = "pickle"

    unpickled_module = pickle.loads(pickle.dumps(module))

    assert (unpickled_module.name, unpickled_module.namespace) == ("counter-a", "research")
    assert unpickled_module.callable_name == "Counter"
    assert unpickled_module.remote_import_path == module.remote_import_path
    assert unpickled_module.serialization == "pickle"
    assert unpickled_module.compute == module.compute
    assert unpickled_module.init_args == {"start": 1}
    assert not hasattr(unpickled_module, "__wrapped__")


def test_a_handle_without_code_cannot_be_deployed():
    handle = kt.Fn("train")

    with pytest.raises(ValueError, match="code is not here"):
        handle.to(kt.Compute())
    removed_fn = kt.fn(train)
    removed_fn._source.qualname = "gone"
    with pytest.raises(ValueError, match=r"the code of train, .*:gone, cannot be imported here"):
        pickle.loads(pickle.dumps(removed_fn)).to(kt.Compute())


def test_what_only_a_deploy_tells_is_not_known_before():
    module = kt.fn(train)

    assert module.service_config is None
    for name in ("base_endpoint", "request_headers"):
        with pytest.raises(kt.SpecError, match="train was not deployed"):
            getattr(module, name)


def test_progress_outside_a_pod_does_nothing():
    assert kt.progress(1, total=2, message="half") is None


def test_the_users_own_service_comes_first_then_the_branchs_then_the_bare_name():
    candidate_names = module.candidates("train", [], username="alice", branch="feature/x")

    assert candidate_names == ("alice-train", "feature-x-train", "train")


def test_without_user_name_and_branch_there_is_the_bare_name():
    assert module.candidates("train", [], username=None, branch=None) == ("train",)


def test_prefixes_are_tried_alone():
    candidate_names = module.candidates("train", ["main", "bob"], username="alice", branch="x")

    assert candidate_names == ("main-train", "bob-train")


def test_a_name_with_the_user_name_is_not_prefixed_again():
    assert module.candidates("alice-train", [], username="alice", branch=None) == ("alice-train",)


def test_a_branch_that_can_be_no_name_is_left_out():
    assert module.candidates("train", [], username=None, branch="2024") == ("train",)


@pytest.mark.parametrize(
    ("prefixes", "expected_prefixes"),
    [(None, []), ("main", ["main"]), (["a", "b"], ["a", "b"]), (("a",), ["a"])],
)
def test_prefixes_are_text_or_a_list(prefixes, expected_prefixes):
    assert module.parse_prefixes(prefixes) == expected_prefixes


@pytest.mark.parametrize("prefixes", [3, [1], {"a": 1}])
def test_other_prefixes_are_refused(prefixes):
    with pytest.raises(SpecError, match="reload_prefixes"):
        module.parse_prefixes(prefixes)


def make_repository(folder: Path, head: str) -> None:
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text(head)


def test_the_branch_is_read_from_the_repository_above(tmp_path):
    make_repository(tmp_path, "ref: refs/heads/topic/one\n")
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)

    assert module.checked_out_branch(inner) == "topic/one"


def test_a_detached_head_has_no_branch(tmp_path):
    make_repository(tmp_path, "0123456789abcdef\n")

    assert module.checked_out_branch(tmp_path) is None


def test_a_work_tree_names_its_repository(tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    (real / "HEAD").write_text("ref: refs/heads/topic\n")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / ".git").write_text("gitdir: ../real\n")

    assert module.checked_out_branch(tree) == "topic"


@pytest.mark.parametrize("name", ["lr", "to", "name", "servce_name"])
def test_what_is_no_setting_cannot_be_set_on_a_handle(name):
    for handle in (kt.fn(train), kt.cls(Counter)):
        with pytest.raises(AttributeError):
            setattr(handle, name, "x")


def test_settings_and_names_with_an_underscore_can_be_set_on_a_handle():
    handle = kt.fn(train)
    handle.serialization, handle.async_, handle.stream_logs = "pickle", True, False
    handle.service_name, handle._mine = "other", 1
    assert (handle.service_name, handle._mine) == ("other", 1)


def test_a_handle_can_wrap_a_function():
    def wrapped():
        """Says so."""

    handle = functools.wraps(wrapped)(kt.fn(train))
    assert (handle.__name__, handle.__doc__, handle.__wrapped__) == ("wrapped", "Says so.", wrapped)
