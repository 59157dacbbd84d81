"""Training that goes on when ranks are lost, and with others that join.

``Elastic`` is what a training loop uses. Below it: ``default_group`` makes torch's default group
anew, ``state`` copies a rank's state to ranks that lack it, ``loader`` divides what is left of an
epoch among the ranks that are there.
"""
