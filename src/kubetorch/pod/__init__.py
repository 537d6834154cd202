"""What runs inside a pod: the agent (session, reload, calls) and its workers."""
