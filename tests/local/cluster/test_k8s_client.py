"""The client of the Kubernetes API against a scripted server on loopback."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time

import pytest

from kubetorch import errors
from kubetorch.k8s.client import Client
from kubetorch.k8s.kubeconfig import Impersonation, Pem, Plugin, User
from kubetorch.k8s.resources import PODS, Ref, Selection
from kubetorch.k8s.tuning import LIMITS
from local.fake_apiserver import Authority, FakeApiServer, failure, listing, pod, script

WEB = Ref(PODS, "web", "team")


@contextlib.asynccontextmanager
async def client_of(handler, *, user=None, patience=20.0, timeout=30.0, variables=None):
    async with FakeApiServer(handler) as server:
        access = server.access(user)
        async with Client(
            access, timeout=timeout, patience=patience, variables=variables or {}
        ) as client:
            yield client, server


def answers(*replies):
    """A handler that gives these replies in turn, and the last one again and again."""
    replies_left = list(replies)

    async def handler(exchange):
        reply = replies_left.pop(0) if len(replies_left) > 1 else replies_left[0]
        result = reply(exchange)
        if asyncio.iscoroutine(result):
            await result

    return handler


def ok(body):
    return lambda exchange: exchange.answer(200, body)


def refuse(*arguments, **headers):
    return lambda exchange: exchange.refuse(*arguments, **headers)


def cut(exchange):
    exchange.cut()


# --------------------------------------------------------------------------------- verbs


def test_an_object_is_read_over_one_kept_connection():
    async def scenario():
        async with client_of(answers(ok(pod("web", 3)))) as (client, server):
            for _ in range(3):
                assert (await client.get(WEB))["metadata"]["name"] == "web"
            assert [request.target for request in server.requests] == [
                "/api/v1/namespaces/team/pods/web"
            ] * 3
            assert server.connections == 1

    asyncio.run(scenario())


def test_a_list_is_fetched_in_pages_and_its_items_say_what_they_are():
    async def handler(exchange):
        query = exchange.request.query
        bare = {"metadata": {"name": f"p{query.get('continue', '')}"}}
        more = {"": "1", "1": "2"}.get(query.get("continue", ""), "")
        exchange.answer(200, listing(9, bare, proceed=more))

    async def scenario():
        async with client_of(handler) as (client, server):
            pods = await client.list(Selection(PODS, "team", labels="app=web"), page=1)
            assert [item["metadata"]["name"] for item in pods.items] == ["p", "p1", "p2"]
            assert pods.items[0]["kind"] == "Pod"
            assert pods.resource_version == "9"
            assert {request.query["labelSelector"] for request in server.requests} == {"app=web"}
            assert {request.query["limit"] for request in server.requests} == {"1"}

    asyncio.run(scenario())


def test_pages_that_the_server_forgot_are_replaced_by_one_list():
    async def handler(exchange):
        if exchange.request.query.get("continue"):
            exchange.refuse(410, "Expired")
        elif "limit" in exchange.request.query:
            exchange.answer(200, listing(1, pod("a", 1), proceed="x"))
        else:
            exchange.answer(200, listing(5, pod("a", 1), pod("b", 2)))

    async def scenario():
        async with client_of(handler) as (client, _):
            pods = await client.list(Selection(PODS))
            assert [item["metadata"]["name"] for item in pods.items] == ["a", "b"]

    asyncio.run(scenario())


DISCOVERY = {
    "kind": "APIResourceList",
    "resources": [
        {"name": "deployments", "kind": "Deployment", "namespaced": True},
        {"name": "deployments/scale", "kind": "Scale", "namespaced": True},
    ],
}
DEPLOYMENT = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}}


async def apps(exchange):
    if exchange.request.path == "/apis/apps/v1":
        exchange.answer(200, DISCOVERY)
    elif exchange.request.path == "/apis/ray.io/v1":
        exchange.answer(404, b"404 page not found\n")
    else:
        exchange.answer(200, {**DEPLOYMENT, "spec": {}})


def test_apply_finds_the_path_of_a_kind_once_and_sends_an_apply_patch():
    async def scenario():
        async with client_of(apps) as (client, server):
            await client.apply(DEPLOYMENT, field_manager="me", force=True, dry_run=True)
            await client.apply(DEPLOYMENT, field_manager="me")
            first, second, third = server.requests
            assert first.path == "/apis/apps/v1"
            assert second.method == "PATCH"
            assert second.path == "/apis/apps/v1/namespaces/team/deployments/web"
            assert second.query == {"fieldManager": "me", "force": "true", "dryRun": "All"}
            assert second.header("content-type") == "application/apply-patch+yaml"
            assert second.json == DEPLOYMENT
            assert (third.path, third.query) == (second.path, {"fieldManager": "me"})

    asyncio.run(scenario())


def test_a_kind_that_the_cluster_lacks_is_told_from_an_object_that_is_missing():
    async def scenario():
        async with client_of(apps) as (client, server):
            for version, kind in (("ray.io/v1", "RayCluster"), ("apps/v1", "Deploiment")):
                with pytest.raises(errors.KubernetesNotFoundError, match=kind) as caught:
                    await client.discovery.find(version, kind)
                assert caught.value.reason == "NoKindMatch"
                assert caught.value.resource == f"{kind}.{version}"
                assert "operator" in caught.value.hint
            await client.discovery.find("apps/v1", "Deployment")
            assert len(server.requests) == 2, "what was learned on the way is kept"

    asyncio.run(scenario())


def test_a_kind_that_is_not_served_any_more_is_looked_for_again():
    async def handler(exchange):
        if exchange.request.method == "GET":
            exchange.answer(200, DISCOVERY)
        else:
            exchange.answer(404, b"404 page not found\n")

    async def scenario():
        async with client_of(handler) as (client, server):
            for _ in range(2):
                with pytest.raises(errors.KubernetesNotFoundError) as caught:
                    await client.apply(DEPLOYMENT)
                assert "operator" in caught.value.hint
            assert [request.method for request in server.requests] == ["GET", "PATCH"] * 2

    asyncio.run(scenario())


def test_patches_and_deletions_say_what_is_meant():
    async def scenario():
        async with client_of(answers(ok(pod("web", 3)))) as (client, server):
            await client.patch(WEB, {"metadata": {"labels": None}})
            await client.patch(WEB, [{"op": "remove", "path": "/metadata/labels"}])
            await client.delete(
                WEB, propagation="Foreground", preconditions={"uid": "u1"}, grace_seconds=0
            )
            merge, operations, deletion = server.requests
            assert merge.header("content-type") == "application/merge-patch+json"
            assert operations.header("content-type") == "application/json-patch+json"
            assert deletion.json["preconditions"] == {"uid": "u1"}
            assert deletion.json["propagationPolicy"] == "Foreground"
            assert deletion.json["gracePeriodSeconds"] == 0

    asyncio.run(scenario())


def test_many_requests_take_turns():
    async def scenario():
        async with client_of(answers(ok(pod("web", 1)))) as (client, server):
            await asyncio.gather(*(client.get(WEB) for _ in range(200)))
            assert len(server.requests) == 200
            assert server.connections <= 32

    asyncio.run(scenario())


# ------------------------------------------------------------------------------- refusals


def test_a_refusal_says_verb_resource_namespace_and_the_missing_rule():
    forbidden = refuse(403, "Forbidden", 'User "u" cannot get resource "pods"')

    async def scenario():
        async with client_of(answers(forbidden)) as (client, _):
            with pytest.raises(errors.KubernetesForbiddenError) as caught:
                await client.get(WEB)
            error = caught.value
            assert "cannot get pods 'web' in namespace 'team'" in str(error)
            assert (error.verb, error.resource, error.namespace) == ("get", "pods", "team")
            assert "resources: ['pods'], verbs: ['get']" in error.hint
            assert isinstance(error, PermissionError)

    asyncio.run(scenario())


def test_a_conflict_of_field_managers_names_the_fields():
    causes = [{"reason": "FieldManagerConflict", "field": ".spec.replicas", "message": "by hpa"}]
    body = failure(409, "Conflict", "Apply failed with 1 conflict", causes=causes)

    async def handler(exchange):
        if exchange.request.method == "GET":
            exchange.answer(200, DISCOVERY)
        else:
            exchange.answer(409, body)

    async def scenario():
        async with client_of(handler) as (client, _):
            with pytest.raises(errors.KubernetesConflictError) as caught:
                await client.apply(DEPLOYMENT)
            assert caught.value.causes == causes
            assert "force" in caught.value.hint

    asyncio.run(scenario())


# ----------------------------------------------------------------------------- repetition


@pytest.mark.parametrize("trouble", [cut, refuse(503, "ServiceUnavailable"), refuse(500, "X")])
def test_a_read_is_repeated(trouble):
    async def scenario():
        async with client_of(answers(trouble, trouble, ok(pod("web", 1)))) as (client, server):
            await client.get(WEB)
            assert len(server.requests) == 3

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        (cut, errors.KubernetesUnavailableError),
        (refuse(500, "InternalError"), errors.KubernetesRequestError),
    ],
)
def test_a_write_that_may_have_happened_is_not_repeated(trouble, error):
    async def scenario():
        async with client_of(answers(trouble)) as (client, server):
            with pytest.raises(error, match="cannot delete pods 'web' in namespace 'team'"):
                await client.delete(WEB)
            assert len(server.requests) == 1

    asyncio.run(scenario())


def test_a_write_is_repeated_when_the_server_is_busy_and_not_before_it_says():
    busy = refuse(429, "TooManyRequests", Retry_After="1")

    async def scenario():
        async with client_of(answers(busy, ok(pod("web", 1)))) as (client, server):
            begun = time.monotonic()
            await client.delete(WEB)
            assert time.monotonic() - begun >= 1
            assert len(server.requests) == 2

    asyncio.run(scenario())


def test_a_server_that_is_busy_for_longer_than_the_patience_is_an_error_at_once():
    busy = refuse(429, "TooManyRequests", "slow down", Retry_After="30")

    async def scenario():
        async with client_of(answers(busy)) as (client, _):
            with pytest.raises(errors.KubernetesRequestError, match="429") as caught:
                await client.get(WEB)
            assert caught.value.retry_after == 30

    asyncio.run(scenario())


def test_requests_that_wait_until_they_may_be_sent_again_hold_up_no_other():
    all_asked = asyncio.Event()
    busy = []

    async def handler(exchange):
        if exchange.request.path.endswith("/web"):
            exchange.answer(200, pod("web", 3))
            return
        busy.append(exchange)
        exchange.refuse(429, "TooManyRequests", Retry_After="60")
        if len(busy) == LIMITS.concurrent_requests:
            all_asked.set()

    async def scenario():
        async with client_of(handler, patience=100.0) as (client, _):
            gets = [
                client.get(Ref(PODS, f"p{number}", "team"))
                for number in range(LIMITS.concurrent_requests)
            ]
            waiting = asyncio.gather(*gets)
            await all_asked.wait()
            assert (await client.get(WEB))["metadata"]["name"] == "web"
            assert not waiting.done()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_write_waits_for_a_server_that_is_not_there_yet():
    async def scenario():
        async with client_of(answers(ok(pod("web", 1)))) as (client, server):
            await server.stop()
            task = asyncio.create_task(client.delete(WEB))
            await asyncio.sleep(0.3)
            await server.start()
            await task

    asyncio.run(scenario())


def test_a_server_that_stays_away_is_an_error_that_names_it():
    async def scenario():
        async with client_of(answers(cut), patience=0.3) as (client, server):
            await server.stop()
            with pytest.raises(errors.KubernetesUnavailableError, match="nobody listens") as caught:
                await client.get(WEB)
            assert server.url in str(caught.value)
            await server.start()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000,
    ],
)
def test_garbage_is_a_typed_error(reply):
    def garbage(exchange):
        exchange.writer.write(reply)
        exchange.writer.close()

    async def scenario():
        async with client_of(answers(garbage), patience=0.2) as (client, _):
            with pytest.raises(errors.KubernetesUnavailableError):
                await client.get(WEB)

    asyncio.run(scenario())


@pytest.mark.parametrize("body", [b"<html>log in</html>", b"[]", b""])
def test_an_answer_of_something_else_than_kubernetes_is_a_typed_error(body):
    async def scenario():
        async with client_of(answers(lambda exchange: exchange.answer(200, body))) as (client, _):
            with pytest.raises(errors.KubernetesError, match="no answer of Kubernetes"):
                await client.get(WEB)

    asyncio.run(scenario())


def test_a_silent_server_is_an_error_within_the_timeout():
    async def scenario():
        silent = answers(lambda exchange: exchange.hang())
        async with client_of(silent, timeout=0.3, patience=0.0) as (client, _):
            begun = time.monotonic()
            with pytest.raises(errors.KubernetesUnavailableError, match=r"within 0\.3 s"):
                await client.get(WEB)
            assert time.monotonic() - begun < 20

    asyncio.run(scenario())


@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_what_a_server_says_unasked_is_not_taken_for_the_next_answer(delay):
    extra_was_sent = asyncio.Event()

    async def handler(exchange):
        exchange.answer(200, pod("web", 1))
        await exchange.writer.drain()
        await asyncio.sleep(delay)
        exchange.answer(200, {"kind": "Secret"})
        extra_was_sent.set()

    async def scenario():
        async with client_of(handler) as (client, _):
            for _ in range(3):
                assert (await client.get(WEB))["kind"] == "Pod"
                await extra_was_sent.wait()
                extra_was_sent.clear()
                for _ in range(5):  # however late this wakes up, the loop has seen what came
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())


# ---------------------------------------------------------------------------- credentials


def test_a_rotated_token_file_is_read_again_when_the_old_token_is_refused(tmp_path):
    token = tmp_path / "token"
    token.write_text("old\n")

    async def handler(exchange):
        if exchange.request.token == f"Bearer {token.read_text().strip()}":
            exchange.answer(200, pod("web", 1))
        else:
            exchange.refuse(401, "Unauthorized")

    async def scenario():
        async with client_of(handler, user=User(token_file=token)) as (client, server):
            await client.get(WEB)
            token.write_text("new")
            await client.delete(WEB)
            assert [request.token for request in server.requests] == [
                "Bearer old",
                "Bearer old",
                "Bearer new",
            ]

    asyncio.run(scenario())


def test_credentials_that_stay_wrong_are_refused_after_one_repetition(tmp_path):
    token = tmp_path / "token"
    token.write_text("t")

    async def scenario():
        wrong = answers(refuse(401, "Unauthorized"))
        async with client_of(wrong, user=User(token_file=token)) as (client, server):
            with pytest.raises(errors.KubernetesForbiddenError, match="401") as caught:
                await client.get(WEB)
            assert "log in again" in caught.value.hint
            assert len(server.requests) == 2

    asyncio.run(scenario())


PLUGIN = """
import json, os, pathlib, sys
counter = pathlib.Path(sys.argv[1]); count = len(counter.read_text()) if counter.exists() else 0
counter.write_text("x" * (count + 1))
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
assert info["spec"]["interactive"] is False and os.environ["EXTRA"] == "1"
status = {"token": f"t{count}", "expirationTimestamp": sys.argv[2]}
print(json.dumps({"apiVersion": info["apiVersion"], "kind": "ExecCredential", "status": status}))
"""


def plugin(folder, text, *arguments):
    command = (script(folder, text), *map(str, arguments))
    return User(plugin=Plugin(sys.executable, command, {"EXTRA": "1"}, interaction="Never"))


@pytest.mark.parametrize(
    ("expiry", "runs"), [("2099-01-01T00:00:00Z", 1), ("2001-01-01T00:00:00Z", 3)]
)
def test_a_plugin_is_asked_again_only_when_its_credential_is_void(tmp_path, expiry, runs):
    user = plugin(tmp_path, PLUGIN, tmp_path / "counter", expiry)

    async def scenario():
        async with client_of(answers(ok(pod("web", 1))), user=user) as (client, server):
            for _ in range(3):
                await client.get(WEB)
            assert len({request.token for request in server.requests}) == runs

    asyncio.run(scenario())


def test_a_plugin_is_asked_again_when_its_token_is_refused_once_for_all_who_wait(tmp_path):
    user = plugin(tmp_path, PLUGIN, tmp_path / "counter", "2099-01-01T00:00:00Z")

    delays = iter([0.0, 0.0, 0.5, 0.5, 0.5])

    async def handler(exchange):
        if exchange.request.token == "Bearer t1":
            exchange.answer(200, pod("web", 1))
        else:
            await asyncio.sleep(next(delays))  # some learn it when others have the next token
            exchange.refuse(401, "Unauthorized")

    async def scenario():
        async with client_of(handler, user=user) as (client, _):
            await asyncio.gather(*(client.get(WEB) for _ in range(5)))
            assert (tmp_path / "counter").read_text() == "xx"

    asyncio.run(scenario())


def test_a_plugin_that_hangs_is_ended_with_what_it_started(tmp_path):
    text = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
time.sleep(100)
"""
    hanging = plugin(tmp_path, text).plugin
    user = User(plugin=dataclasses.replace(hanging, timeout=1.0))

    async def scenario():
        async with client_of(answers(ok({})), user=user) as (client, _):
            with pytest.raises(errors.KubernetesCredentialsError, match="did not end within 1 s"):
                await client.get(WEB)

    asyncio.run(scenario())


def test_a_plugin_is_given_up_though_its_browser_goes_on_with_its_pipes(tmp_path):
    browser = tmp_path / "browser"
    text = f"""
import pathlib, subprocess, sys, time
browser = subprocess.Popen(["sleep", "60"], start_new_session=True)
pathlib.Path({str(browser)!r}).write_text(str(browser.pid))
time.sleep(60)
"""
    user = User(plugin=dataclasses.replace(plugin(tmp_path, text).plugin, timeout=0.5))

    async def scenario():
        async with client_of(answers(ok({})), user=user) as (client, _):
            with pytest.raises(errors.KubernetesCredentialsError, match="did not end"):
                await asyncio.wait_for(client.get(WEB), 10.0)
        os.kill(int(browser.read_text()), signal.SIGKILL)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit('session expired')", "status 1: session expired"),
        ("print('Please log in at https://…')", "printed no credential"),
        ("print('{}')", "printed no credential"),
    ],
)
def test_a_plugin_that_fails_says_why(tmp_path, text, message):
    async def scenario():
        async with client_of(answers(ok({})), user=plugin(tmp_path, text)) as (client, _):
            with pytest.raises(errors.KubernetesCredentialsError, match=message):
                await client.get(WEB)

    asyncio.run(scenario())


def test_a_plugin_that_is_not_installed_says_how_to_install_it():
    user = User(plugin=Plugin("no-such-plugin", install_hint="gcloud components install x"))

    async def scenario():
        async with client_of(answers(ok({})), user=user) as (client, _):
            with pytest.raises(errors.KubernetesCredentialsError) as caught:
                await client.get(WEB)
            assert caught.value.hint == "gcloud components install x"

    asyncio.run(scenario())


def test_impersonation_and_basic_credentials_are_sent():
    acting = Impersonation("jane", "7", ("dev", "ops"), {"Scopes/x": ("a",)})
    user = User(username="u", password="p", impersonation=acting)

    async def scenario():
        async with client_of(answers(ok(pod("web", 1))), user=user) as (client, server):
            await client.get(WEB)
            headers = server.requests[0].headers
            assert ("authorization", "Basic dTpw") in headers
            assert ("impersonate-user", "jane") in headers
            assert ("impersonate-uid", "7") in headers
            groups = [value for name, value in headers if name == "impersonate-group"]
            assert groups == ["dev", "ops"]
            assert ("impersonate-extra-scopes%2Fx".lower(), "a") in headers

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------ TLS


def test_certificates_of_both_ends_are_checked(tmp_path):
    authority = Authority()
    certificate, key = authority.client("jane")
    (tmp_path / "key.pem").write_bytes(key)
    user = User(certificate=Pem(data=certificate), key=Pem(path=tmp_path / "key.pem"))

    async def scenario():
        context = authority.server_context(wants_client=True)
        async with FakeApiServer(answers(ok(pod("web", 1))), context) as server:
            async with Client(server.access(user, authority.pem), variables={}) as client:
                assert (await client.get(WEB))["metadata"]["name"] == "web"
            async with Client(
                server.access(user, Authority().pem), patience=60, variables={}
            ) as client:
                begun = time.monotonic()
                with pytest.raises(errors.KubernetesCredentialsError, match="does not verify"):
                    await client.get(WEB)
                assert time.monotonic() - begun < 30, "a wrong certificate is not tried again"

    asyncio.run(scenario())


def test_a_certificate_for_another_name_needs_tls_server_name():
    authority = Authority("api.internal")

    async def scenario():
        async with FakeApiServer(answers(ok(pod("web", 1))), authority.server_context()) as server:
            access = server.access(authority=authority.pem)
            async with Client(access, variables={}) as client:
                with pytest.raises(errors.KubernetesCredentialsError, match="does not verify"):
                    await client.get(WEB)
            for changes in ({"tls_name": "api.internal"}, {"is_insecure": True}):
                cluster = dataclasses.replace(access.cluster, **changes)
                changed = dataclasses.replace(access, cluster=cluster)
                async with Client(changed, variables={}) as client:
                    await client.get(WEB)

    asyncio.run(scenario())


def test_a_new_authority_file_is_trusted_for_new_connections(tmp_path):
    old, new = Authority(), Authority()
    file = tmp_path / "ca.crt"
    file.write_bytes(old.pem)

    async def scenario():
        async with FakeApiServer(answers(ok(pod("web", 1))), new.server_context()) as server:
            access = server.access()
            cluster = dataclasses.replace(access.cluster, authority=Pem(path=file))
            async with Client(dataclasses.replace(access, cluster=cluster), variables={}) as client:
                with pytest.raises(errors.KubernetesCredentialsError):
                    await client.get(WEB)
                file.write_bytes(new.pem + b"\n")
                await client.get(WEB)

    asyncio.run(scenario())


# ---------------------------------------------------------------------------------- proxies


async def http_proxy(exchange):
    """A proxy that knows one user."""
    request = exchange.request
    if request.header("proxy-authorization") != "Basic dTpw":
        exchange.answer(407, b"")
        return
    host, _, port = request.target.rpartition(":")
    exchange.writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def pump(source, sink):
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                sink.write(data)
        sink.transport.abort()

    try:
        await asyncio.gather(pump(exchange.reader, writer), pump(reader, exchange.writer))
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("tls", [True, False])
def test_a_proxy_is_passed_with_its_credentials(tls):
    authority = Authority()

    async def scenario():
        context = authority.server_context() if tls else None
        async with (
            FakeApiServer(http_proxy) as proxy,
            FakeApiServer(answers(ok(pod("web", 1))), context) as server,
        ):
            access = server.access(authority=authority.pem)
            for credentials, is_allowed in (("u:p@", True), ("", False)):
                url = f"http://{credentials}127.0.0.1:{proxy.port}"
                cluster = dataclasses.replace(access.cluster, proxy=url)
                changed = dataclasses.replace(access, cluster=cluster)
                async with Client(changed, variables={}, patience=0.0) as client:
                    if is_allowed:
                        await client.get(WEB)
                        assert proxy.requests[-1].method == "CONNECT"
                    else:
                        with pytest.raises(errors.KubernetesUnavailableError, match="407"):
                            await client.get(WEB)

    asyncio.run(scenario())


def test_a_body_survives_the_way_there():
    async def handler(exchange):
        if exchange.request.method == "GET":
            exchange.answer(
                200, {"resources": [{"name": "secrets", "kind": "Secret", "namespaced": True}]}
            )
        else:
            exchange.answer(201, exchange.request.json)

    async def scenario():
        big = {"apiVersion": "v1", "kind": "Secret", "metadata": {"generateName": "s-"}}
        big["stringData"] = {"a": "ü" * 500_000}
        async with client_of(handler) as (client, server):
            assert await client.create(big) == json.loads(json.dumps(big))
            assert server.requests[-1].path == "/api/v1/namespaces/team/secrets"

    asyncio.run(scenario())
