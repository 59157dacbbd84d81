"""What the command and its ranks have in common."""

BERT, LANGUAGE = "bert", "language"
MODELS = (BERT, LANGUAGE)
EVERY = 30
"""Steps from one outer step to the next one, and between torch's averages of models."""
WARM_UP = 3
"""Steps after which torch's hooks begin to compress."""
NONE, GLOO, FLOAT32 = "none", "gloo", "float32"
IN_EACH_STEP = (GLOO, "gloo-fp16", "gloo-powersgd", FLOAT32, "bf16", "int8", "fp8", "int4")
LOCAL = ("gloo-local-sgd", "local-sgd", "diloco", "streaming")
NOW_AND_THEN = (NONE, *LOCAL)
"""Variants that communicate in some steps only, and their reference, which are compared in turns of
`TURN` steps."""
TURN = 3 * EVERY
"""Ranks that share cores and seldom wait for each other do not end a turn together. While the last
ones go on, a core is idle; a turn of `EVERY` steps took 3 % longer for it."""
NAMES = (NONE, *IN_EACH_STEP, *LOCAL)
