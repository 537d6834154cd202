from urllib.parse import unquote

import pytest

from kubetorch.lib.proxying import Mount, Target, end_to_end, request_head

HTTP = Mount(outside="/http", inside="")
ROOT = Mount(outside="", inside="/http")
NAMED = Mount(outside="/default/train:80", inside="")


@pytest.mark.parametrize(
    ("mount", "path", "there"),
    [
        (HTTP, b"/http/a/b", b"/a/b"),
        (HTTP, b"/http", b"/"),
        (HTTP, b"/http/", b"/"),
        (ROOT, b"/a", b"/http/a"),
        (NAMED, b"/default/train:80/ready", b"/ready"),
        (NAMED, b"/default/train%3A80/ready", b"/ready"),
        (HTTP, b"/%68ttp/x%2Fy", b"/x%2Fy"),
    ],
)
def test_paths_are_moved_to_where_the_server_has_them(mount, path, there):
    assert mount.has(unquote(path.decode()))
    assert mount.enter(path) == there


def test_other_paths_are_not_the_servers():
    assert not HTTP.has("/httpx")
    assert not HTTP.has("/")


@pytest.mark.parametrize(
    ("mount", "location", "outside"),
    [
        (HTTP, b"/login?x=1", b"/http/login?x=1"),
        (HTTP, b"http://here/login", b"http://here/http/login"),
        (HTTP, b"http://elsewhere/login", b"http://elsewhere/login"),
        (HTTP, b"login", b"login"),
        (HTTP, b"/http/login", b"/http/login"),
        (ROOT, b"/http/login", b"/login"),
        (ROOT, b"/other", b"/other"),
    ],
)
def test_redirects_of_the_server_to_itself_stay_with_it(mount, location, outside):
    assert mount.leave(location, b"here") == outside


def test_a_redirect_to_the_servers_own_name_stays_where_the_client_found_it():
    assert ROOT.leave(b"https://own/http/login", b"here", b"own") == b"/login"
    assert ROOT.leave(b"https://own/other", b"here", b"own") == b"https://own/other"


def test_what_a_server_needs_stands_in_place_of_what_the_client_says():
    target = Target("own", 80, ROOT, ((b"host", b"own"), (b"x-pod", b"a")))
    headers = [(b"host", b"here"), (b"x-pod", b"b"), (b"accept", b"*/*")]
    assert target.passed(headers) == [
        (b"accept", b"*/*"),
        (b"x-forwarded-host", b"here"),
        (b"host", b"own"),
        (b"x-pod", b"a"),
    ]


def test_the_host_of_the_client_stays_where_the_server_needs_none_of_its_own():
    headers = [(b"host", b"here")]
    assert Target("own", 80, ROOT).passed(headers) == headers


def test_headers_of_the_connection_stay_on_it():
    headers = [
        (b"connection", b"close, X-Own"),
        (b"x-own", b"1"),
        (b"transfer-encoding", b"chunked"),
        (b"accept", b"*/*"),
    ]
    assert end_to_end(headers) == [(b"accept", b"*/*")]


def test_a_head_has_what_was_asked_for():
    head = request_head("GET", b"/a", b"x=1", [(b"host", b"here")], (b"connection", b"close"))
    assert head == b"GET /a?x=1 HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n"
