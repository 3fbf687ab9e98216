"""Products of two thin matrices."""
