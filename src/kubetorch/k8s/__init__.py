"""The Kubernetes API, spoken by ourselves: credentials, verbs, watches, streams into pods.

Nothing here knows a workload, a generation or any other concept of Kubetorch, and nothing outside
talks to an API server. Objects are plain dicts.

    kubeconfig, incluster ──► access (who, where) ──► credentials, tls ──┐
                                                                         ▼
    resources, discovery ──► requests (pure) ──► client (verbs) ──► lib.httppool
    watching (pure) ──► informers                 execs, portforward ──► lib.connections
"""
