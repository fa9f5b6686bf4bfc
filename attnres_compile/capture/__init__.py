"""Model to fx graph, and the example inputs for it."""
