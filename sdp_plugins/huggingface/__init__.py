"""HuggingFace's Trainer and accelerate over smddp, on CPUs.

Nothing has to be imported or called: once accelerate is imported, `backend_choice` stands before
the one place where it chooses a backend, and `sagemaker_flag` before what transformers asks of
SageMaker's variables; `command_line` adds smddp to a list of names. They only speak up in jobs that
mean smddp. docs/huggingface.md has the
upstream lines for which they stand in; `SDP_HUGGINGFACE=0` removes them.
"""
