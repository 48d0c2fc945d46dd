"""Time limits and intervals: how long something may take before it fails, and how often something is checked.

One table, so that limits that depend on each other stand beside each other. All are seconds, but for names in _MS.
Does not cover: limits that the user sets, such as ``--start-timeout`` (``config.cluster``).
"""

from __future__ import annotations

# Starting and ending a cluster

QUIET_SECONDS = 0.2  # without a message from starting ranks, before the client checks whether it still has to wait
UNCHECKED_SECONDS = 1.0  # between two such checks while messages keep arriving
REPLY_SECONDS = 1.0  # for one of the nannies to reply before a reset; none waits for its rank
PROCESSES_POLL_SECONDS = 0.005  # between two checks whether processes have ended
PROCESSES_CHECK_SECONDS = 0.2  # between two checks of the processes of starting ranks
LOCAL_DYING_SECONDS = 0.5  # for a process to end, whose sockets close before its end is visible
BIRTH_SECONDS = 2.0  # by which the start time of a process may differ, as the clock may have been set
COMMAND_GRACE_SECONDS = 5.0  # for a command to end after SIGTERM
VERSION_SECONDS = 20.0  # for mpiexec --version
KILL_SECONDS = 5.0  # between SIGTERM and SIGKILL to processes of a cluster
START_END_SECONDS = 6.0  # for ranks to end by themselves at a shutdown
CLUSTER_END_SECONDS = 6.0  # for a rank to end and its nanny to report it; the nanny kills it after 3 s
REMOVAL_SECONDS = 5.0  # for folders to be removed, into which ending processes may still write
FOLDERS_STALE_SECONDS = 600.0  # since the last write to a folder; a younger one may be of a cluster that is starting
RANK_SESSIONS_END_SECONDS = 2.0  # for what ends by itself once the other processes of a session have
RANK_SESSIONS_CHECK_SECONDS = 0.02  # between two checks of that

# Attaching to a cluster and observing it

ATTACH_REPEAT_SECONDS = 0.02  # between two requests to nannies to publish, until the subscription is active
ATTACH_ANSWER_SECONDS = 5.0  # for nannies to reply, which never wait for anything
BEGIN_SECONDS = 2.0  # for ranks to receive the last cells before a notebook detaches
RANK_SECONDS = 1.0  # for ranks to reply, which may hold the GIL; a later reply is taken as well
OBSERVER_ANSWER_SECONDS = 1.0  # for ranks to reply to a client without the lease
JOB_FILE_CONNECT_SECONDS = 3.0  # to find out whether a job's controller can be reached
JOB_MEET_SECONDS = 60.0  # for all ranks of a job to connect
TUNNEL_ANSWER_SECONDS = 20.0  # for the remote shell of a tunnel to reply
GREETING_SECONDS = 10.0  # for the controller to send its greeting through a tunnel
TUNNEL_END_SECONDS = 3.0  # for ssh to send what is left
FILE_SECONDS = 60.0  # for the job's file to be read, the login included, which a gateway may slow down
TUNNEL_DYING_SECONDS = 0.5  # for ssh to end, whose sockets close before its end is visible
TUNNEL_BEAT_SECONDS = 5.0  # between two heartbeats of a notebook that holds a job
TUNNEL_STALE_SECONDS = 30  # without one: a notebook that lost its network must not block another

# Cells and interrupts in the client

# Between the two interrupts of a cell that has exceeded its timeout, and before it is given up.
INTERRUPT_GRACE_SECONDS = 5.0
INTERRUPT_WAKE_SECONDS = (0.02, 0.1, 0.5, 2.0)  # between attempts to wake a rank whose Python has not handled SIGINT
SPACE_SECONDS = 0.1  # between two interrupts: a rank takes closer ones for one, or loses the traceback of the first
LAST_SECONDS = 1.0  # for ranks to end after the third interrupt, before the prompt returns without them
# The same after the first interrupt: an import or a call in C code ends before Python sees a signal.
GIVE_UP_SECONDS = 5.0
DEAF_SECONDS = 1.0  # since deferred interrupts were checked, before a further one is raised at once
CLUSTER_NANNY_SECONDS = 2.0  # for nannies to confirm that they have passed an interrupt on
DEBUGGER_TURN_SECONDS = 0.5  # for a debugger to ask again after a command, before that of another rank asks
FIRST_QUESTION_SECONDS = 0.2  # for other ranks to ask too, so that the lowest rank asks first
INTERRUPTED_QUESTION_SECONDS = 2.0  # for an interrupt to end a question, before it is asked again
PAUSE_SECONDS = 0.3  # for a rank to stop in the debugger, before the call that it is in is shown
DEBUGPY_SECONDS = 10.0  # for debugpy to begin or end to debug the notebook's process
DEBUGPY_PAUSE_SECONDS = 1.0  # between two clients of debugpy, for the connection of the first to be closed
DEBUG_EVENTS_SECONDS = 0.1  # for the reply to "continue" to arrive before the events that follow
DEBUG_REFRESH_SECONDS = 0.2  # for more ranks to stop before the front end reads the frames of all again
DEBUG_NOTICE_SECONDS = 30.0  # for the client to notice that a rank has stopped; else the client is gone
DEBUG_REPLY_SECONDS = 5.0  # for a rank to reply to the debugger; an expression may call a collective
CELL_RUN_SETTLE_SECONDS = 120.0  # for the session to recover before the prompt returns
SETTLE_CHECK_SECONDS = 0.1  # between two checks of that
CLUSTER_SETTLE_SECONDS = 60.0  # for the session to recover before a cell is sent; a new process imports torch meanwhile
GLANCE_SECONDS = 0.15  # for ranks to report what they do before an interrupt ends it
LONG_SECONDS = 1.0  # in one collective, before it is reported with an interrupt
HANG_PATIENCE_SECONDS = 1.0  # for a rank to report its stack; its control thread may wait for the GIL
OUTSIDE_SECONDS = 0.3  # for nannies to report the stack of a rank that does not reply

# Completion and inspection

COMPLETION_SECONDS = 0.3  # for a rank to reply, whose user's code may hold the GIL; later the user has typed on
OTHER_NAMES_SECONDS = 0.05  # since then, for the other ranks to list their names
COMPLETION_FILES_SECONDS = 0.15  # for a rank to list a folder; a file system may not respond
VARIABLES_SECONDS = 3.0  # for ranks to describe all their variables

# Recovery in the client

INTERRUPT_SECONDS = 0.1  # for ranks in Python code to end their cell, before the others are checked
RECOVERY_CHECK_SECONDS = 0.25  # between two checks of ranks that should end
BLIND_SECONDS = 10.0  # from the last interrupt, before ranks are released that are not seen to wait
CALM_SECONDS = 3.0  # between two checks of ranks that run undisturbed
RECOVERY_MEET_SECONDS = 1.0  # from seeing one rank wait to checking the others
MPI_SECONDS = 2.0  # after the first interrupt of a call of MPI that does not end, before a third one replaces the rank
MPI_LAST_SECONDS = 0.5  # the same after the latest interrupt
SUPERVISOR_FORM_SECONDS = 120.0  # for the process group to be formed again after cells have ended it
RELEASE_SECONDS = 15.0  # for ranks to leave a group that is being formed, before they are replaced
RESPAWN_SECONDS = 5.0  # for living ranks to start a process within the MPI job; more on a busy or slow machine
ASLEEP_SECONDS = 2.0  # without CPU time of a new process in MPI_Init, where it works or, waiting for ranks, spins

# Connections and hosts

TICK_SECONDS = 0.25  # between two ticks of the client's thread
LINK_TURN_SECONDS = 0.05  # for the messages of one socket, before it is the turn of the others
HEARTBEAT_MS = 500  # between two heartbeats, at which ipyparallel's own clients learn of a rank
RANK_CHECK_MS = 200  # between two checks of a controller whether there are ranks
OWNER_SECONDS = 0.2  # between two checks whether the owner runs, where the system cannot report its end
CLOSED_SECONDS = 0.5  # without a connection once the hub lists no rank; one that failed is connected again at once
UNANSWERED_SECONDS = 5.0  # the same while the hub still counts on ranks
# Without a heartbeat: what holds the connections then is a process that a rank has forked.
ORPHANED_SECONDS = 600.0
SSH_CONNECT_SECONDS = 10  # ssh's ConnectTimeout
SURVEY_CONNECT_SECONDS = 8  # for ssh to reach one address of a host; it may try two before the time limit
SURVEY_END_SECONDS = 1.0  # for ssh to end by itself after the probe of a host
MOST_CLOCK_SECONDS = 5.0  # by which the clocks of two hosts may differ
LOST_SECONDS = 5.6  # without a reply from a host, before it counts as lost
HOST_WATCH_LATE_SECONDS = 2.0  # by which the last replies of hosts that are cut off together may differ
ASK_SECONDS = 0.5  # between two requests to a host that replies; a silent one gets a request at each turn
HOST_WATCH_SILENT_SECONDS = 2.0  # without a reply from a host, before its return is reported
# Since a nanny was seen to have ended, before that counts as its rank's death: its last message may come.
GONE_SECONDS = 3.5
FORGET_SECONDS = 2 * LOST_SECONDS  # after which a reply is not waited for any more: a lost host never replies

# Slurm

WAIT_SECONDS = 300  # for which a job waits for its notebook, which probes the nodes
UNSEEN_SECONDS = 30  # the same for a job that does not see the notebook's files, which the notebook detects meanwhile
JOB_PLACEMENT_ANSWER_SECONDS = 60.0  # for a node to reply; a job step may wait for the site's prolog
# For Slurm to report a job's state: reports of a death and the end of a cluster wait for it.
COMMANDS_STATE_SECONDS = 10.0
COMMAND_SECONDS = 60.0  # for other commands of Slurm; slurmctld of a busy site replies late
FIRST_POLL_SECONDS = 0.2  # between the first two checks of a job's state
SLOWEST_POLL_SECONDS = 5.0  # the longest time between two
CANCEL_SECONDS = 15.0  # until the nodes of a cancelled job are free; Slurm continues by itself if it takes longer
JOB_WATCH_TURN_SECONDS = 1.0  # between two checks whether it is time to ask Slurm
JOB_WATCH_LATE_SECONDS = 0.3  # by which Slurm may learn of the end of a job later than of that of its ranks
ENDING_SECONDS = 60.0  # for a job in state COMPLETING to be over
WARN_AT_SECONDS = (600.0, 300.0, 60.0)  # before a job's time limit
WATCH_POLL_SECONDS = 5.0  # between two checks of a running job's state
HURRIED_POLL_SECONDS = 0.25  # the same while a user waits for a change
SILENCE_SECONDS = 120.0  # without a reply from Slurm, before that is reported
SLACK_SECONDS = 5.0  # by which Slurm may move the end of a job although its limit is unchanged

# Start and end of ranks

WARM_LISTEN_SECONDS = 20.0  # for a new warm process to listen, before it imports anything
WARM_RETRY_SECONDS = 0.005  # between two attempts to connect to it
WARM_REQUEST_SECONDS = 5.0  # for the rest of a request to a warm process
WARM_IDLE_SECONDS = 15.0  # without a rank, before a warm process ends; a reset or the next start uses it again
CONNECTION_CONNECT_SECONDS = 0.25  # for one attempt to connect to a host that may be cut off
RETRY_SECONDS = 0.02  # between two attempts
REACH_SECONDS = 5.0  # for all attempts over a network that should work
FIRST_PAUSE_SECONDS = 0.05  # between the first two hellos; each further pause is twice as long
LONGEST_PAUSE_SECONDS = 1.0  # the longest of these pauses
# From an acknowledgement to the next hello: the client that sent it may end, and another connect.
HELLOS_REPEAT_SECONDS = 5.0
NANNY_REPEAT_SECONDS = 10.0  # for the client to subscribe, when a rank ends while it starts
JOIN_SECONDS = 120.0  # until rank 0 of a job has written the connection file (--join-timeout)
JOIN_POLL_SECONDS = 0.02  # between two checks for the files of a job's controller
CONTROLLER_SECONDS = 60.0  # for the controller of a job to start
OTHERS_SECONDS = 5.0  # for an earlier job's cluster to end
# Between two checks of a nanny for the controller: ZeroMQ does not always report a closed connection.
CLUSTER_WATCH_POLL_SECONDS = 2.0
EARLY_POLL_SECONDS = 0.5  # the same while ranks start: a start that is given up only removes a file
CLUSTER_WATCH_GRACE_SECONDS = 2.0  # without a controller, before a nanny ends its rank
CUT_SECONDS = 30.0  # the same over a network, which may recover
KILL_GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL to a rank
FINALIZE_SECONDS = 2.7  # for MPI's end after a rank was asked to end; less than KILL_GRACE_SECONDS
# For atexit functions, threads and files at the end of a rank; less than KILL_GRACE_SECONDS.
RANK_EXIT_END_SECONDS = 2.0
THREADS_SECONDS = 1.5  # of these, for threads that may never end
HOST_PARENT_END_SECONDS = 4  # for nannies to end, which give their ranks 3 s; ipyparallel kills their parent after 5 s
WIRE_END_SECONDS = 5.0  # for the operating system to end a process whose nanny has died
# For the nanny to read the other pipe, so that nothing overtakes; it may be busy with a flood.
WIRE_PATIENCE_SECONDS = 0.2

# Cells, interrupts and process groups on ranks

NAP_SECONDS = 0.0005  # of sleep while a rank prints: otherwise each line would wake its nanny, at the cost of the rank
GATHER_SECONDS = 0.02  # for which printed text is collected into one message
COUNT_SECONDS = 1.0  # between two readings of the kernel's count of out-of-memory kills
STACK_SECONDS = 0.1  # for a rank to write its stack on a signal; a stopped process never does
REPORT_ERROR_SECONDS = 2.0  # for an error to be sent, before an interrupt may cut that off
LEAST_SECONDS = 0.1  # without Python code, before the main thread counts as stuck in C code
CUT_AFTER_SECONDS = 10.0  # from the first interrupt; only then a further one may cut off the import of a library
LONGEST_SECONDS = 2.0  # for other code that should not be cut off: what takes longer hangs, and is interrupted
DEFERRED_IMPORT_POLL_SECONDS = 1.0  # between two checks whether an import has ended whose end was not seen
# Between two checks whether a shell command has ended, whose children may still hold the terminal.
COMMANDS_POLL_SECONDS = 0.05
COMMANDS_GRACE_SECONDS = 0.3  # for an interrupted shell command to end
PROGRAM_SECONDS = 0.3  # for an interrupted program to end
KEPT_SECONDS = 1.0  # that an ended group is kept: much longer than a thread waits for the GIL
SETTLED_SECONDS = 0.1  # of waiting after all connections have closed, before a wait in Gloo counts as forgotten
GLOO_WAITS_POLL_SECONDS = 0.02  # between two checks of that
FLIGHT_RECORDER_LIMIT_SECONDS = 0.5  # for NCCL's flight record, on a thread that serves other requests
ABORT_SECONDS = 5.0  # for groups to be aborted on a GPU, before the process ends and the rank is replaced
INITIALIZATION_SECONDS = 0.3  # in one call after an abort, before a communicator's initialization is ended
MPI_WORLD_LIMIT_SECONDS = 5.0  # for a step of recovery in MPI that all ranks take together
HELP_SECONDS = 1.0  # that a rank outside MPI helps others to be released
HELP_PAUSE_SECONDS = 0.001  # between two such attempts
RECEIVE_SECONDS = 0.2  # for sends without a receiver to be received

# Telemetry

LONGEST_UNREPORTED_SECONDS = 30.0  # between two reports that a rank was used
FIGURES_SECONDS = 1.0  # between two samples of a rank of a job
SAMPLER_POLL_SECONDS = 0.25  # between two samples of the main thread while a cell runs
IDLE_SECONDS = 0.5  # the same while none runs
# In one collective, before the state of a rank shows it: a training loop is in one much of the time.
WAITING_SECONDS = 0.3
VITALS_SILENT_SECONDS = 3.0  # without a heartbeat, before a rank is reported as not responding
SHORTEST_LOOP_SECONDS = 5.0  # whose progress is reported: of a shorter one, what is shown is over when it is read
SHORTEST_PART_SECONDS = 0.5  # of it, before its duration is estimated
LOOP_SECONDS = 0.3  # between two checks whether the loop of a cell has advanced
NO_LOOP_SECONDS = 0.5  # the same while none runs
SEND_SECONDS = 0.2  # between two messages with metrics of a rank
METRICS_END_SECONDS = 0.2  # at the end of a cell, for metrics that are still being copied from a device
RATE_SECONDS = 5.0  # over which rates are averaged
STRAGGLER_SECONDS = 15.0  # over which ranks are compared to find slow ones
CLUSTERS_POLL_SECONDS = 1.0  # between two checks of the server for clusters that have started or ended
LIVE_RECEIVE_SECONDS = 2.0  # for the process that holds the cluster to receive a request: later it ignores it
ACKNOWLEDGE_SECONDS = 0.5  # for its acknowledgement
LIVE_NANNY_SECONDS = 1.0  # for a nanny to pass that request on
VIEW_STATE_SECONDS = 0.5  # between two checks of the widget and of the server for the ranks' states
CHANGE_SECONDS = 0.2  # between two checks whether a loop has advanced, and between two messages with metrics
WIDGET_METRIC_SECONDS = 0.1  # the latter for the widget, while there are metrics

# Other features

FORWARD_SECONDS = 20.0  # for ssh to forward an address to the notebook's machine
STAGE_SENDER_CONNECT_SECONDS = 3.0  # for the first node to accept a connection
STAGE_SENDER_END_SECONDS = 5.0  # for the thread that sends a data set, and ssh, to end
STAGING_POLL_SECONDS = 0.25  # between two requests how far the nodes are
LINGER_MS = 1_000  # for the last messages between nodes
GREET_SECONDS = 20.0  # for the node after to be reached
PIPELINE_CUT_SECONDS = 5.0  # for the client to end this node, after the connection to the next one has ended
PIPELINE_POLL_SECONDS = 0.1  # between two checks whether to stop
STAGING_END_SECONDS = 5.0  # for the threads to end after they were asked to
LEFT_SECONDS = 24 * 3600.0  # before an unfinished, unchanged version of another session's checkpoint is abandoned
HOROVOD_START_SECONDS = 30.0  # for all ranks to start Horovod, which a new process imports first
PROGRAM_WHERE_SECONDS = 0.6  # for a program to reply what it is doing; one that holds the GIL never does
PROGRAMS_POLL_SECONDS = 0.02  # between two checks of a program that the rank has started itself, or of its MPI job
MPI_JOB_SECONDS = 0.5  # between two checks whether a script's MPI job, or its cell, has ended
MPI_CONNECT_SECONDS = 20.0  # for a process of mpiexec to connect to its rank
PROGRAMS_GRACE_SECONDS = 3.0  # for an interrupted program of %dist_run to end, and again after SIGTERM

# jupyter disttrain doctor and gpu-check

TIMEOUT_SECONDS = 60.0  # for a command of the doctor
MPIEXEC_TIMEOUT_SECONDS = 30.0  # for a small program under mpiexec
CELL_TIMEOUT_SECONDS = 60.0  # for the doctor's cell
GPU_BENCH_LIMIT_SECONDS = 60.0  # for any event of gpu-check
FREED_SECONDS = 20.0  # after the grace period, for waiting ranks to be released
LONE_SECONDS = 25.0  # for a rank that forms a group alone to be released or replaced
GPU_CHECKS_FORM_SECONDS = 45.0  # for the group to be formed after a death during that
