"""The programs inside a pod: the agent (session, reload, calls) and its workers."""
