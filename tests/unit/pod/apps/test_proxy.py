import pytest

from kubetorch.pod.apps import proxy


def test_the_cookie_is_kept_from_scripts_and_other_sites():
    text = proxy.cookie("kubetorch-app-web-0", "good.token_1", path="/team/web", is_secure=True)
    assert text.startswith("kubetorch-app-web-0=good.token_1;")
    parts = {part.strip() for part in text.split(";")}
    assert {"HttpOnly", "Path=/team/web", "SameSite=Strict", "Secure"} <= parts


NAMES = ["10.0.0.5", "::1", "localhost", "127.0.0.1", "kt.example.com", "a.b.apps.example.com"]
OWN = ["web", "web-http", "web.team", "web.team.svc", "web-0.web-headless.team.svc.cluster.local"]
FOREIGN = [
    *("", "evil.example", "apps.example.com", "kt.example.com.evil.example", "xweb", "other"),
    *(
        "web-x.team",
        "web.team.evil.example",
        "web.other.svc",
        "team.svc.cluster.local.evil.example",
    ),
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [*((one, True) for one in NAMES + OWN), *((one, False) for one in FOREIGN)],
)
def test_an_app_has_the_names_of_its_services_and_those_of_the_controller(name, expected):
    names = proxy.AppNames("team", "web")
    assert names.has(name)  # an older controller says nothing
    names.told = ("kt.example.com", "*.apps.example.com")
    assert names.has(name) is expected
