"""The sections of a config: frozen dataclasses that check their own values and import neither jax nor posjax."""
