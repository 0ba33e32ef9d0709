"""The laboratory, for the project's developers: schedules of kernels, benches, compiled steps compared, the table of
plans, formal languages.

Only the command line, which starts it, imports it. A plan reads the costs of kernels that it writes
(`train.lab.schedule.costs`).
"""
