"""One loss for each example."""
