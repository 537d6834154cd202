"""The user name in front of the name of a service."""

import pickle

import pytest

import kubetorch as kt


def train(steps):
    return steps


class Counter:
    pass


@pytest.fixture
def username(monkeypatch):
    monkeypatch.setenv("KT_USERNAME", "alice")


def test_the_user_name_stands_in_front_of_the_service_name(username):
    assert kt.fn(train).service_name == "alice-train"
    assert kt.fn(train, name="alice-job").service_name == "alice-job"
    assert kt.fn(train, reload_prefixes=["main"]).service_name == "train"


def test_the_user_name_is_left_out_where_the_service_or_the_settings_say_so(username, monkeypatch):
    assert kt.fn(train, prefix_username=False).service_name == "train"
    assert kt.compute(cpus=1, prefix_username=False)(train).service_name == "train"
    monkeypatch.setenv("KT_PREFIX_USERNAME", "False")
    assert kt.config.prefix_username is False
    handle = kt.cls(Counter)
    assert handle.service_name == "counter"
    handle.service_name = "mine"
    handle.prefix_username = True  # forgets the name that was set
    assert handle.service_name == "alice-counter"
    assert pickle.loads(pickle.dumps(handle)).prefix_username is True
    dry = handle.to(kt.Compute(cpus=1), dryrun=True, prefix_username=False)
    assert (handle.service_name, dry.compute.service_name) == ("counter", "counter")


@pytest.mark.parametrize("value", ["false", 0, []])
def test_a_prefix_username_that_is_no_boolean_is_refused(value):
    with pytest.raises(ValueError, match="`prefix_username` must be a boolean or None"):
        kt.fn(train, prefix_username=value)
    kt.config.prefix_username = "TRUE"
    assert kt.config.prefix_username is True
    kt.config.unset("prefix_username")


def test_a_setting_prefix_username_that_is_no_boolean_names_its_source(username, monkeypatch):
    monkeypatch.setenv("KT_PREFIX_USERNAME", "no")
    with pytest.raises(kt.ConfigError, match=r"'no' \(KT_PREFIX_USERNAME\): must be a boolean"):
        kt.fn(train).service_name  # noqa: B018  # the property asks
