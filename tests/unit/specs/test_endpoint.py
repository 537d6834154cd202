"""Endpoints."""

import pytest

from kubetorch.errors import SpecError
from kubetorch.specs.endpoint import Endpoint


def test_a_url_or_a_selector_but_not_both():
    with pytest.raises(SpecError, match="not both"):
        Endpoint(url="a", selector={"a": "b"})


@pytest.mark.parametrize(
    ("url", "proxied"),
    [
        ("svc.ns.svc:8080", "http://localhost:9/ns/svc:8080"),
        ("http://svc.ns.svc.cluster.local/x/y", "http://localhost:9/ns/svc:8080/x/y"),
        ("https://example.com/x", "https://example.com/x"),
    ],
)
def test_hosts_inside_a_cluster_are_proxied_with_or_without_a_scheme(url, proxied):
    assert Endpoint(url=url).get_proxied_url(9) == proxied


def test_the_mode_and_the_config_follow_what_was_given():
    assert Endpoint().mode == "auto"
    assert Endpoint().to_service_config() is None
    assert Endpoint(url="x").to_service_config() == {"type": "url", "url": "x"}
    chosen = Endpoint(selector={"role": "head"})
    assert chosen.to_service_config() == {"type": "selector", "selector": {"role": "head"}}


def test_the_repr_rebuilds_it_and_it_hashes():
    for endpoint in (Endpoint(), Endpoint(url="x"), Endpoint(selector={"a": "b"})):
        rebuilt_endpoint = eval(repr(endpoint))
        assert rebuilt_endpoint == endpoint
        assert hash(rebuilt_endpoint) == hash(endpoint)


@pytest.mark.parametrize(
    "bad", [{"url": ""}, {"url": "a b"}, {"selector": {}}, {"selector": {"a": 1}}]
)
def test_an_impossible_one_is_refused(bad):
    with pytest.raises(SpecError):
        Endpoint(**bad)


@pytest.mark.parametrize(
    "url",
    ["", "a b", "ftp://x", "http://", "https://x:99999", "http://x:abc", "x?a=1", "ws://x", 5],
)
def test_what_is_no_url_of_http_is_refused(url):
    with pytest.raises(SpecError, match="url is"):
        Endpoint(url=url)


@pytest.mark.parametrize("selector", [{}, {"a b": "c"}, {"a": "b c"}, {"a": 1}, {1: "a"}, "a=b"])
def test_what_selects_no_pods_is_refused(selector):
    with pytest.raises(SpecError, match="selector is"):
        Endpoint(selector=selector)


@pytest.mark.parametrize("url", ["https://h/p/", "localhost:80", "http://[::1]:80/x", "10.0.0.1"])
def test_urls_of_http_are_taken(url):
    assert Endpoint(url=url).url == url
