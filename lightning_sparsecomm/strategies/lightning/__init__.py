"""The strategies for the packages inside `lightning`."""
