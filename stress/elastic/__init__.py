"""Kills, stops and adds ranks of an elastic training at random moments, hundreds of times.

``python -m stress.elastic`` is the parent: it is what `sdp run --elastic` is to a job, and measures
how long the others need to go on. ``rank`` is what each rank runs, ``check`` what must hold.
"""
