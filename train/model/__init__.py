"""A decoder from a config: its scheme, its extensions, its sharding over a mesh, its cost."""
