"""What the command and its ranks have in common."""

EVERY = 30
"""Steps from one outer step to the next one, and between torch's averages of models."""
WARM_UP = 3
"""Steps after which torch's hooks begin to compress."""
NONE, GLOO, FLOAT32 = "none", "gloo", "float32"
EVEN = (NONE, GLOO, "gloo-fp16", "gloo-powersgd", FLOAT32, "bf16", "int8", "fp8")
UNEVEN = ("gloo-local-sgd", "local", "streaming")
"""Variants whose steps differ: a turn has `EVERY` of them."""
NAMES = (*EVEN, *UNEVEN)
