import pytest

from kubetorch.lib.proxy import Mount, Target, end_to_end

HTTP = Mount(outside="/http", inside="")
SEEN_BY_BROWSER = HTTP._replace(browser_prefix="/team/web/http")
ROOT = Mount(outside="", inside="/http")
NAMED = Mount(outside="/default/train:80", inside="")


@pytest.mark.parametrize(
    ("mount", "path", "server_path"),
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
def test_paths_are_moved_to_where_the_server_has_them(mount, path, server_path):
    assert mount.has(path)
    assert mount.enter(path) == server_path


def test_other_paths_are_not_the_servers():
    assert not HTTP.has(b"/httpx")
    assert not HTTP.has(b"/http%2Fx")
    assert not HTTP.has(b"/")


@pytest.mark.parametrize(
    ("mount", "location", "outside"),
    [
        (HTTP, b"/login?x=1", b"/http/login?x=1"),
        (HTTP, b"http://here/login", b"http://here/http/login"),
        (HTTP, b"http://elsewhere/login", b"http://elsewhere/login"),
        (HTTP, b"login", b"login"),
        (HTTP, b"/http/login", b"/http/login"),
        (SEEN_BY_BROWSER, b"/team/web/http/login", b"/team/web/http/login"),
        (HTTP._replace(browser_prefix="/"), b"/login", b"/http/login"),
        (ROOT, b"/http/login", b"/login"),
        (ROOT, b"/other", b"/other"),
    ],
)
def test_redirects_of_the_server_to_itself_stay_with_it(mount, location, outside):
    assert mount.leave(location, b"here") == outside


def test_a_redirect_to_the_servers_own_name_stays_where_the_client_found_it():
    assert ROOT.leave(b"https://own/http/login", b"here", b"own") == b"/login"
    assert ROOT.leave(b"https://own/other", b"here", b"own") == b"https://own/other"


@pytest.mark.parametrize(
    ("mount", "cookie", "outside"),
    [
        (HTTP, b"a=1; Path=/; HttpOnly", b"a=1; Path=/http; HttpOnly"),
        (HTTP, b"a=1; path = /x/", b"a=1; Path=/http/x/"),
        (HTTP, b"a=1; Path=/http/x", b"a=1; Path=/http/x"),
        (HTTP, b"path=/; Secure", b"path=/; Secure"),
        (HTTP, b"a=1; Path=x", b"a=1; Path=x"),
        (HTTP, b"a=1; Domain=example.com; Path=/other", b"a=1; Path=/http/other"),
        (SEEN_BY_BROWSER, b"a=1; Path=/", b"a=1; Path=/team/web/http"),
        (SEEN_BY_BROWSER, b"a=1; Path=/team/web/http/x", b"a=1; Path=/team/web/http/x"),
        (HTTP._replace(browser_prefix="/"), b"a=1; Path=/x", b"a=1; Path=/x"),
        (ROOT, b"a=1; Path=/http", b"a=1; Path=/"),
        (ROOT, b"a=1; Path=/http/x", b"a=1; Path=/x"),
        (ROOT, b"a=1; Path=/", b"a=1; Path=/"),
    ],
)
def test_a_cookie_comes_back_to_the_server_that_set_it_alone(mount, cookie, outside):
    assert mount.scope(cookie) == outside


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
