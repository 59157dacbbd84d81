"""Groups that span nodes: collectives of one node's ranks, joined by messages between nodes.

Layers, each of which imports only those before it:

- ``transport``: the interface of a network; ``mpi_library`` and ``mpi``: the one over MPI.
- ``plan`` and ``costs``: how a reduction travels.
- ``context``, ``patience``, ``failure_message``: where an operation runs, for how long, and
  what a rank that fails sends to the others.
- ``operation``: one operation while it runs on this rank; ``headers`` and ``agreement``: whether
  all ranks call the same one.
- The programs, each a fixed sequence of steps and messages: ``all_reduce`` (by
  ``recursive_multiplying``, or ``sharded_reduction`` in a ``pipeline``), ``reduce_scatter``,
  ``broadcast``, ``gathers``.
- ``engine``: runs programs in order; ``messages``: sends and receives.
- ``spanning_group``: what ``Group`` uses.
"""
