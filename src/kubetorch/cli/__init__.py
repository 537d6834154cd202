"""The `kt` command: parses, calls the SDK, prints."""
