"""The table of plans: published runs of others, and the configs of `configs/pods`."""
