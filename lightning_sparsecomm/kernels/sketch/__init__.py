"""Count sketches: inserting elements, and estimating them."""
