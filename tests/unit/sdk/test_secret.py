"""`kt.Secret` and `kt.secret`: what they read, and that they keep it to themselves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kubetorch as kt
from kubetorch.specs.secret import PROVIDERS, SecretRef


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOME", str(tmp_path))
    for provider in PROVIDERS.values():
        for _, variable in provider.env:
            monkeypatch.delenv(variable, raising=False)
    yield tmp_path


FILE_PROVIDERS = [
    name for name, provider in PROVIDERS.items() if provider.filenames and not provider.exposed_as
]
ENV_PROVIDERS = [name for name, provider in PROVIDERS.items() if provider.env]


def test_there_are_fourteen_providers() -> None:
    assert sorted(kt.Secret.builtin_providers(as_str=True)) == sorted(
        [
            "anthropic",
            "aws",
            "azure",
            "cohere",
            "gcp",
            "github",
            "huggingface",
            "kubernetes",
            "lambda",
            "langchain",
            "openai",
            "pinecone",
            "ssh",
            "wandb",
        ]
    )


@pytest.mark.parametrize("name", FILE_PROVIDERS)
def test_files_of_a_provider_become_files(name: str, home: Path) -> None:
    provider = PROVIDERS[name]
    folder = Path(provider.folder).expanduser()
    folder.mkdir(parents=True)
    (folder / "unrelated").write_text("x")
    for file in provider.filenames:
        (folder / file).write_text(f"content of {file}")
    secret = kt.Secret.from_provider(name)
    assert secret.name == name
    assert secret.values == {file: f"content of {file}" for file in provider.filenames}
    assert secret.path == provider.folder
    assert secret.mount_type == "volume"
    assert kt.secret(path=provider.folder).provider == name


@pytest.mark.parametrize("name", ENV_PROVIDERS)
def test_variables_of_a_provider_become_variables_of_the_same_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = dict(PROVIDERS[name].env)
    for variable in variables.values():
        monkeypatch.setenv(variable, f"value of {variable}")
    secret = kt.Secret.from_provider(name)
    assert secret.values == {key: f"value of {env}" for key, env in variables.items()}
    assert dict(secret.to_ref().variables) == {env: key for key, env in variables.items()}
    named_secret = kt.secret("mine", env_vars=list(variables.values()))
    assert named_secret.provider == name
    assert named_secret.values == {env: f"value of {env}" for env in variables.values()}


def test_a_file_goes_before_a_variable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "of the environment")
    assert kt.Secret.from_provider("huggingface").values == {"HF_TOKEN": "of the environment"}
    (home / ".cache/huggingface").mkdir(parents=True)
    (home / ".cache/huggingface/token").write_text(" of the file\n")
    secret = kt.Secret.from_provider("huggingface")
    assert secret.values == {"HF_TOKEN": "of the file"}
    assert secret.mount_type == "env"


def test_a_variable_called_like_the_key_is_the_second_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("api_key", "second")
    assert kt.secret("x", env_vars={"api_key": "MY_KEY"}).values == {"api_key": "second"}
    monkeypatch.setenv("MY_KEY", "first")
    assert kt.secret("x", env_vars={"api_key": "MY_KEY"}).values == {"api_key": "first"}


def test_one_file_is_a_secret_at_its_folder(home: Path) -> None:
    (home / "keys").mkdir()
    (home / "keys/id").write_text("key")
    (home / "keys/id.pub").write_text("public")
    assert kt.secret("x", path="~/keys/id").to_ref() == SecretRef(
        "x", "kt.secret.global.x", "volume", keys=("id",), path="~/keys"
    )
    assert kt.secret("x", path=home / "keys").filenames == ["id", "id.pub"]


def test_values_become_variables_or_files() -> None:
    assert kt.secret("x", values={"A": "1"}).to_ref().variables == (("A", "A"),)
    files = kt.Secret("x", values={"a.json": b"\xff"}, path="~/.tool")
    assert files.to_ref().path == "~/.tool"
    assert files.values == {"a.json": b"\xff"}


def test_the_user_name_is_in_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_USERNAME", "alice")
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    assert kt.Secret(provider="openai").name == "alice-openai"
    assert kt.secret("a_b", values={"A": "1"}).to_ref().object_name == "kt.secret.alice.a-b"
    assert kt.secret("alice-b", values={"A": "1"}).to_ref().object_name == "alice-b"
    assert kt.secret("malice", values={"A": "1"}).to_ref().object_name == "kt.secret.alice.malice"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "exactly one of"),
        ({"provider": "aws", "env_vars": ["A"]}, "exactly one of"),
        ({"name": "x", "env_vars": ["NOT_SET_HERE"]}, "NOT_SET_HERE"),
        ({"name": "x", "env_vars": ["hf_secretvaluethatwaspasted-here"]}, "names of variables"),
        ({"provider": "opnai"}, "is not a supported provider"),
        ({"provider": "openai"}, "OPENAI_API_KEY is not set"),
        ({"provider": "aws"}, "no file ~/.aws/config or ~/.aws/credentials"),
        ({"path": "~/nowhere"}, "name must be provided|no file or folder"),
        ({"name": "x", "path": "~/nowhere"}, "no file or folder"),
        ({"name": "X Y", "values": {"A": "1"}}, "the secret's name is 'X Y'"),
        ({"name": "x" * 64, "values": {"A": "1"}}, "at most 63"),
        ({"name": "x", "values": {"": "1"}}, "key ''"),
        ({"name": "x", "values": {"../a": "1"}}, "key '../a'"),
        ({"name": "x", "values": {"A": 3}}, "of type int"),
        ({"name": "x", "values": {"A": "x" * 1024 * 1024 + "y"}}, "at most 1048576"),
        ({"name": "x", "values": {"A": "1"}, "override": "yes"}, "override is 'yes'"),
        ({"name": "x", "values": {"A": "1"}, "namespace": "Team"}, "namespace is 'Team'"),
    ],
)
def test_what_cannot_be_a_secret_is_refused_where_it_is_declared(
    parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(kt.SpecError, match=message) as caught:
        kt.secret(**parameters)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("folder", ["~", "/", "/etc", "/root", "relative/../..", "/proc"])
def test_files_that_would_hide_others_are_refused(folder: str) -> None:
    with pytest.raises(kt.SpecError, match="cannot be in"):
        kt.Secret("x", values={"a": "1"}, path=folder)


@pytest.mark.parametrize("bad", [{"A": "hush-value"}, ["hush value!"], "hush/value"])
def test_a_value_in_the_place_of_a_name_is_not_shown(bad: object) -> None:
    with pytest.raises(kt.SpecError) as caught:
        kt.Secret("x", env_vars=bad)  # type: ignore[arg-type]
    assert "hush-value" not in str(caught.value)
    assert "hush value!" not in str(caught.value)
    assert "hush/value" not in str(caught.value)


def test_no_form_of_it_shows_its_values() -> None:
    secret = kt.Secret("x", values={"KEY": "hush-value"})
    compute = kt.Compute(secrets=[secret])
    forms = [repr(secret), str(secret), repr([secret]), repr(secret.to_ref()), repr(vars(secret))]
    forms += [repr(compute), repr(compute.manifest), repr(compute.to_spec())]
    assert not [form for form in forms if "hush-value" in form]
    assert b"hush-value" not in pickle.dumps(secret)
    assert b"hush-value" not in pickle.dumps(compute)
    assert pickle.loads(pickle.dumps(secret)).values == {}
    assert copy.deepcopy(secret).values == {"KEY": "hush-value"}


def test_a_variable_that_is_not_set_stands_for_a_secret_that_exists() -> None:
    secret = kt.Secret(name="hf-token", env_var="HF_TOKEN")
    assert secret.to_upload() is None
    assert secret.to_ref().keys == ("HF_TOKEN",)


def test_a_dictionary_makes_one_with_the_arguments_of_the_class() -> None:
    secret = kt.Secret.from_config({"name": "x", "values": {"A": "1"}, "override": "True"})
    assert secret.override is True
    with pytest.raises(kt.SpecError, match="no 'pth'"):
        kt.Secret.from_config({"name": "x", "pth": "~/a"})


def test_a_name_of_a_provider_in_a_compute_is_its_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "hush-value")
    (variable,) = [
        variable
        for variable in kt.Compute(secrets=["openai"]).manifest["spec"]["template"]["spec"][
            "containers"
        ][0]["env"]
        if variable["name"] == "OPENAI_API_KEY"
    ]
    source = {"name": "kt.secret.global.openai", "key": "api_key"}
    assert variable["valueFrom"] == {"secretKeyRef": source}


def test_one_variable_makes_a_secret_with_the_function_too(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf")
    secret = kt.secret(name="hf", env_var="HF_TOKEN")
    assert secret is not None
    assert secret.values == {"HF_TOKEN": "hf"}


@pytest.mark.parametrize("empty", [{"values": {}}, {"env_vars": []}, {"path": ""}])
def test_an_empty_source_is_refused_and_not_taken_for_none(empty):
    with pytest.raises(kt.SpecError):
        kt.secret(name="x", **empty)


@pytest.mark.parametrize("value", ["supersecretvalue", "hf_AbCdEf", "sk-proj-1", "Passw0rd"])
def test_a_text_that_may_be_a_value_is_cut_and_the_hint_says_where_values_go(value):
    with pytest.raises(kt.SpecError) as caught:
        kt.Secret("my-secret", env_vars={"API_KEY": value})

    assert value not in str(caught.value)
    assert "values={...}" in str(caught.value.hint)
