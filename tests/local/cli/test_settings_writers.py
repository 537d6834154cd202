"""Programs that write settings at the same time."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from kubetorch.config.settings import KubetorchConfig


def test_a_file_that_another_program_writes_is_waited_for_and_read_afterwards(
    tmp_path: Path,
) -> None:
    file = tmp_path / "config.yaml"
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        written = KubetorchConfig({}, file)
        writer = threading.Thread(target=written.write, args=({"namespace": "b"},))
        writer.start()
        writer.join(0.1)
        assert writer.is_alive()
        file.write_text("queue: c\n")
    finally:
        os.close(folder)
    writer.join(20)
    assert file.read_text() == "namespace: b\nqueue: c\n"
