"""Why a launch cannot succeed, or why it waits, read from what the cluster says. No I/O."""
