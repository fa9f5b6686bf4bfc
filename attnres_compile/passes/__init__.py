"""The passes, one per file: what they find and change in a graph."""
