"""A stream of calls to one pod: its frames, its connection, who writes and who reads."""
