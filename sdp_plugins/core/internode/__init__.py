"""Groups that span nodes: collectives of one node's ranks, joined by messages between nodes.

Layers, each of which knows only those before it: ``wire`` (what a transport offers),
``mpi_library`` and ``mpi`` (one of them), ``call`` (one operation while it runs on this rank), the
programs (``all_reduce``, ``gathers``, ``exchanges``: who does what, as a fixed sequence),
``engine`` (runs programs in order), ``spanning_group`` (what ``Group`` sees).
"""
