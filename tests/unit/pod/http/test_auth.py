import json

import pytest

from kubetorch.errors import CallRefusedError, ConfigError, ForeignOriginError, UnauthorizedError
from kubetorch.pod.http.auth import Credentials, Guard
from kubetorch.wire import tokens

KEY = tokens.workload_key(b"secret", "ns/name")
CREDENTIALS = Credentials(KEY, "session", tokens.fingerprint("mine"))
NOW = 1000.0


def guard(host: str = "127.0.0.1", now: float = NOW) -> Guard:
    return Guard(CREDENTIALS, audience="ns/name", host=host, clock=lambda: now)


def signed(**more) -> str:
    claims = {"audience": "ns/name", "expires": NOW + 10, "subject": "user", **more}
    return tokens.sign(KEY, tokens.Claims(**claims))


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "  Bearer  "])
def test_the_users_own_token_is_recognised(scheme):
    guard().check_token(f"{scheme} mine")


@pytest.mark.parametrize("subject", ["user", "pod:default/other-0"])
def test_a_signed_token_is_accepted_whoever_asked_for_it(subject):
    guard().check_token(f"Bearer {signed(subject=subject)}")


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Basic mine",
        "mine",
        "Bearer min",
        "Bearer session",
        f"Bearer {signed(expires=NOW)}",
        f"Bearer {signed(audience='ns/other')}",
        f"Bearer {signed()}x",
        f"Bearer {tokens.fingerprint('mine')}",
        "Bearer ü",
    ],
)
def test_anything_else_is_unauthorized(authorization):
    with pytest.raises(UnauthorizedError) as caught:
        guard().check_token(authorization)
    assert "mine" not in str(caught.value)


def test_a_token_opens_what_it_says():
    checked = guard()
    for verbs in [(), ("call",), ("logs", "call")]:
        checked.check_token(f"Bearer {signed()}", *verbs)
        checked.check_token("Bearer mine", *verbs)
    checked.check_token("Bearer mine", "exec")
    shell = f"Bearer {signed(verbs=('exec', 'logs'))}"
    checked.check_token(shell, "exec")
    for token, verb, refusal in [
        (f"Bearer {signed()}", "exec", "needs the user's own token"),
        (shell, "call", "does not open 'call'"),
    ]:
        with pytest.raises(UnauthorizedError, match=refusal):
            checked.check_token(token, verb)
    assert checked.is_token(signed())
    assert not checked.is_token(shell.removeprefix("Bearer "))


def test_without_a_key_nobody_is_let_in_and_that_passes():
    checked = Guard(Credentials(), audience="ns/name", host="10.0.0.5", clock=lambda: NOW)
    for authorization in (f"Bearer {signed()}", "Bearer x"):
        with pytest.raises(CallRefusedError, match="not ready"):
            checked.check_token(authorization)
    checked.set_key(KEY)
    checked.check_token(f"Bearer {signed()}", "call")
    with pytest.raises(UnauthorizedError):
        checked.check_token("Bearer x")
    checked.set_key(b"another key")
    with pytest.raises(UnauthorizedError):
        checked.check_token(f"Bearer {signed()}", "call")


def test_a_remembered_token_still_expires():
    now = NOW
    checked = Guard(CREDENTIALS, audience="ns/name", host="127.0.0.1", clock=lambda: now)
    token = signed()
    checked.check_token(f"Bearer {token}")
    now = NOW + 11
    with pytest.raises(UnauthorizedError, match="expired"):
        checked.check_token(f"Bearer {token}")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:80", "localhost:1", "[::1]:8", "[::1]", "127.9.9.9"]
)
def test_loopback_hosts_are_accepted(host):
    guard().check_origin(host, None)


@pytest.mark.parametrize(
    "host",
    [
        None,
        "",
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "0.0.0.0",
        "[::1",
        ":",
    ],
)
def test_foreign_hosts_are_refused(host):
    with pytest.raises(ForeignOriginError):
        guard().check_origin(host, None)


@pytest.mark.parametrize("origin", ["http://localhost", "http://127.0.0.1:3000", "https://[::1]"])
def test_origins_of_this_machine_are_accepted(origin):
    guard().check_origin("localhost", origin)


@pytest.mark.parametrize(
    "origin", ["null", "", "http://evil.example", "file://localhost", "localhost", "http://[::1"]
)
def test_foreign_origins_are_refused(origin):
    with pytest.raises(ForeignOriginError):
        guard().check_origin("localhost", origin)


def test_an_agent_that_listens_to_a_network_is_reached_by_its_names():
    guard("10.0.0.5").check_origin("demo.default.svc", "http://portal.example")


def test_credentials_are_read(tmp_path):
    path = tmp_path / "credentials.json"
    path.write_text(json.dumps({"key": "00ff", "session": "s", "user": "u"}))
    assert Credentials.read(str(path)) == Credentials(b"\x00\xff", "s", "u")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": "xyz", "session": "s", "user": "u"}'])
def test_broken_credentials_are_a_config_error_that_repeats_no_secret(tmp_path, text):
    path = tmp_path / "credentials.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Credentials.read(str(path))
    assert "xyz" not in str(caught.value)
    with pytest.raises(ConfigError):
        Credentials.read(str(tmp_path / "missing"))
