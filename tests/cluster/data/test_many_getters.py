"""Ten pods get a large key, and one is killed: the store sends few copies (KT_TEST_WHOLE=1)."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import shared
from cluster import faults

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.alone,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not shared.WHOLE, reason="KT_TEST_WHOLE=1: it takes minutes"),
]

#: Bytes of the key, in MB.
MEGABYTES = int(os.environ.get("KT_TEST_KEY_MEGABYTES", "300"))
PODS = 10
GETTER = """
import os
import threading
import time

import kubetorch as kt

class Getter:
    def begin(self):
        self.result = None
        threading.Thread(target=self.get).start()
        return os.environ["POD_NAME"]

    def get(self):
        begin = time.monotonic()
        try:
            kt.get("large", "/tmp/large.bin", broadcast=kt.BroadcastWindow(timeout=1))
            size = os.path.getsize("/tmp/large.bin")
            self.result = f"{size} bytes after {time.monotonic() - begin:.1f} s"
        except Exception as error:
            self.result = repr(error)

    def state(self):
        return os.environ["POD_NAME"], getattr(self, "result", "begun later")
"""
PROGRAM = f"""
import os, tempfile, time
from pathlib import Path
from getter import Getter

with tempfile.NamedTemporaryFile() as file:  # not in the project, which pods get
    for _ in range({MEGABYTES}):
        file.write(os.urandom(1_000_000))
    file.flush()
    kt.put("large", file.name)
getter = kt.cls(Getter).to(kt.Compute(cpus="10m", replicas={PODS}), stream_logs=False)
print("deployed", flush=True)
service.until(Path("go").exists)
begin = time.monotonic()
print("pods", getter.begin(), flush=True)
while True:
    time.sleep(1)
    try:
        states = dict(getter.state())
    except kt.KubetorchError:
        continue
    if None not in states.values():
        break
print("states", states)
print("seconds", time.monotonic() - begin)
"""


def _sent_bytes(process_id: int) -> int:
    """What the pod of a process has sent through its network device."""
    for line in Path(f"/proc/{process_id}/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "eth0":
            return int(figures.split()[8])
    raise AssertionError(f"process {process_id} has no eth0")


def test_all_but_the_one_that_is_killed_get_all_of_it(
    client: Callable[[str], faults.Client],
) -> None:
    program = client(PROGRAM)
    (program.folder / "getter.py").write_text(GETTER)
    program.line("deployed", timeout=300)
    controller = faults.controllers()[0].pid
    before = _sent_bytes(controller)
    (program.folder / "go").touch()
    pods = ast.literal_eval(program.line("pods", timeout=60).removeprefix("pods "))
    faults.until(lambda: _sent_bytes(controller) - before > MEGABYTES * 100_000)
    faults.kill(faults.agents(pods[3]))
    states = ast.literal_eval(program.line("states", timeout=600).removeprefix("states "))
    sent = (_sent_bytes(controller) - before) / (MEGABYTES * 1e6)
    seconds = program.line("seconds").split()[1]
    print(f"{MEGABYTES} MB to {PODS} pods: the store sent {sent:.2f} copies, {seconds} s; {states}")
    whole = [pod for pod, state in states.items() if state.startswith(f"{MEGABYTES}000000 bytes")]
    assert {*pods} - {pods[3]} <= {*whole}
    assert sent <= 2.5
