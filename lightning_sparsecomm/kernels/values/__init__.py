"""Values in few bits."""
