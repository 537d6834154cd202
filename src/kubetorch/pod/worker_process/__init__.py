"""The agent's end of its workers: zygotes, forks, what comes out of them, why they ended."""
