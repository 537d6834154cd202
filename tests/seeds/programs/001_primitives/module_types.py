"""The table of module types: functions, classes with state, arbitrary processes."""

import pathlib
import urllib.request

import kubetorch as kt
from kubetorch.lib import sockets


def process(items):
    return sorted(items)


class Cache:
    def __init__(self):
        self.values = {}

    def put(self, key, value):
        self.values[key] = value
        return len(self.values)


# "kt.fn(function): Stateless functions"
remote_fn = kt.fn(process).to(kt.Compute(cpus="0.1"))
assert remote_fn([3, 1, 2]) == [1, 2, 3]
remote_fn.teardown()

# "kt.cls(MyClass): Stateful classes"
remote_cache = kt.cls(Cache).to(kt.Compute(cpus="0.1"))
assert [remote_cache.put("a", 1), remote_cache.put("b", 2)] == [1, 2]
remote_cache.teardown()

# "kt.app(command): Arbitrary processes: FastAPI servers, training scripts"
port = sockets.choose(())
app = kt.app(f"python -m http.server {port} --bind 127.0.0.1", port=port, public=True)
app = app.to(kt.Compute(cpus="0.1"))
with urllib.request.urlopen(app.endpoint("module_types.py"), timeout=20) as answer:
    assert answer.read() == pathlib.Path(__file__).read_bytes()
app.teardown()
