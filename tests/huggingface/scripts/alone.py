"""A user's script without a word about the backend; with "import", one that registers it itself."""

import sys

import torch.distributed as dist
from accelerate import Accelerator

if sys.argv[1:]:
    import sdp_plugins.torch  # noqa: F401  it registers the backend

    dist.init_process_group("smddp")
# One write: sdp run shows the parts of a line that stays unfinished, and others come between.
print(f"ranks {Accelerator().num_processes}\n", end="", flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
