"""`SMDDPStrategy(elastic=True)`: a `fit` that goes on without lost ranks, and with others.

``fit`` repeats the part of Keras' `fit` in which a rank was lost. Below it: ``model_state`` is what
a rank tells another that has not come so far, ``data`` yields any batch of any epoch, ``callbacks``
has another rank 0 write files when the first one is lost.
"""
