"""Apps: commands as services, from a program and from `kt run`."""
