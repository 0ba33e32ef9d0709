"""``python -m train plan``: what a run will need and how fast it will be on a pod, from a machine without one.

The TPU compiler (libtpu) runs on any host and compiles the exact train step for the exact pod. What it says of memory
is final; what a step takes is predicted, from the program it wrote: see `train.plan.timeline`.
"""
