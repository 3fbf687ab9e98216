"""Replicas that come and go: the wire over a quorum of those that are there, joining, and membership."""
