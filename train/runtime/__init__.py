"""The machine and the processes that a command runs on."""
