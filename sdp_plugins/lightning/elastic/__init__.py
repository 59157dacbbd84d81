"""`smddp_elastic`: a Trainer that goes on when ranks are lost, and with others that join.

``strategy`` is what a Trainer uses. Below it: ``fit`` repeats the part of ``Trainer.fit`` in which
a rank was lost, ``trainer_state`` is what a rank tells another that has not come so far,
``division`` divides what is left of an epoch.
"""
