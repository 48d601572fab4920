"""Variables that launchers set and role makers read: their names, who sets them, and what they mean.

The role makers parse them, each in a file of its own. Here is what the page of variables says, and what
``fleet.base.unknown_variables`` knows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """Describes one variable, or several that belong together: the names on the page, who sets or needs them, what they
    mean."""

    names: str
    whose: str
    meaning: str

    @property
    def variables(self) -> list[str]:
        return re.findall(r"\b[A-Z][A-Z0-9_]+\b", self.names)


#: Read by ``fleet/role_maker/variables_of_launchers.py``.
CLUSTER = (
    Row("PADDLE_TRAINING_ROLE or TRAINING_ROLE", "every process", "`PSERVER` or `TRAINER`, in capitals"),
    Row(
        *("PADDLE_PSERVERS_IP_PORT_LIST", "every process, this or the next"),
        "all servers, `host:port,host:port,…`, in the same order everywhere",
    ),
    Row(
        *("PADDLE_PSERVER_IPS or PADDLE_PSERVERS", ""),
        "all servers' hosts, each with a port of its own or the common one",
    ),
    Row("PADDLE_PSERVER_PORT or PADDLE_PORT", "", "the common port; 6174 if unset"),
    Row(
        *("PADDLE_TRAINERS or PADDLE_TRAINERS_NUM", "every process, this or the next"),
        "how many workers the job has; paddle-operator puts the hosts of `PADDLE_TRAINER_ENDPOINTS` into the first",
    ),
    Row(
        *("PADDLE_TRAINER_ENDPOINTS", ""),
        "all workers, `host:port,…`; their number is the number of workers",
    ),
    Row("PADDLE_TRAINER_IPS, with the common port", "", "in a collective job, all workers' hosts"),
    Row("PADDLE_TRAINER_ID", "workers", "which worker this is, from 0"),
    Row(
        *("PADDLE_CURRENT_ENDPOINT", "servers, one of these three"),
        "which server this is, as its endpoint in the list",
    ),
    Row("PADDLE_PSERVER_ID", "", "which server this is, from 0"),
    Row("PADDLE_CURRENT_IP or POD_IP, with the common port", "", "which server this is, as its host"),
)

#: Read by ``fleet/role_maker/torchrun.py``.
TORCHRUN = (
    Row("RANK, WORLD_SIZE", "torchrun", "which worker this is, of how many. Both are there: this is a job by torchrun"),
    Row("LOCAL_RANK", "torchrun", "which of its machine's workers it is"),
    Row("MASTER_ADDR, MASTER_PORT", "torchrun", "where the job's store is"),
    Row("TORCHELASTIC_USE_AGENT_STORE", "torchrun", "`True`: the launcher hosts the store, and not the first worker"),
    Row("TORCHELASTIC_RESTART_COUNT", "torchrun", "how often the job was started before"),
)

#: Read by ``fleet/bootstrap/mpi_world.py``.
MPI = (
    Row(
        *("OMPI_COMM_WORLD_SIZE", "Open MPI's launcher"),
        "a launcher is at work. The value must be the number of ranks that MPI then finds: otherwise launcher and "
        "library are of different MPIs",
    ),
    Row("PMI_SIZE", "MPICH's launcher, and others with its interface", "the same"),
    Row("PMIX_RANK", "launchers with PMIx, Open MPI's among them", "a launcher is at work"),
    Row(
        *("OMPI_COMM_WORLD_RANK, PMI_RANK", "as above"),
        "which rank this is, for messages from before MPI has started; `PMIX_RANK` if neither is there",
    ),
)

#: Read by ``fleet/role_maker/slurm.py``.
SLURM = (
    Row(
        *("SLURM_PROCID, SLURM_STEP_NUM_TASKS", "`srun`"),
        "which task this is, of how many. Both are there, and there are several tasks: this is a job by Slurm. In a "
        "collective job one is enough",
    ),
    Row(
        *("SLURM_STEP_NODELIST, SLURM_STEP_TASKS_PER_NODE", "`srun`"),
        "the nodes, `node[01-03,7]`, and how many tasks each has, `2(x3),1`; up to 32768",
    ),
    Row(
        *("SLURM_DISTRIBUTION, SLURM_DIST_PLANESIZE", "`srun`"),
        "how tasks were dealt to nodes: in blocks, unless it says `cyclic` or `plane`",
    ),
    Row("SLURM_NODEID", "`srun`", "on which node this task is, which has to agree with the above"),
    Row("SLURM_JOB_ID, SLURM_STEP_ID", "`srun`", "choose the servers' ports"),
    Row("FLEET_SLURM_SERVERS", "you", "how many tasks serve; half of them, rounded down, if unset"),
    Row("FLEET_SLURM_PORT", "you", "the first port of servers on each node"),
)


def names(rows: tuple[Row, ...]) -> set[str]:
    return {name for row in rows for name in row.variables}


#: Others of Paddle's own, which mean nothing here and are no misspelling.
OF_PADDLE = {
    *("PADDLE_MASTER", "PADDLE_NNODES", "PADDLE_SERVER_NUM", "PADDLE_TRAINER_NUM", "PADDLE_START_PORT"),
    *("PADDLE_SERVERS_ENDPOINTS", "PADDLE_TRAINERS_ENDPOINTS", "PADDLE_MAX_RESTART", "PADDLE_LOG_DIR"),
    *("PADDLE_ELASTIC_LEVEL", "PADDLE_ELASTIC_TIMEOUT", "PADDLE_ELASTIC_NP", "PADDLE_ELASTIC_SERVER"),
    *("PADDLE_WITH_GLOO", "PADDLE_GLOO_RENDEZVOUS", "PADDLE_GLOO_FS_PATH", "PADDLE_GLOO_FS_NAME", "PADDLE_GLOO_FS_UGI"),
    *("PADDLE_GLOO_HTTP_ENDPOINT", "PADDLE_IS_BARRIER_ALL_ROLE", "PADDLE_ENABLE_REMOTE_PREFETCH", "PADDLE_JOB_ID"),
    *("PADDLE_RANK_IN_NODE", "PADDLE_GLOBAL_RANK", "PADDLE_GLOBAL_SIZE", "PADDLE_LOCAL_RANK", "PADDLE_LOCAL_SIZE"),
    *("PADDLE_LOCAL_DEVICE_IDS", "PADDLE_WORLD_DEVICE_IDS", "PADDLE_CLUSTER_TRAIN", "PADDLE_IS_LOCAL"),
    *("PADDLE_COORDINATOR_ENDPOINTS", "PADDLE_COORDINATOR_ID", "PADDLE_HETER_TRAINER_ID", "PADDLE_INIT_TRAINER_ID"),
    *("PADDLE_INIT_PORT", "PADDLE_INIT_PSERVERS", "PADDLE_PSERVER_NUM", "PADDLE_TRAINER_COUNT"),
}
