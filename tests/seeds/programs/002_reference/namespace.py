"""The namespace, and the order in which it is looked for."""

import os
import pathlib

import kubetorch as kt

# --- the example
compute = kt.Compute(namespace="my-namespace")

# --- what is said of it
assert compute.manifest["metadata"]["namespace"] == "my-namespace"


def resolved(**variables: str) -> str:
    """The namespace of a program with these variables."""
    import subprocess
    import sys

    code = "import kubetorch as kt; print(kt.Compute().namespace)"
    environment = {key: text for key, text in os.environ.items() if key != "KT_NAMESPACE"}
    completed = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return completed.stdout.strip()


# "1. Explicit parameter 2. KT_NAMESPACE env var 3. ~/.kt/config.yaml
# 4. Kubeconfig current context 5. "default""
settings = pathlib.Path("config.yaml").absolute()
settings.write_text("namespace: of-the-file\n")
kubeconfig = pathlib.Path("kubeconfig").absolute()
kubeconfig.write_text(
    "apiVersion: v1\nkind: Config\ncurrent-context: mine\n"
    "contexts: [{name: mine, context: {cluster: c, user: u, namespace: of-the-context}}]\n"
)
nothing = str(pathlib.Path("absent").absolute())
every = {"KUBECONFIG": str(kubeconfig), "KT_CONFIG_FILE": str(settings)}
assert resolved(**every, KT_NAMESPACE="of-the-variable") == "of-the-variable"
assert resolved(**every) == "of-the-file"
assert resolved(KUBECONFIG=nothing, KT_CONFIG_FILE=nothing) == "default"
