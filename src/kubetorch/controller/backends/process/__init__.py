"""Pods as processes of this machine: an agent process each, and what they are given."""
