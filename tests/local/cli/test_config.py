"""`kt config`: what it shows, what it writes, and how it refuses."""

import json

import pytest

from tests.local import commands


@pytest.fixture
def kt(tmp_path):
    """Runs `kt config` with a file of settings of its own."""
    file = tmp_path / "config.yaml"

    def run(*arguments, **environ):
        return commands.kt("config", *arguments, **{"KT_CONFIG_FILE": str(file), **environ})

    run.file = file
    return run


def test_it_lists_all_settings_when_nothing_else_is_said(kt):
    listed = kt()
    assert listed.returncode == 0
    assert listed.stdout.splitlines()[0].split() == ["SETTING", "VALUE", "FROM"]
    assert kt("list").stdout == listed.stdout
    assert json.loads(kt("list", "--json").stdout)["namespace"] == "default"


def test_a_value_that_is_set_is_written_and_found_again(kt):
    assert kt("set", "username", "Alice").stdout == "username set to: alice\n"
    assert "alice" in kt.file.read_text()
    assert kt("get", "username").stdout == "alice\n"
    assert json.loads(kt("get", "username", "--json").stdout) == {"username": "alice"}


@pytest.mark.parametrize(
    "arguments", [["unset", "username"], ["set", "username", "none"], ["set", "username", "null"]]
)
def test_a_value_can_be_unset(kt, arguments):
    kt("set", "username", "alice")
    assert kt(*arguments).stdout == "username unset\n"
    assert kt("get", "username").stdout == "Username not set\n"
    assert "alice" not in kt.file.read_text()


def test_the_environment_goes_before_the_file(kt):
    kt("set", "namespace", "research")
    assert kt("get", "namespace").stdout == "research\n"
    assert kt("get", "namespace", KT_NAMESPACE="staging").stdout == "staging\n"


def rows(listed):
    return [line.split(maxsplit=2) for line in listed.stdout.splitlines()]


def test_the_list_says_where_each_value_is_from(kt):
    kt("set", "username", "alice")
    setting_rows = rows(kt("list", KT_NAMESPACE="staging", HOME="/elsewhere"))
    assert ["username", "alice", str(kt.file)] in setting_rows
    assert ["namespace", "staging", "KT_NAMESPACE"] in setting_rows
    assert ["queue", "-", "default"] in setting_rows
    assert ["namespace", "away", "install_namespace"] in rows(
        kt("list", KT_NAMESPACE="staging", KT_INSTALL_NAMESPACE="away")
    )


def test_setting_a_value_says_what_goes_before_it(kt):
    completed = kt("set", "namespace", "research", KT_NAMESPACE="staging")
    assert completed.stdout == "namespace set to: research\n"
    assert completed.stderr == (
        "namespace is still staging, because KT_NAMESPACE goes before the file\n"
    )
    assert kt("set", "namespace", "research").stderr == ""
    assert "KT_NAMESPACE" in kt("unset", "namespace", KT_NAMESPACE="staging").stderr
    assert kt("unset", "namespace").stderr == ""


def test_dashes_in_names_are_understood(kt):
    assert kt("set", "stream-logs", "false").stdout == "stream_logs set to: False\n"


@pytest.mark.parametrize("action", ["get", "set", "unset"])
def test_the_hint_is_about_the_action(kt, action):
    assert f"for example kt config {action} namespace" in kt(action).stderr


def test_a_value_that_cannot_be_is_not_said_to_come_from_a_program(kt):
    error = kt("set", "backend", "foo").stderr
    assert error.startswith("Error setting backend: backend is 'foo': ")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["set", "username"], 1, "Both key and value are required for 'set'"),
        (["set"], 1, "Both key and value are required for 'set'"),
        (["get"], 1, "Key is required for 'get'"),
        (["unset"], 1, "Key is required for 'unset'"),
        (["set", "colour", "blue"], 2, "colour"),
        (["get", "colour"], 2, "colour"),
        (["set", "username", "knative"], 1, "Error setting username: "),
        (["set", "stream_logs", "maybe"], 1, "must be a boolean value"),
        (["change", "username", "x"], 1, "Valid actions are: set, get, list"),
        (["change"], 1, "Unknown action: change"),
    ],
)
def test_what_cannot_be_done_is_refused_and_nothing_is_written(kt, arguments, status, message):
    completed = kt(*arguments)
    assert (completed.returncode, completed.stdout) == (status, "")
    assert message in completed.stderr
    assert not kt.file.exists()
