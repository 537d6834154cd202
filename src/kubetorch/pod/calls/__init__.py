"""Calls in the agent: the streams that they come on, where they run, what is kept of them."""
