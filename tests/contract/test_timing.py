"""Times and limits: one table per process, its page, and what holds between the processes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kubetorch.controller import tuning as controller
from kubetorch.k8s import tuning as k8s
from kubetorch.lib import tuning as lib
from kubetorch.manifests import tuning as manifests
from kubetorch.pod import tuning as pod
from kubetorch.sdk import tuning as sdk
from kubetorch.wire import frames
from kubetorch.wire import tuning as wire
from tools import timing

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/kubetorch"
PAGE = ROOT / "docs/design/timing.md"

#: What holds between two tables; what holds between its own numbers a table asserts itself.
RELATIONS = {
    # ------------------------------------------------------------------ client and agent
    "a client notices a lost connection while the agent still keeps its calls": (
        2 * sdk.TIMING.stream_ping_seconds < pod.TIMING.client_linger_seconds
    ),
    "a client tries to come back for as long as the agent keeps its calls": (
        sdk.TIMING.direct_patience_seconds >= pod.TIMING.client_linger_seconds
    ),
    "an agent that pings has no need to be pinged": (
        sdk.TIMING.stream_ping_seconds >= lib.TIMING.websocket_ping_seconds
    ),
    "names of errors that a client takes an agent takes, too": (
        sdk.LIMITS.retry_on_characters <= pod.LIMITS.retry_names_characters
    ),
    "an agent has room for the arguments of the largest call": (
        wire.LIMITS.arguments_bytes <= pod.LIMITS.waiting_arguments_bytes
    ),
    "a full window is no reason to give a client up": (
        wire.LIMITS.window_bytes < pod.LIMITS.unacknowledged_bytes
    ),
    "arguments that are kept are such that a pod takes": (
        sdk.LIMITS.kept_argument_bytes <= wire.LIMITS.arguments_bytes
    ),
    "a request for lines asks for no more than it may": (
        max(sdk.LIMITS.margin_lines, sdk.LIMITS.repeated_lines) <= wire.LIMITS.log_tail_lines
    ),
    # ------------------------------------------------------------------ client and controller
    "a silent rank is known to be lost before its client gives it up": (
        2 * sdk.TIMING.rank_ping_seconds
        >= controller.TIMING.member_silence_seconds
        + controller.TIMING.suspect_probe_seconds
        + controller.TIMING.world_tick_seconds
    ),
    "a question outlasts a change of the leader": (
        sdk.TIMING.controller_patience_seconds > controller.TIMING.lease_seconds
    ),
    "calls outlast a change of the leader": (
        sdk.TIMING.direct_patience_seconds > controller.TIMING.lease_seconds
    ),
    "the backend has reported why a pod ended before a client gives up to ask": (
        sdk.TIMING.pod_end_reason_seconds > controller.TIMING.backend_report_seconds
    ),
    "a local service has closed its connections before a client calls it hung": (
        sdk.TIMING.ending_service_seconds > controller.TIMING.server_close_seconds
    ),
    "the longest name that a client sends the controller takes": (
        sdk.LIMITS.origin_name_characters <= controller.LIMITS.origin_text_characters
    ),
    "a client may ask to wait for the end of a volume for as long as it does": (
        sdk.TIMING.volume_delete_seconds <= controller.TIMING.volume_deletion_longest_seconds
    ),
    "the grace of a teardown is one that a request may name": (
        wire.TIMING.teardown_grace_seconds <= controller.TIMING.delete_longest_grace_seconds
    ),
    # ------------------------------------------------------------------ agent and controller
    "two heartbeats of a pod may be lost": (
        3 * pod.TIMING.heartbeat_seconds < controller.TIMING.session_silence_seconds
    ),
    "one heartbeat of a rank may be lost": (
        2 * pod.TIMING.rank_heartbeat_seconds < controller.TIMING.member_silence_seconds
    ),
    "a sibling has answered, or not, when the controller decides about a suspect": (
        pod.TIMING.sibling_probe_seconds < controller.TIMING.suspect_probe_seconds
    ),
    "a failure fits into a message of a session": (
        wire.LIMITS.session_failure_bytes < controller.LIMITS.session_message_bytes
    ),
    "a running agent connects again before it counts as not started": (
        pod.TIMING.session_longest_delay_seconds < controller.TIMING.agent_connect_seconds
    ),
    "members are back before a new controller suspects them": (
        pod.TIMING.session_longest_delay_seconds < controller.TIMING.world_start_grace_seconds
    ),
    "pods are back before their calls fail": (
        pod.TIMING.session_longest_delay_seconds + pod.TIMING.session_connect_seconds
        < controller.TIMING.call_sweep_delay_seconds
    ),
    "the backend's reason arrives before a loss is told without one": (
        pod.TIMING.rank_loss_reason_seconds
        > controller.TIMING.backend_report_seconds + controller.TIMING.world_tick_seconds
    ),
    "the controller decides about a silent pod before its siblings give it up": (
        pod.TIMING.peer_reconnect_seconds
        > controller.TIMING.member_silence_seconds
        + controller.TIMING.suspect_probe_seconds
        + 2 * controller.TIMING.world_tick_seconds
    ),
    "reports of a session that was given up are sent again": (
        pod.TIMING.report_settled_seconds > controller.TIMING.session_silence_seconds
    ),
    "a pod that waits for blobs outlives one recovery": (
        pod.TIMING.transfer_stall_seconds >= controller.TIMING.blob_recovery_seconds
    ),
    "the controller reads every line of an agent whole": (
        pod.LIMITS.line_bytes < controller.LIMITS.log_line_bytes
    ),
    "an agent that is replaced closes in order": (
        controller.TIMING.replaced_pod_grace_seconds + controller.TIMING.agent_exit_seconds
        >= pod.TIMING.kill_grace_seconds
    ),
    "a token outlives the difference of two clocks": (
        wire.TIMING.clock_skew_seconds < controller.TIMING.call_token_seconds
    ),
    "processes end before what remains of a teardown is an error": (
        wire.TIMING.teardown_slack_seconds > controller.TIMING.agent_exit_seconds
    ),
    # ------------------------------------------------------------------ libraries and protocols
    "a review of access ends before its upgrade is refused": (
        lib.TIMING.upgrade_decision_seconds > controller.TIMING.access_review_seconds
    ),
    "a silent agent is not ready before its connection is given up": (
        lib.TIMING.websocket_silence_seconds > controller.TIMING.session_silence_seconds
    ),
    "a slow API server may leave more pings unanswered than an agent": (
        k8s.TIMING.stream_silence_seconds > lib.TIMING.websocket_silence_seconds
    ),
    "a slow list of pods does not end the start of a controller": (
        k8s.TIMING.request_seconds <= controller.TIMING.pod_list_seconds
    ),
    "the head of a large message is the header of a frame": (
        lib.LIMITS.large_message_head_bytes == frames.HEADER_BYTES
    ),
    "a chunk is placed where it belongs, not copied": (
        lib.LIMITS.large_message_bytes < wire.LIMITS.chunk_bytes
    ),
    "a chunk waits in the socket while the next one is prepared": (
        lib.LIMITS.websocket_waiting_bytes >= 2 * wire.LIMITS.chunk_bytes
    ),
    "a token's file is read again in the last fifth of its life, in which the kubelet renews it": (
        5 * sdk.TIMING.token_file_seconds < manifests.TIMING.pod_token_seconds
    ),
}

#: Words in a name that say that a whole number is one of seconds or bytes, or a limit of them.
WORDS = {
    *("SECONDS", "MILLISECONDS", "MINUTES", "HOURS", "DAYS", "TIMEOUT", "TIMEOUTS", "DELAY"),
    *("DELAYS", "INTERVAL", "PERIOD", "PATIENCE", "GRACE", "LIFETIME", "MARGIN", "SILENCE"),
    *("BYTES", "LIMIT", "LIMITS", "BUFFER"),
}
MIB = 1024 * 1024
#: Sizes of one read, copy or hash, if they are small: a matter of the loop around it.
PIECES = {"_READ_BYTES", "READ_BYTES", "_PIECE_BYTES"}
#: Numbers with a place of their own, and the reason.
EXCEPTIONS = {
    "flags and bounds of the kernel": {
        "datastore/trees.py: _NAME_BYTES",
        "datastore/trees.py: _PATH_BYTES",
        "lib/mounts.py: _CLONE_NEWUSER",
        "datastore/chunks.py: _BLOCK_BYTES",
        "lib/mounts.py: _TIMES",
        "pod/worker_process/worker.py: _UNLIMITED",
    },
    "sizes of a read of a file, and the unit of a message": {
        "datastore/blobs.py: _PIECE_BYTES",
        "datastore/scan.py: _MIB",
        "datastore/scan.py: _READ_BYTES",
        "datastore/transfer.py: _SAMPLED_BYTES",
        "datastore/transfer.py: _SAMPLE_BYTES",
        "datastore/transfer.py: _XOR_BYTES",
    },
    "shares, factors, and the largest time that is one": {
        "controller/scaler.py: _ROUNDING",
        "datastore/transfer.py: _WORTHWHILE",
        "datastore/transfer.py: _WORTHWHILE_DELTA",
        "pod/logs.py: _LATEST",
        "pod/user_process/thread_pool.py: _FADE_FACTOR",
    },
    "lengths of secrets": {
        "controller/cluster/process.py: _BYTES",
        "pod/user_process/protocol.py: NONCE_BYTES",
    },
    "facts of Kubernetes, Knative and Helm": {
        "controller/backends/kubernetes/pod_owners.py: _MESSAGE_LIMIT",
        "controller/cluster/resource.py: _MESSAGE_LIMIT",
        "controller/relay.py: _LABEL_LIMIT",
        "install/values.py: _INDEX_LIMIT",
        "manifests/agent.py: KNATIVE_TIMEOUT",
        "manifests/agent_container.py: _DEFAULT_PERIOD",
        "specs/autoscaling.py: _LONGEST_SECONDS",
        "specs/autoscaling.py: _SHORTEST_WINDOW_SECONDS",
        "specs/secret.py: SIZE_BYTES",
    },
    "parts of a record or file format": {
        "datastore/safetensors.py: _LENGTH_BYTES",
        "wire/blobs.py: _DELTA",
        "wire/blobs.py: _DIGEST_BYTES",
    },
    "facts of Arrow and NumPy": {
        "wire/arrow_streams.py: _FIELD_BYTES",
        "wire/arrow_streams.py: _INLINE_BYTES",
        "wire/dtypes.py: _ELEMENT_BYTES",
    },
    "defaults and bounds of the public API": {
        "specs/batching.py: LONGEST_WAIT_SECONDS",
        "specs/compute.py: ComputeSpec.launch_timeout",
        "specs/logging.py: LoggingConfig.grace_period",
        "specs/logging.py: LoggingConfig.grace_poll_timeout",
        "specs/logging.py: LoggingConfig.poll_timeout",
        "specs/metrics.py: MetricsConfig.interval",
        "wire/data.py: FindKeys.lease_seconds",
    },
}


@pytest.mark.parametrize("sentence", RELATIONS)
def test_what_depends_on_another_process_holds(sentence: str) -> None:
    assert RELATIONS[sentence], f"it does not hold that {sentence}"


def test_the_page_has_all_times_and_limits_as_they_are() -> None:
    command = "python -m tools.timing > docs/design/timing.md"
    assert PAGE.read_text(encoding="utf-8") == timing.page(), command


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("wait_seconds", 0.0004, "0.4 ms"),
        ("wait_seconds", 1.25, "1.25 s"),
        ("wait_seconds", 90.0, "90 s"),
        ("wait_seconds", 24 * 3600, "24 h"),
        ("wait_milliseconds", 1500, "1.5 s"),
        ("head_bytes", 8 * MIB, "8 MiB"),
        ("head_bytes", 2000, "2,000 B"),
        ("waiting_calls", 10_000, "10,000"),
    ],
)
def test_the_page_has_values_with_their_units(name: str, value: float, text: str) -> None:
    assert timing.readable(name, value) == text


def test_every_time_and_limit_has_a_reason() -> None:
    for package in timing.packages():
        for entry in timing.entries(package):
            assert entry.reason.endswith("."), f"{package}.{entry.name} has none"


def test_numbers_of_seconds_and_bytes_are_in_the_tables_alone() -> None:
    outside = set()
    for path in sorted(SOURCES.rglob("*.py")):
        if path.name != timing.MODULE:
            for name, value in _constants(ast.parse(path.read_text(encoding="utf-8"))):
                if _is_of_tables(name, value):
                    outside.add(f"{path.relative_to(SOURCES)}: {name}")
    exceptions = set().union(*EXCEPTIONS.values())
    assert (outside - exceptions) == set(), f"they belong into a {timing.MODULE}"
    assert not exceptions - outside, "they are no exceptions any more"


@pytest.mark.parametrize(
    "text",
    [
        "WAIT = 3.5",
        "FIRST, LONGEST = 0.1, 2.0",
        "DELAYS = (1, 30)",
        "RETRY_DELAY = 5",
        "KEPT = 4 * 1024**2",
        "KEPT = 1 << 20",
        "HEAD_BYTES: Final = 100",
        "class Spool:\n    timeout: float = 30.0",
    ],
)
def test_a_number_of_seconds_or_bytes_is_recognised(text: str) -> None:
    assert any(_is_of_tables(*constant) for constant in _constants(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "PORT = 32300",
        "ALIGNMENT = 64",
        "created = 0.0",
        "_READ_BYTES = 64 * 1024",
        "GRANT_BYTES = LIMITS.window_bytes // 4",
        "def wait(timeout: float = 3.0): ...",
    ],
)
def test_another_number_is_not(text: str) -> None:
    assert not any(_is_of_tables(*constant) for constant in _constants(ast.parse(text)))


def _constants(tree: ast.Module) -> Iterator[tuple[str, object]]:
    """The numbers to which a module and its classes give names, as `Class.NAME`."""
    scopes = [("", tree.body)]
    scopes += [(f"{n.name}.", n.body) for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    for prefix, body in scopes:
        for node in body:
            if isinstance(node, ast.Assign):
                target = node.targets[0]
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                target = node.target
            else:
                continue
            for name, value in _pairs(target, node.value):
                if _is_literal(value):
                    yield prefix + name, eval(ast.unparse(value))  # of numbers alone


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Names and the expressions that they stand for; `A, B = 1, 2` has two."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for inner, part in zip(target.elts, value.elts, strict=True):
            yield from _pairs(inner, part)
    elif isinstance(target, ast.Name):
        yield target.id, value


def _is_literal(expression: ast.expr) -> bool:
    """True for an expression of numbers alone, such as `4 * 1024**2`, and for a tuple of them."""
    operators = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Tuple, ast.Load)
    return all(
        isinstance(node, operators)
        or (isinstance(node, ast.Constant) and type(node.value) in (int, float))
        for node in ast.walk(expression)
    )


def _is_of_tables(name: str, value: object) -> bool:
    """True for a number of seconds or bytes; 0 stands for none."""
    if isinstance(value, tuple):
        return any(_is_of_tables(name, part) for part in value)
    assert isinstance(value, (int, float))
    if isinstance(value, float) or (value >= MIB and value % 1024 == 0):
        return value != 0
    is_named = not WORDS.isdisjoint(name.rpartition(".")[2].upper().split("_"))
    return value != 0 and is_named and name not in PIECES
