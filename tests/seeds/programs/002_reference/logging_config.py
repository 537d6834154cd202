"""What of the logs the caller sees."""

import kubetorch as kt

# --- the example
from kubetorch import LoggingConfig

compute = kt.Compute(
    logging_config=LoggingConfig(
        stream_logs=True,  # Enable log streaming
        level="info",  # "debug", "info", "warning", "error"
        include_system_logs=False,  # Exclude uvicorn.access, etc.
        include_events=True,  # Include K8s events during startup
        grace_period=2.0,  # Seconds to catch late logs
        include_name=True,  # Prepend service name to logs
        poll_timeout=1.0,  # WebSocket receive timeout
        shutdown_grace_period=0,  # Block main thread on shutdown
    )
)

# --- what is said of it
assert compute.logging_config.stream_logs is True
assert compute.logging_config.grace_period == 2.0
variables = {
    variable["name"]: variable.get("value") for variable in compute.pod_spec["containers"][0]["env"]
}
assert variables["KT_LOG_LEVEL"] == "INFO"
for level in ("debug", "info", "warning", "error"):
    assert LoggingConfig(level=level).level == level
