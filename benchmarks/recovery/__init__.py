"""How long a training needs to go on when a rank is killed: smddp, torchelastic and torchft.

`run` is the command: it starts the jobs of `launch` in turns and kills ranks. What ranks run is in
`train_smddp`, `train_torchelastic` and `train_torchft`; they write what they do to a file (`said`),
of which `timing` makes the figures.
"""
