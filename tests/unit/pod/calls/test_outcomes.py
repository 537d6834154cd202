from kubetorch.pod.calls.outcomes import Outcomes
from kubetorch.wire.calls import Raised, Returned
from kubetorch.wire.failures import Failure


def returned(size: int) -> Returned:
    return Returned("json", (size,), bytes(size))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_outcome_is_found_until_its_time_is_over():
    clock = Clock()
    outcomes = Outcomes(clock, keep_seconds=10)
    outcomes.put("a", returned(1))
    outcomes.put("b", Raised(Failure("ValueError", "no")))
    assert outcomes.get("a") == returned(1)
    assert isinstance(outcomes.get("b"), Raised)
    clock.now = 9.9
    assert outcomes.get("a") is not None
    clock.now = 10
    assert outcomes.get("a") is None


def test_the_oldest_go_when_there_are_too_many_bytes():
    outcomes = Outcomes(Clock(), limit_bytes=10_000)
    for key in range(5):
        outcomes.put(key, returned(2000))
    assert [key for key in range(5) if outcomes.get(key)] == [2, 3, 4]


def test_one_that_is_larger_than_all_may_be_is_not_kept_and_drives_nothing_out():
    outcomes = Outcomes(Clock(), limit_bytes=10_000)
    outcomes.put("small", returned(1))
    outcomes.put("large", returned(20_000))
    assert outcomes.get("large") is None
    assert outcomes.get("small") is not None


def test_a_key_that_is_put_again_has_the_new_outcome():
    outcomes = Outcomes(Clock(), limit_bytes=5000)
    outcomes.put("a", returned(2000))
    outcomes.put("a", returned(3000))
    outcomes.put("b", returned(100))
    assert outcomes.get("b") is not None
    outcomes.put("a", returned(20_000))
    assert outcomes.get("a") is None
