"""Pieces that know nothing of Kubetorch; each file could be a package of its own."""
