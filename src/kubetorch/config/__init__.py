"""Settings of the user and of this process: where they come from and what they may be."""
