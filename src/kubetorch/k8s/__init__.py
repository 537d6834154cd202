"""The Kubernetes API, spoken by ourselves: credentials, verbs, watches, streams into pods.

No module here knows a workload, a generation or any other concept of Kubetorch, and no module
outside talks to an API server. Objects are plain dicts.

    kubeconfig (which API server, as whom) ──► credentials
                                                    │
    resources, failures ──► client (verbs) ──► session ──► lib.async_http, lib.websocket
                                │
                            informers
    pod_streams: streams into pods, logs
"""
