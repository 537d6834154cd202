"""Content-addressed blobs and trees. Knows nothing of callables."""
