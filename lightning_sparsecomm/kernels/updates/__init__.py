"""Adds gradients to residuals, finds the largest elements, and sums sparse vectors."""
