"""A sharded training loop for long sequences. Run as ``python -m train COMMAND CONFIG [key.path=value ...]``."""
