"""A decoder from a config: its scheme, its extensions, where it lies on a mesh, what it costs."""
