"""Encodes positions in bytes, and decodes them."""
