"""The only part that knows Lightning: each module is named like the package whose strategies it extends."""
