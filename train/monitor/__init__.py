"""What a run reports and watches while it runs; nothing here changes a number of the training.

`train.monitor.meter` names every metric and how it is computed.
"""
