"""``python -m train bench configs/gpu.yaml``: the kernels for GPUs, their errors and times beside other libraries.

Times are taken in the same way for every library. A call runs once to warm up. Then calls are queued without waiting,
for a fifth of a second or up to a hundred of them, and the process waits once for all; the time of a call is the least
mean of three such rows. It includes what the library's Python does for a call only where that takes longer than the
device. Programs of jax are compiled ahead, in threads, while others are measured; what these threads run in Python
waits during a row.

A call has batch 1, and arrays of bfloat16. "forward + backward" computes the output and the gradients of q, k and v,
and in posjax those of the bias too. torch's forward is that of a training: it keeps what the backward needs. tokamax
runs with the tiles that it chooses without a search, and gets ALiBi as an array.

jax, tokamax and torch have a process each, which stays for all their measurements, because it takes ten seconds to
begin. A process that hangs is ended, and the measurement is a problem in the results; so is a process that dies.
"""
