"""Checksums of payloads."""
