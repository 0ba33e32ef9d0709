"""A study compares extensions of one released model."""
