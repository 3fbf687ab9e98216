"""Selectors: which elements of a vector are sent."""
