"""For the project's engineers: benches, and the static schedules by which kernels choose their tiles."""
