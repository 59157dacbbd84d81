"""Groups that span nodes: collectives of one node's ranks, joined by messages between nodes.

Layers, each of which knows only those before it: ``wire`` (what a transport offers), ``notice``
(what a rank that gives up tells), ``mpi_library`` and ``mpi`` (one transport), ``costs`` and
``plan`` (how a reduction travels), ``call`` (one operation while it runs on this rank), ``kept``
(memory that must outlive it), the programs (``all_reduce`` by ``swap`` or ``exchange``,
``reduce_scatter``, ``broadcast``, ``gathers``: who does what, as a fixed sequence), ``engine``
(runs programs in order) and ``messages`` (sends and receives), ``spanning_group`` (what
``Group`` sees).
"""
