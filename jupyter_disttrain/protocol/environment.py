"""Name the environment variables of ranks and their nannies, as launchers set them.

The user may set STAGE_DIR; all others are this package's own.
"""

PREFIX = "DISTTRAIN_"
MPI_PREFIX = PREFIX + "MPI_"  # prefix of variables that are set for mpirun

CONNECTION_FILE = PREFIX + "CONNECTION_FILE"  # path of the controller's ipyparallel connection file
CLIENT = PREFIX + "CLIENT"  # the identity of the notebook's socket
PROFILE_DIR = PREFIX + "PROFILE_DIR"  # the cluster's folder, seen by all hosts
LOCAL_DIR = PREFIX + "LOCAL_DIR"  # the cluster's folder on the notebook's host; a rank elsewhere has none
LAUNCHER = PREFIX + "LAUNCHER"  # "mpi", "local" or "ssh"
LAUNCH_RANK = PREFIX + "LAUNCH_RANK"  # rank given by a job's launcher, in a cluster that a notebook joined
HOST = PREFIX + "HOST"  # the name by which the launcher reaches this host
NETWORK = PREFIX + "NETWORK"  # network of all hosts, as in "10.1.0.0/16"
ADDRESSES = PREFIX + "ADDRESSES"  # chosen addresses, one per host, separated by commas
PRELOAD = PREFIX + "PRELOAD"  # modules for the warm process to import, separated by commas
NO_WARM = PREFIX + "NO_WARM"  # set: each rank imports torch itself, and is not forked from a warm process
COLD_REASON = PREFIX + "COLD_REASON"  # why a process was not forked from a warm one
WITHOUT_TORCH = PREFIX + "WITHOUT_TORCH"  # set: ranks import no torch
MPI_HEALS = MPI_PREFIX + "HEALS"  # set: this MPI can recover after a death
SAMPLE_SECONDS = PREFIX + "SAMPLE_SECONDS"  # seconds between two metrics messages of a rank; 0: there are none
KEEP = PREFIX + "KEEP"  # set: a notebook may join later, and request the output printed meanwhile
REPORT_USE = PREFIX + "REPORT_USE"  # seconds between two reports that a rank was used
IPYTHON_PROFILE = PREFIX + "IPYTHON_PROFILE"  # the folder of the notebook's IPython profile
STAGE_DIR = PREFIX + "STAGE_DIR"  # target folder of %dist_stage, unless --to names one
