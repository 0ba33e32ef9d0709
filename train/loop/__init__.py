"""Training: the loss, the optimizer, one update, and the loop around it."""
