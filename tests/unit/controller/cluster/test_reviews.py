from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from kubetorch.controller.access import BoundPod, Need, User
from kubetorch.controller.cluster.access import (
    Answer,
    AnswerCache,
    Reviews,
    UncheckedClaims,
    Verdict,
    grant_command,
    token_claims,
)
from kubetorch.errors import (
    ControllerUnavailableError,
    KubernetesForbiddenError,
    KubernetesUnavailableError,
    UnauthorizedError,
)
from kubetorch.k8s.client import Client
from manual_clock import ManualClock


def jwt(payload: object) -> str:
    body = base64.urlsafe_b64encode(json.dumps(payload).encode()).rstrip(b"=").decode()
    return f"eyJ.{body}.c2ln"


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (jwt({"aud": ["kubetorch"], "exp": 12}), UncheckedClaims(("kubetorch",), 12.0)),
        (jwt({"aud": "api"}), UncheckedClaims(("api",), None)),
        (jwt({"aud": [1, None, "x"], "exp": "soon"}), UncheckedClaims(("x",), None)),
        (jwt({"exp": 1e300}), UncheckedClaims((), None)),
        (jwt([1]), UncheckedClaims()),
        ("opaque", UncheckedClaims()),
        ("a.b.c", UncheckedClaims()),
        ("..", UncheckedClaims()),
        ("a.\u00fc.c", UncheckedClaims()),
        (f"a.{base64.urlsafe_b64encode(b'[' * 100_000).decode()}.c", UncheckedClaims()),
    ],
)
def test_what_a_token_says_of_itself_is_read_whatever_it_is(
    token: str, expected: UncheckedClaims
) -> None:
    assert token_claims(token) == expected


@pytest.mark.parametrize(
    ("user", "need", "command"),
    [
        (
            "ann",
            Need("create", "team"),
            "kubectl create rolebinding NAME-kubetorch-edit --clusterrole=kubetorch-edit "
            "--user=ann -n team",
        ),
        (
            "system:serviceaccount:team:bot",
            Need("list", ""),
            "kubectl create clusterrolebinding bot-kubetorch-view --clusterrole=kubetorch-view "
            "--serviceaccount=team:bot",
        ),
    ],
)
def test_a_refusal_has_the_command_that_grants_the_right(
    user: str, need: Need, command: str
) -> None:
    assert grant_command(User(user), need) == command


class Server:
    """Allows everything in some namespaces; the empty one is all of them."""

    def __init__(self, *allowed: str) -> None:
        self.allowed = allowed

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        where = manifest["spec"]["resourceAttributes"].get("namespace", "")
        return {"status": {"allowed": where in self.allowed, "reason": f"of {where}"}}


@pytest.mark.parametrize(
    ("allowed", "watched", "expected"),
    [
        (("a", "b"), ("a", "b"), True),
        (("a",), ("a", "b"), False),
        (("a", "b"), (), False),
        (("",), (), True),
    ],
)
def test_everywhere_is_where_the_controller_works(
    allowed: tuple[str, ...], watched: tuple[str, ...], expected: bool
) -> None:
    reviews = Reviews(cast("Client", Server(*allowed)), watched)
    verdict = asyncio.run(reviews.verdict(User("ann"), Need("list", "")))
    assert verdict.is_allowed is expected
    if watched and not expected:
        assert verdict.reason == "of b"


def test_who_is_denied_is_not_allowed_whatever_else_is_said() -> None:
    server = ReviewServer({"allowed": True, "denied": True, "evaluationError": "no such role"})
    verdict = asyncio.run(reviews_of(server).verdict(User("ann"), Need("list", "team")))
    assert verdict == Verdict(False, "no such role")


class ReviewServer:
    """An API server that answers each review with this status, or with an error."""

    def __init__(self, status: object) -> None:
        self._status = status
        self.questions: list[dict[str, Any]] = []

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.questions.append(manifest["spec"])
        if isinstance(self._status, Exception):
            raise self._status
        return {"status": self._status}


def reviews_of(server: ReviewServer) -> Reviews:
    return Reviews(cast("Client", server))


def user(status: object, *audiences: str) -> User | None:
    return asyncio.run(reviews_of(ReviewServer(status)).user("token", audiences))


BOT = "system:serviceaccount:team:bot"
IN_POD = {
    "authentication.kubernetes.io/pod-name": ["f-1"],
    "authentication.kubernetes.io/pod-uid": ["u1"],
}


def token_status(name: str, **extra: list[str]) -> dict[str, Any]:
    """The status for a token of somebody, which is for us."""
    user_info = {"username": name, "uid": "7", "groups": ["devs"], "extra": extra}
    return {"authenticated": True, "audiences": ["kubetorch"], "user": user_info}


def test_the_user_of_a_token_is_who_the_server_says() -> None:
    assert user(token_status("ann")) == User("ann", "7", ("devs",))
    extra = (("a", ("1",)), ("b", ("2", "3")))
    assert user(token_status("ann", b=["2", "3"], a=["1"])) == User("ann", "7", ("devs",), extra)


@pytest.mark.parametrize(
    "status",
    [
        None,
        {},
        {**token_status("ann"), "authenticated": False},
        {**token_status("ann"), "authenticated": "true"},
        {**token_status("ann"), "error": "it has expired"},
    ],
)
def test_a_token_that_the_server_does_not_vouch_for_is_nobodys(status: object) -> None:
    assert user(status) is None


def test_a_token_for_us_alone_counts_only_where_the_server_knows_of_audiences() -> None:
    assert user(token_status("ann"), "kubetorch") == User("ann", "7", ("devs",))
    assert user({**token_status("ann"), "audiences": ["api"]}, "kubetorch") is None
    assert user({**token_status("ann"), "audiences": None}, "kubetorch") is None
    server = ReviewServer(token_status("ann"))
    asyncio.run(reviews_of(server).user("token", ("api",)))
    asyncio.run(reviews_of(server).user("token", ("kubetorch", "api")))
    assert server.questions == [{"token": "token"}, {"token": "token", "audiences": ["kubetorch"]}]


def test_a_user_without_a_name_is_refused() -> None:
    with pytest.raises(UnauthorizedError, match="a user without a name"):
        user(token_status(""))


def test_a_pod_is_one_by_its_service_accounts_token_for_us_alone() -> None:
    reviewed_user = user(token_status(BOT, **IN_POD), "kubetorch")
    assert reviewed_user is not None
    assert reviewed_user.pod == BoundPod("team", "f-1", "u1")


@pytest.mark.parametrize(
    ("name", "extra", "audiences"),
    [
        (BOT, IN_POD, ("api",)),
        ("ann", IN_POD, ("kubetorch",)),
        (BOT, {}, ("kubetorch",)),
        (BOT, {**IN_POD, "authentication.kubernetes.io/pod-name": ["a", "b"]}, ("kubetorch",)),
        (BOT, {**IN_POD, "authentication.kubernetes.io/pod-uid": []}, ("kubetorch",)),
    ],
)
def test_no_other_token_is_a_pods(
    name: str, extra: dict[str, list[str]], audiences: tuple[str, ...]
) -> None:
    reviewed_user = user(token_status(name, **extra), *audiences)
    assert reviewed_user is not None
    assert reviewed_user.pod is None


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KubernetesForbiddenError("no"), "it may not create a TokenReview"),
        (KubernetesUnavailableError("no"), "the cluster's API server does not answer"),
    ],
)
def test_while_nobody_can_be_checked_nobody_gets_in(error: Exception, message: str) -> None:
    with pytest.raises(ControllerUnavailableError, match=message):
        user(error)


class Oracle:
    """Answers, and notes what it was asked."""

    def __init__(self, *, is_yes: bool = True, seconds: float = 10.0) -> None:
        self.questions: list[str] = []
        self.is_yes = is_yes
        self.seconds = seconds
        self.go_on = asyncio.Event()
        self.go_on.set()

    def about(self, key: str) -> Callable[[], Awaitable[Answer[str]]]:
        async def ask() -> Answer[str]:
            self.questions.append(key)
            await self.go_on.wait()
            return Answer(f"{key}!", self.is_yes, self.seconds)

        return ask


async def _get(answers: AnswerCache[str, str], oracle: Oracle, *keys: str) -> list[str]:
    return [await answers.get(key, oracle.about(key)) for key in keys]


def test_an_answer_is_remembered_for_as_long_as_it_holds() -> None:
    async def main() -> None:
        clock, oracle = ManualClock(), Oracle()
        answers: AnswerCache[str, str] = AnswerCache(clock.time)
        assert await _get(answers, oracle, "a", "a") == ["a!", "a!"]
        assert oracle.questions == ["a"]
        clock.advance(10.0)
        await _get(answers, oracle, "a")
        assert oracle.questions == ["a", "a"]

    asyncio.run(main())


@pytest.mark.parametrize("seconds", [0.0, -5.0])
def test_what_is_over_already_is_not_remembered(seconds: float) -> None:
    async def main() -> None:
        oracle = Oracle(seconds=seconds)
        answers: AnswerCache[str, str] = AnswerCache(ManualClock().time)
        await _get(answers, oracle, "a", "a")
        assert (oracle.questions, len(answers)) == (["a", "a"], 0)

    asyncio.run(main())


def test_refusals_push_out_no_answers_that_were_yes() -> None:
    async def main() -> None:
        clock = ManualClock()
        answers: AnswerCache[str, str] = AnswerCache(clock.time, size=4)
        yes, no = Oracle(), Oracle(is_yes=False)
        await _get(answers, yes, "friend")
        await _get(answers, no, *(f"stranger {number}" for number in range(100)))
        await _get(answers, yes, "friend")
        assert (yes.questions, len(answers)) == (["friend"], 5)

    asyncio.run(main())


def test_equal_questions_at_one_time_are_asked_once() -> None:
    async def main() -> None:
        oracle = Oracle()
        oracle.go_on.clear()
        answers: AnswerCache[str, str] = AnswerCache(ManualClock().time)
        waiting = [asyncio.ensure_future(_get(answers, oracle, "a")) for _ in range(10)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # who asked first does not take the answer away from the others
        await asyncio.sleep(0)
        oracle.go_on.set()
        assert await asyncio.gather(*waiting[1:]) == [["a!"]] * 9
        assert oracle.questions == ["a"]

    asyncio.run(main())


def test_an_error_reaches_all_who_wait_and_is_not_remembered() -> None:
    async def fail() -> Answer[str]:
        raise ControllerUnavailableError("away")

    async def main() -> None:
        answers: AnswerCache[str, str] = AnswerCache(ManualClock().time)
        outcomes = await asyncio.gather(
            answers.get("a", fail), answers.get("a", fail), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [ControllerUnavailableError] * 2
        assert await answers.get("a", Oracle().about("a")) == "a!"

    asyncio.run(main())


def test_too_many_questions_at_one_time_are_refused() -> None:
    async def main() -> None:
        oracle = Oracle()
        oracle.go_on.clear()
        answers: AnswerCache[str, str] = AnswerCache(ManualClock().time, open_questions_limit=2)
        waiting = [asyncio.ensure_future(_get(answers, oracle, key)) for key in "ab"]
        await asyncio.sleep(0)
        with pytest.raises(ControllerUnavailableError, match="too many"):
            await _get(answers, oracle, "c")
        oracle.go_on.set()
        await asyncio.gather(*waiting)
        assert await _get(answers, oracle, "c") == ["c!"]

    asyncio.run(main())


def test_a_question_has_its_time() -> None:
    async def main() -> None:
        oracle = Oracle()
        oracle.go_on.clear()
        answers: AnswerCache[str, str] = AnswerCache(ManualClock().time, timeout=0.0)
        with pytest.raises(ControllerUnavailableError, match="has not said"):
            await _get(answers, oracle, "a")

    asyncio.run(main())
