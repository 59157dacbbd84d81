"""HuggingFace's Trainer and accelerate over smddp, on CPUs.

Scripts import and call nothing. `backend_choice` patches accelerate's choice of a backend,
`sagemaker_flag` transformers' check for SageMaker's variables, and `command_line` adds smddp to the
choices of an option. The patches apply when accelerate and transformers are imported, and affect
only jobs that use smddp. `SDP_HUGGINGFACE=0` disables them. See docs/huggingface.md.
"""
