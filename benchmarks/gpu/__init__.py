"""Device tensors: `python -m benchmarks gpu` checks and measures smddp on a GPU, beside gloo.

`parts` lists what is measured, and `bench` starts the ranks and keeps the time. The ranks' side is
in `task`, `correctness`, `copies`, `calls`, `matmuls` and `training`. Everything uses the API that
torch has for any accelerator, so it also runs on CPU tensors and on a simulated device.
"""
