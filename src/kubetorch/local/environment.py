"""What of a program's environment reaches the service that it starts, and so the pods.

A service outlives the program that started it and serves others, so it takes over what belongs to
the machine and the user, and nothing that belongs to that program: a pod's environment must not
depend on who came first. What a program needs in its pods it says: `kt.Compute(env_vars=...)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kubetorch.errors import ConfigError
from kubetorch.local.commands import HOME

#: Seconds without a request after which a service with nothing deployed stops.
IDLE = "KT_LOCAL_IDLE"
IDLE_DEFAULT = 60.0

_NAMES = frozenset(
    {
        *("HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
        *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH"),
        *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PYTHONPATH", "VIRTUAL_ENV", IDLE),
    }
)
_PREFIXES = ("LC_", "XDG_", "SSL_CERT_", "CUDA_", "NVIDIA_", "CONDA_", "PIP_", "UV_")


def for_service(environ: Mapping[str, str], home: Path) -> dict[str, str]:
    """The environment of a service that a program with this one starts.

    Raises:
        ConfigError: A setting of the service is impossible.
    """
    idle_seconds(environ)
    kept = {
        name: value
        for name, value in environ.items()
        if name in _NAMES or name.startswith(_PREFIXES)
    }
    return kept | {HOME: str(home)}


def idle_seconds(environ: Mapping[str, str]) -> float:
    """Seconds without a request after which a service with nothing deployed stops.

    Raises:
        ConfigError: It is no positive number.
    """
    text = environ.get(IDLE, "")
    try:
        seconds = float(text) if text else IDLE_DEFAULT
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise ConfigError(f"{IDLE} is {text!r}; it must be a number of seconds above 0")
    return seconds
