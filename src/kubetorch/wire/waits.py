"""How long calls may take, and a controller for what it answers at the end only; for both ends.

Who asks waits for longer than who answers: else nobody hears why it took so long, and a request
that is sent again finds other things than the first one.
"""

from __future__ import annotations

#: Seconds that running calls have to end in a teardown, where nothing is said.
DELETE_GRACE = 5.0
#: Seconds after these until pods that are still there are an error; processes end sooner.
DELETE_SLACK = 30.0
#: Seconds by which a client waits for longer than the controller: for all else that it does.
MARGIN = 30.0

#: Seconds that a call may take at most, 3 years: event loops cannot count any number of them.
LONGEST_TIMEOUT = 1e8
