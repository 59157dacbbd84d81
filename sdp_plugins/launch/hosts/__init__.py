"""Jobs on a list of hosts: mpirun starts an agent for every rank, which reports to the launcher."""
