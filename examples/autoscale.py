"""A service from nothing to many pods and back to nothing, with a picture of its pods over time.

Each call takes half a second, and a pod runs two at once. The load rises in three steps and then
ends. Run it again with other numbers: `min_scale=1` keeps a pod, `buffer=1` keeps a free one while
there is work, and a longer `window` follows the load more slowly.
"""

import threading
import time

import kubetorch as kt


def work(number: int) -> int:
    time.sleep(0.5)
    return number * number


class Watcher(threading.Thread):
    """Records the state of a service four times a second."""

    def __init__(self, service: kt.Fn) -> None:
        super().__init__(daemon=True)
        self.service = service
        self.states: list[tuple[float, int, int]] = []
        self.is_over = threading.Event()

    def run(self) -> None:
        begin = time.monotonic()
        while not self.is_over.wait(0.25):
            stats = self.service.stats()
            self.states.append((time.monotonic() - begin, stats.pods_ready, stats.calls_running))

    def picture(self) -> str:
        lines = ["    s  calls  pods"]
        for second in range(int(self.states[-1][0]) + 1):
            moments = [state for state in self.states if int(state[0]) == second]
            if moments:
                pods, calls = (max(moment[i] for moment in moments) for i in (1, 2))
                lines.append(f"{second:5}  {calls:5}  {'#' * pods}")
        return "\n".join(lines)


if __name__ == "__main__":
    compute = kt.Compute(cpus="0.1", inactivity_ttl="30m").autoscale(
        min_scale=0,
        max_scale=6,
        concurrency=2,
        window="6s",
        scale_down_delay="0s",
        scale_to_zero_pod_retention_period="2s",
    )
    service = kt.fn(work).to(compute)
    watcher = Watcher(service)
    watcher.start()

    results = []
    for callers, calls in ((1, 6), (4, 40), (12, 160)):
        results += service.map(range(calls), window=callers)
    print("calls:", len(results), "sum:", sum(results))

    deadline = time.monotonic() + 90
    while service.stats().pods and time.monotonic() < deadline:
        time.sleep(0.5)
    watcher.is_over.set()
    watcher.join()

    print(watcher.picture())
    most_pods = max(pods for _, pods, _ in watcher.states)
    print("several pods:", 2 <= most_pods <= 6, "none at the end:", not service.stats().pods)
    print("again, from nothing:", service(9))
    service.teardown()
