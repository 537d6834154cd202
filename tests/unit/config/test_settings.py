from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kubetorch.config import settings
from kubetorch.config.settings import SETTINGS, KubetorchConfig, config
from kubetorch.errors import ConfigError

KUBECONFIG = """
apiVersion: v1
current-context: work
contexts:
- name: home
  context: {cluster: a, namespace: garden}
- name: work
  context: {cluster: b, namespace: team-ml}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kt" / "config.yaml"


def config_of(file: Path, text: str = "", **environ: str) -> KubetorchConfig:
    if text:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return KubetorchConfig({"KT_BACKEND": "local", **environ}, file)


def test_defaults_are_those_of_the_documents(file: Path) -> None:
    settings = dict(KubetorchConfig({"KUBECONFIG": "/nowhere"}, file))
    assert settings == {
        "username": None,
        "prefix_username": True,
        "namespace": "default",
        "install_namespace": "kubetorch",
        "install_url": None,
        "stream_logs": True,
        "stream_metrics": True,
        "post_mortem": False,
        "volumes": None,
        "api_url": None,
        "cluster_config": {},
        "queue": None,
        "default_image": "ghcr.io/kubetorch/pod:latest",
        "package_managers": False,
        "store_bucket": None,
        "store_endpoint": None,
        "backend": "auto",
        "quiet": False,
    }
    assert not file.exists()


def test_this_program_goes_before_the_environment_before_the_file_before_the_default(
    file: Path,
) -> None:
    environ = {"KT_BACKEND": "local", "KT_QUEUE": "of-the-environment"}
    settings = KubetorchConfig(environ, file)
    file.parent.mkdir()
    file.write_text("queue: of-the-file\n")
    settings.queue = "of-the-program"
    assert settings.queue == "of-the-program"
    settings.unset("queue")
    assert settings.queue == "of-the-environment"
    environ.clear()
    assert settings.queue == "of-the-file"
    file.unlink()
    assert settings.queue is None


def test_every_setting_has_a_variable_and_says_what_it_means() -> None:
    for name, setting in SETTINGS.items():
        assert setting.variable == f"KT_{name.upper()}"
        assert setting.__doc__
        assert setting.__doc__.endswith(".")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("username", "test-user-2" * 10, "test-user-2test"),
        ("username", "01-test-user", "test-user"),
        ("username", "test.user-2", "test-user-2"),
        ("namespace", "team-ml", "team-ml"),
        ("stream_logs", "false", False),
        ("stream_logs", "True", True),
        ("stream_metrics", "FALSE", False),
        ("volumes", "data, models,", ["data", "models"]),
        ("api_url", "https://kt.example.com/", "https://kt.example.com"),
        ("cluster_config", '{"a": {"b": [1, null]}}', {"a": {"b": [1, None]}}),
        ("backend", "kubernetes", "kubernetes"),
        ("install_url", " pkg==1 ", "pkg==1"),
    ],
)
def test_text_becomes_the_settings_type_wherever_it_comes_from(
    file: Path, key: str, text: str, value: object
) -> None:
    assert config_of(file, **{f"KT_{key.upper()}": text}).get(key) == value
    assert config_of(file).set(key, text) == value
    written = config_of(file)
    written.write({key: text})
    # A variable would go before the file.
    assert KubetorchConfig({"KUBECONFIG": "/nowhere"}, file).get(key) == value


@pytest.mark.parametrize(
    ("key", "bad", "right"),
    [
        ("username", "usern@me", "must be a valid k8s name"),
        ("username", "kubetorch", "reserved"),
        ("username", "___", "must be a valid k8s name"),
        ("username", 7, "must be text"),
        ("namespace", "Team", "lower-case"),
        ("namespace", "a" * 64, "63"),
        ("namespace", "../etc", "lower-case"),
        ("install_namespace", "-a", "begin and end"),
        ("stream_logs", "yes", "must be a boolean value"),
        ("stream_logs", 1, "must be a boolean value"),
        ("stream_metrics", "1", "must be a boolean value"),
        ("volumes", 3, "must be a list"),
        ("volumes", ",", "must be a list"),
        ("volumes", [1], "must be text"),
        ("volumes", "data,My Data", "has 'My Data'"),
        ("api_url", "localhost:80", "must be a URL"),
        ("api_url", "ftp://x", "must be a URL"),
        ("api_url", "http://[", "must be a URL"),
        ("api_url", "http://x:99999", "must be a URL"),
        ("cluster_config", "{", "must be a JSON object"),
        ("cluster_config", "[1]", "must be a dictionary"),
        ("cluster_config", {"a": object()}, "JSON can carry"),
        ("cluster_config", {"a": float("nan")}, "JSON can carry"),
        ("backend", "aws", "auto, local, kubernetes"),
        ("backend", True, "auto, local, kubernetes"),
        ("queue", [], "must be text"),
    ],
)
def test_a_bad_value_is_refused_wherever_it_comes_from(
    file: Path, key: str, bad: object, right: str
) -> None:
    with pytest.raises(ConfigError, match=key) as caught:
        config_of(file).set(key, bad)
    assert f"{key} is {bad!r}" in str(caught.value)
    assert right in str(caught.value)
    with pytest.raises(ConfigError, match=key):
        config_of(file).write({key: bad})
    assert not file.exists()
    if isinstance(bad, str):
        variable = f"KT_{key.upper()}"
        with pytest.raises(ConfigError, match=variable) as caught:
            config_of(file, **{variable: bad}).get(key)
        assert right in str(caught.value)
        settings = KubetorchConfig({"KUBECONFIG": "/nowhere"}, file)
        config_of(file, f"{key}: {json.dumps(bad)}\n")
        with pytest.raises(ConfigError, match=str(file)) as caught:
            settings.get(key)
        assert right in str(caught.value)


def test_a_bad_value_that_nobody_uses_disturbs_nobody(file: Path) -> None:
    settings = config_of(file, KT_STREAM_LOGS="maybe")
    assert settings.queue is None


@pytest.mark.parametrize("nothing", [None, "None", "null", ""])
def test_nothing_unsets(file: Path, nothing: str | None) -> None:
    settings = config_of(file, "volumes: [a]\n")
    settings.volumes = ["b"]
    assert settings.set("volumes", nothing) is None
    assert settings.volumes == ["a"]
    settings.write({"volumes": nothing})
    assert settings.volumes is None
    assert file.read_text() == ""


def test_an_empty_variable_is_as_good_as_none(file: Path) -> None:
    assert config_of(file, "queue: a\n", KT_QUEUE="").queue == "a"


@pytest.mark.parametrize("use", ["get", "set", "unset", "write", "assign"])
def test_an_unknown_setting_is_an_error_with_the_nearest_one(file: Path, use: str) -> None:
    settings = config_of(file)
    with pytest.raises(ConfigError, match="'user_name'") as caught:
        {
            "get": lambda: settings.get("user_name"),
            "set": lambda: settings.set("user_name", "x"),
            "unset": lambda: settings.unset("user_name"),
            "write": lambda: settings.write({"user_name": "x"}),
            "assign": lambda: setattr(settings, "user_name", "x"),
        }[use]()
    assert caught.value.hint == "did you mean username?"
    assert isinstance(caught.value, ValueError)


def test_it_reads_like_a_dictionary(file: Path) -> None:
    settings = config_of(file, KT_QUEUE="a")
    assert settings["queue"] == "a"
    assert list(settings) == list(dict(settings)) == list(SETTINGS)
    assert "'queue': 'a'" in repr(settings)
    with pytest.raises(KeyError):
        settings["nothing"]


def test_values_that_are_handed_out_can_be_changed_without_harm(file: Path) -> None:
    settings = config_of(file, "volumes: [a]\n")
    volumes = settings.volumes
    assert volumes is not None
    volumes.append("b")
    settings.cluster_config["x"] = 1
    settings.set("cluster_config", {"a": 1})
    settings.cluster_config["b"] = 2
    assert settings.volumes == ["a"]
    assert settings.cluster_config == {"a": 1}
    settings.unset("cluster_config")
    assert settings.cluster_config == {}


# ---------------------------------------------------------------------------------- the file


def test_write_keeps_what_it_does_not_name(file: Path) -> None:
    settings = config_of(file, "queue: a\nusername: bob\n")
    settings.write({"queue": None, "stream_logs": False, "cluster_config": {"a": [1, "ö"]}})
    reread = config_of(file)
    assert (reread.queue, reread.username, reread.stream_logs) == (None, "bob", False)
    assert reread.cluster_config == {"a": [1, "ö"]}


ROUND = {
    "username": ["alice", "on", "y"],
    "namespace": ["team-ml", "1e3"],
    "install_namespace": ["kt", "007"],
    "install_url": ["git+https://example.com/x?a=b#c", "null-ish: yes", "#1"],
    "stream_logs": [True, False],
    "stream_metrics": [False],
    "volumes": [["data"], ["data", "models.v1"]],
    "api_url": ["http://[::1]:8080/base"],
    "cluster_config": [{}, {"a": {"ö": [1, 1.5, None, "no", {"b": True}]}}],
    "queue": ["0x10", "1e3"],
    "backend": ["auto", "local"],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, setting_value) for key in ROUND for setting_value in ROUND[key]]
)
def test_what_is_written_is_what_is_read_and_can_be_written_again(
    file: Path, key: str, value: object
) -> None:
    config_of(file).write({key: value})
    read = KubetorchConfig({"KUBECONFIG": "/nowhere"}, file).get(key)
    assert read == value
    assert type(read) is type(value)
    before = file.read_bytes()
    config_of(file).write({key: read})
    assert file.read_bytes() == before


def test_writing_an_empty_dictionary_empties_the_file(file: Path) -> None:
    settings = config_of(file, "queue: a\nusername: bob\n")
    settings.write({})
    assert (settings.queue, settings.username) == (None, None)
    assert file.read_text() == ""
    settings.username = "eve"
    settings.write()
    assert file.read_text() == "username: eve\n"


def test_write_without_values_writes_what_this_program_set(file: Path) -> None:
    settings = config_of(file)
    settings.username = "bob"
    settings.write()
    assert config_of(file).username == "bob"
    assert file.parent.stat().st_mode & 0o077 == 0
    assert [path.name for path in file.parent.iterdir()] == ["config.yaml"]


def test_a_file_that_another_program_wrote_is_read_again(file: Path) -> None:
    settings = config_of(file, "queue: a\n")
    assert settings.queue == "a"
    config_of(file).write({"queue": "b"})
    assert settings.queue == "b"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n", "must be a map"),
        ("just text\n", "must be a map"),
        ("1: a\n", "must be a map"),
        ("a: [\n", "no valid YAML"),
        ("a: b: c\n", "no valid YAML"),
        ("queue: !!python/object:os.system x\n", "no valid YAML"),
        ("qeue: a\n", "unknown setting 'qeue'"),
    ],
)
def test_a_file_that_makes_no_sense_is_an_error_that_names_it(
    file: Path, text: str, says: str
) -> None:
    settings = config_of(file, text)
    with pytest.raises(ConfigError, match=str(file)) as caught:
        _ = settings.queue
    assert says in str(caught.value)


def test_a_file_that_is_not_text_is_an_error_that_names_it(file: Path) -> None:
    config_of(file, "x")
    file.write_bytes(b"queue: \xff\xfe\n")
    with pytest.raises(ConfigError, match=str(file)):
        _ = config_of(file).queue


def test_a_folder_in_place_of_the_file_is_an_error_that_names_it(file: Path) -> None:
    file.mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"{file} cannot be read"):
        _ = config_of(file).queue
    with pytest.raises(ConfigError, match=f"{file} cannot be read"):
        config_of(file).write({"queue": "a"})


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "queue:\n", "queue: null\n"])
def test_an_empty_file_says_nothing(file: Path, text: str) -> None:
    config_of(file, "x")
    file.write_text(text)
    assert config_of(file).queue is None


def test_the_environment_names_the_file(tmp_path: Path) -> None:
    named = tmp_path / "other.yaml"
    named.write_text("queue: a\n")
    assert KubetorchConfig({"KT_CONFIG_FILE": str(named)}).queue == "a"
    assert KubetorchConfig({}).file == Path("~/.kt/config.yaml").expanduser()


def test_the_settings_of_this_process_follow_its_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KT_QUEUE", "a")
    monkeypatch.setenv("KT_CONFIG_FILE", str(tmp_path / "config.yaml"))
    assert config.queue == "a"
    assert os.environ["KT_QUEUE"] == "a"


# -------------------------------------------------------------------------------- namespaces


def kubernetes(file: Path, **environ: str) -> KubetorchConfig:
    return KubetorchConfig(environ, file)


def test_the_namespace_is_that_of_the_current_context(file: Path, tmp_path: Path) -> None:
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    kubeconfig = str(tmp_path / "kubeconfig")
    assert kubernetes(file, KUBECONFIG=kubeconfig).namespace == "team-ml"
    assert kubernetes(file, KUBECONFIG=kubeconfig, KT_NAMESPACE="mine").namespace == "mine"
    assert kubernetes(file, KUBECONFIG=kubeconfig, KT_BACKEND="local").namespace == "default"


def test_several_kubeconfigs_are_one(file: Path, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("current-context: home\ncontexts: []\n")
    (tmp_path / "two").write_text(KUBECONFIG)
    both = f"{tmp_path}/one:{tmp_path}/gone::{tmp_path}/two"
    assert kubernetes(file, KUBECONFIG=both).namespace == "garden"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a\n",
        "a: [\n",
        "current-context: gone\ncontexts:\n- {name: a, context: {namespace: x}}\n",
        "current-context: a\ncontexts:\n- {name: a, context: {}}\n",
        "current-context: a\ncontexts:\n- {name: a}\n",
        "current-context: a\ncontexts:\n- a\n",
        "current-context: a\ncontexts: {a: b}\n",
        "current-context: a\n",
        "contexts:\n- {name: null, context: {namespace: x}}\n",
    ],
)
def test_a_kubeconfig_that_says_nothing_leaves_the_default(
    file: Path, tmp_path: Path, text: str
) -> None:
    (tmp_path / "kubeconfig").write_text(text)
    assert kubernetes(file, KUBECONFIG=str(tmp_path / "kubeconfig")).namespace == "default"


def test_an_install_namespace_of_ones_own_goes_before_all_others(file: Path) -> None:
    settings = config_of(file, "namespace: a\n", KT_INSTALL_NAMESPACE="shared", KT_NAMESPACE="b")
    settings.namespace = "c"
    assert settings.namespace == "shared"
    settings.install_namespace = "kubetorch"
    assert settings.namespace == "c"


def test_a_queue_is_the_name_of_one() -> None:
    with pytest.raises(ConfigError, match="queue is 'A b'"):
        KubetorchConfig({}).set("queue", "A b")


def test_a_pod_knows_its_own_namespace(tmp_path: Path) -> None:
    file = tmp_path / "namespace"
    assert settings.of_pod(file) is None
    file.write_text("team-ml\n")
    assert settings.of_pod(file) == "team-ml"
    file.write_text("")
    assert settings.of_pod(file) is None
