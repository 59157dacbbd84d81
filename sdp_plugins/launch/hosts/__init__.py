"""Jobs on a list of hosts: an agent for each rank, started by mpirun or ssh, reports to us."""


class LaunchError(Exception):
    """Raised when a job cannot be started; the text is one line that ends with the remedy."""
