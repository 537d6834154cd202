"""The Kubernetes API, spoken by ourselves: credentials, verbs, watches, streams into pods.

Nothing here knows a workload, a generation or any other concept of Kubetorch, and nothing outside
talks to an API server. Objects are plain dicts.

    kubeconfig, locating ──► access (who, where) ──► credentials, plugins, tls, proxies
                                                                  │
    resources, discovery, failures ──► client (verbs) ──► session ┴─► lib.httppool
                                          │                       └─► lib.upgrading
    watching (pure) ──► informers ────────┤
    channels ──► execs, portforward, podlogs
"""
