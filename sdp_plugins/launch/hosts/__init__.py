"""Jobs on a list of hosts: mpirun or ssh starts an agent for every rank, which reports
to the launcher."""


class LaunchError(Exception):
    """Raised when a job cannot be started; the text is one line that ends with the remedy."""
