"""``python -m train plan``: predicts a run's memory and speed on a pod, from a machine without one.

The TPU compiler (libtpu) runs on any host and compiles the exact train step for the exact pod. Its memory numbers are
final. The time of a step is predicted from the compiled program; see `train.plan.timeline`.
"""
