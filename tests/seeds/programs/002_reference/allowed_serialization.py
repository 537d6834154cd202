"""How callers may send arguments."""

import kubetorch as kt

# --- the example
only_json = kt.Compute(allowed_serialization=["json"])  # Only allow JSON
both = kt.Compute(allowed_serialization=["json", "pickle"])  # Allow both


# --- what is said of it
def add(a, b):
    return a + b


remote_fn = kt.fn(add).to(only_json)
assert remote_fn(1, 2) == 3
try:
    remote_fn(1, 2, serialization="pickle")
except kt.SerializationError as error:
    assert "pickle" in str(error), error
else:
    raise AssertionError("pickle was taken")
remote_fn.teardown()

remote_fn = kt.fn(add).to(both)
assert remote_fn({1}.union([2]).__len__(), 1, serialization="pickle") == 3
assert remote_fn(1, 2) == 3
remote_fn.teardown()
