"""Collectives on tensors of an accelerator: copied to pinned memory, reduced there, copied back.

`drivers` knows what torch lacks of a device: pinning shared memory, and flags. Two ways lead
through the staging memory of `pinned_ring`: `flagged` enqueues everything in the call, `threaded`
serves devices and groups without flags. `host_copies` has the CPU copies on which all other
operations run. `device_calls` chooses.
"""
