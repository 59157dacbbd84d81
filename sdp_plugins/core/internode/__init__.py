"""Groups that span nodes: collectives of one node's ranks, joined by messages between nodes.

Layers, each of which imports only those before it:

- ``transport``: the interface of a network; ``mpi_library`` and ``mpi``: the one over MPI.
- ``plan`` and ``cost_model``: the algorithm of a reduction, its parameters, and how long it takes.
- ``group_context``, ``deadlines``, ``failure_message``: the state of a group, the deadlines of an
  operation, and the message that reports a failure to other nodes.
- ``operation``: one operation while it runs on this rank; ``agreement``: the check that all ranks
  call the same operation; ``algorithm_choice``: the fastest plan for it.
- The programs, each a fixed sequence of steps and messages: ``all_reduce`` (of large buffers by
  ``sharded_reduction``), ``reduce_scatter``, ``broadcast``, ``gathers``.
- ``issued``: an operation with its handle and its record; ``engine``: runs programs in order;
  ``point_to_point``: sends and receives.
- ``spanning_group``: the interface that ``Group`` uses.
"""
