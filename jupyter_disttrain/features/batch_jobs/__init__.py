"""Make the processes of any job the ranks of a cluster (``--join FILE``)."""
