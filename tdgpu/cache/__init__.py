"""What was computed once: how it is named by what it depends on, and where it lies."""
