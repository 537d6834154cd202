"""The variables that say which proxy stands before a server."""

from __future__ import annotations

import pytest

from kubetorch.k8s.credentials import proxy_for

PROXY = "http://proxy:3128"


@pytest.mark.parametrize(
    ("server", "variables", "proxy"),
    [
        ("https://a.example", {}, None),
        ("https://a.example", {"HTTPS_PROXY": PROXY}, PROXY),
        ("https://a.example", {"https_proxy": PROXY}, PROXY),
        ("https://a.example", {"HTTPS_PROXY": "proxy:3128"}, PROXY),
        ("https://a.example", {"HTTP_PROXY": PROXY}, None),
        ("http://a.example", {"HTTP_PROXY": PROXY}, PROXY),
        ("https://localhost:6443", {"HTTPS_PROXY": PROXY}, None),
        ("https://127.0.0.1:6443", {"HTTPS_PROXY": PROXY}, None),
    ],
)
def test_a_scheme_has_its_variable(
    server: str, variables: dict[str, str], proxy: str | None
) -> None:
    assert proxy_for(server, variables) == proxy


@pytest.mark.parametrize(
    ("server", "exception", "is_excluded"),
    [
        ("https://a.example", "*", True),
        ("https://a.example", "b.example, a.example", True),
        ("https://x.a.example", "a.example", True),
        ("https://xa.example", "a.example", False),
        ("https://x.a.example", ".a.example", True),
        ("https://a.example", ".a.example", False),
        ("https://x.a.example", "*.a.example", True),
        ("https://10.1.2.3", "10.0.0.0/8", True),
        ("https://11.1.2.3", "10.0.0.0/8", False),
        ("https://10.1.2.3", "10.1.2.3", True),
        ("https://10.1.2.3:6443", "10.1.2.3:6443", True),
        ("https://10.1.2.3:6443", "10.1.2.3:443", False),
        ("https://10.1.2.3", "10.1.2.3:443", True),
        ("https://10.1.2.3", "10.1.2.3:80", False),
        ("https://[fd00::1]", "fd00::/8", True),
        ("https://a.example", "10.0.0.0/8,nonsense/99", False),
        ("https://a.example", "", False),
    ],
)
def test_exceptions_are_hosts_domains_addresses_and_networks(
    server: str, exception: str, is_excluded: bool
) -> None:
    proxy = proxy_for(server, {"HTTPS_PROXY": PROXY, "NO_PROXY": exception})
    assert (proxy is None) == is_excluded


def test_the_usual_port_of_a_server_without_tls_is_80() -> None:
    environment = {"HTTP_PROXY": PROXY, "NO_PROXY": "10.1.2.3:80"}
    assert proxy_for("http://10.1.2.3", environment) is None
    assert proxy_for("http://10.1.2.3:443", environment) == PROXY
