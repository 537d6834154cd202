"""Kubeconfig files: merging, resolving, and what is said about wrong ones."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from kubetorch.errors import KubernetesCredentialsError
from kubetorch.k8s import kubeconfig
from kubetorch.k8s.kubeconfig import Impersonation, Pem

HOME = Path("/home/u")
FIRST = """
apiVersion: v1
kind: Config
current-context: dev
contexts:
- name: dev
  context: {cluster: one, user: jane, namespace: team}
- name: bare
  context: {cluster: one}
clusters:
- name: one
  cluster: {server: "https://one.example:6443/", certificate-authority: pki/ca.crt}
users:
- name: jane
  user: {token: first}
"""
SECOND = """
current-context: prod
contexts:
- name: prod
  context: {cluster: two, user: jane}
clusters:
- name: one
  cluster: {server: "https://wrong.example", tls-server-name: never-merged}
- name: two
  cluster: {server: "https://two.example", proxy-url: "socks5://proxy:1080"}
users:
- name: jane
  user: {token: second, username: never-merged}
"""


def merged(*texts: str) -> kubeconfig.Kubeconfig:
    folders = [Path(f"/etc/k{index}/config") for index in range(len(texts))]
    return kubeconfig.merge(list(zip(folders, texts, strict=True)))


def single(user: str = "{}", cluster: str = "{server: 'https://a'}") -> kubeconfig.Kubeconfig:
    return merged(
        f"""
current-context: c
contexts: [{{name: c, context: {{cluster: k, user: u}}}}]
clusters: [{{name: k, cluster: {cluster}}}]
users: [{{name: u, user: {user}}}]
"""
    )


def test_the_first_file_wins_for_values_and_for_whole_entries() -> None:
    config = merged(FIRST, SECOND)
    assert config.current_context == "dev"
    assert config.contexts == ["bare", "dev", "prod"]
    dev_access, prod_access = config.access(), config.access("prod")
    assert dev_access.cluster.server == "https://one.example:6443"
    assert dev_access.cluster.tls_name is None
    assert (dev_access.user.token, dev_access.user.username) == ("first", None)
    assert prod_access.cluster.proxy == "socks5://proxy:1080"
    assert prod_access.user.token == "first"
    assert (dev_access.namespace, prod_access.namespace) == ("team", "default")


def test_the_order_of_files_decides() -> None:
    assert merged(SECOND, FIRST).access("dev").user.token == "second"
    assert merged(SECOND, FIRST).current_context == "prod"


def test_paths_are_relative_to_the_file_that_has_them() -> None:
    config = merged("current-context: dev", FIRST)
    assert config.access().cluster.authority == Pem(path=Path("/etc/k1/pki/ca.crt"))


def test_a_context_without_a_user_is_nobody() -> None:
    access = merged(FIRST).access("bare")
    assert access.user.token is None
    assert access.context == "bare"
    assert "'bare' of /etc/k0/config" in access.origin


@pytest.mark.parametrize(
    ("variable", "expected_paths"),
    [
        (None, [HOME / ".kube/config"]),
        ("", [HOME / ".kube/config"]),
        ("/a", [Path("/a")]),
        ("/a::/b:/a:", [Path("/a"), Path("/b")]),
    ],
)
def test_the_variable_lists_files(variable: str | None, expected_paths: list[Path]) -> None:
    assert kubeconfig.paths(variable, HOME) == expected_paths


def test_missing_files_of_a_list_are_left_out_and_a_named_one_is_not(tmp_path: Path) -> None:
    written_file, missing_file = tmp_path / "here", tmp_path / "gone"
    written_file.write_text(FIRST)
    assert kubeconfig.load([missing_file, written_file, written_file / "below-a-file"]).files == (
        written_file,
    )
    with pytest.raises(KubernetesCredentialsError, match="there is no kubeconfig"):
        kubeconfig.load_file(missing_file)


def test_inline_data_stands_before_files() -> None:
    data = base64.b64encode(b"PEM").decode()
    cluster = (
        f"{{server: 'https://a', certificate-authority: f, certificate-authority-data: {data}}}"
    )
    assert single(cluster=cluster).access().cluster.authority == Pem(data=b"PEM")


def test_a_plugin_is_read_in_full() -> None:
    user = """{exec: {apiVersion: client.authentication.k8s.io/v1beta1, command: ./bin/login,
      args: [--cluster, x], env: [{name: A, value: b}], installHint: get it,
      provideClusterInfo: true, interactiveMode: Never}}"""
    cluster = """{server: 'https://a', extensions: [{name: client.authentication.k8s.io/exec,
      extension: {audience: y}}]}"""
    access = single(user, cluster).access()
    plugin = access.user.plugin
    assert plugin is not None
    assert plugin.command == "/etc/k0/bin/login"
    assert plugin.arguments == ("--cluster", "x")
    assert plugin.environment == {"A": "b"}
    assert plugin.api_version == "client.authentication.k8s.io/v1beta1"
    assert plugin.install_hint == "get it"
    assert plugin.wants_cluster
    assert plugin.interaction == "Never"
    assert access.cluster.config == {"audience": "y"}


def test_a_plugin_without_a_slash_is_searched_on_the_path() -> None:
    user = "{exec: {apiVersion: client.authentication.k8s.io/v1, command: aws}}"
    plugin = single(user).access().user.plugin
    assert plugin is not None
    assert plugin.command == "aws"


def test_impersonation_is_read() -> None:
    user = "{token: t, as: jane, as-uid: '7', as-groups: [dev], as-user-extra: {scope: [a, b]}}"
    assert single(user).access().user.impersonation == Impersonation(
        "jane", "7", ("dev",), {"scope": ("a", "b")}
    )


def test_the_token_file_is_relative_to_the_file() -> None:
    user = single("{tokenFile: tok, token: t}").access().user
    assert user.token_file == Path("/etc/k0/tok")


def test_secrets_do_not_show_in_a_representation() -> None:
    access = single("{token: s3cret, password: s3cret, username: u}").access()
    assert "s3cret" not in repr(access)


@pytest.mark.parametrize(
    ("text", "expected_message"),
    [
        ("{", "no YAML"),
        ("current-context: 2001-99-99", "no YAML"),
        ("- a", "should be a mapping"),
        ("kind: Pod", "kind: Config"),
        ("clusters: 3", "clusters should be a list"),
        ("users: [{user: {}}]", "should have name and user"),
        ("", "no current context"),
        ("current-context: gone", "no context 'gone'"),
        ("current-context: a\ncontexts: [{name: a, context: {}}]", "names no cluster"),
        (
            "current-context: a\ncontexts: [{name: a, context: {cluster: gone}}]",
            "no cluster 'gone'",
        ),
        (FIRST.replace("- name: jane", "- name: john"), "no user 'jane'"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(text: str, expected_message: str) -> None:
    with pytest.raises(KubernetesCredentialsError, match=expected_message) as caught:
        merged(text).access()
    assert caught.value.hint


@pytest.mark.parametrize(
    ("user", "cluster", "expected_message"),
    [
        ("{}", "{}", "server should be an http"),
        ("{}", "{server: one}", "server should be an http"),
        ("{}", "{server: 'https://a', certificate-authority-data: '*'}", "no base64"),
        (
            "{}",
            "{server: 'https://a', certificate-authority: x, insecure-skip-tls-verify: true}",
            "contradicts",
        ),
        ("{}", "{server: 'https://a', insecure-skip-tls-verify: maybe}", "true or false"),
        ("{token: 3}", "{server: 'https://a'}", "token should be a string"),
        ("{}", "{server: 'https://[::1'}", "server should be an http"),
        ("{}", "{server: 'https://a:99999'}", "server should be an http"),
        ("{}", "{server: 'https://a', extensions: 3}", "extensions should be a list"),
        ("{}", "{server: 'https://a', certificate-authority: ~no-such-user/x}", "home directory"),
        (
            "{exec: {command: x, apiVersion: client.authentication.k8s.io/v1, env: 3}}",
            "{server: 'https://a'}",
            "env should be a list",
        ),
        ("{client-key: x}", "{server: 'https://a'}", "belong together"),
        ("{auth-provider: {name: gcp}}", "{server: 'https://a'}", "'gcp' is not supported"),
        ("{as-groups: [a]}", "{server: 'https://a'}", "need a user"),
        ("{exec: {command: x}}", "{server: 'https://a'}", "apiVersion None should be one of"),
        (
            "{exec: {apiVersion: client.authentication.k8s.io/v1}}",
            "{server: 'https://a'}",
            "command is missing",
        ),
    ],
)
def test_a_wrong_field_is_named(user: str, cluster: str, expected_message: str) -> None:
    with pytest.raises(KubernetesCredentialsError, match=expected_message):
        single(user, cluster).access()


def test_an_oidc_provider_names_the_plugin_that_takes_its_place() -> None:
    user = "{auth-provider: {name: oidc, config: {id-token: a, refresh-token: b}}}"
    with pytest.raises(KubernetesCredentialsError, match="'oidc' is not supported") as error:
        single(user, "{server: 'https://a'}").access()
    assert "kubectl oidc-login, as an exec plugin of the user" in str(error.value.hint)
