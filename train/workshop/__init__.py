"""For the project's developers: benchmarks, and static schedules, by which kernels choose their tiles."""
