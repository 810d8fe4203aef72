"""Multi-process jobs: their start, and their end when a process fails."""

from fsdp_jax.launch._elastic_config import ElasticConfig as ElasticConfig
from fsdp_jax.launch._elastic_processes import ElasticProcesses as ElasticProcesses
from fsdp_jax.launch._generation import Generation as Generation
from fsdp_jax.launch._generation import generation as generation
from fsdp_jax.launch._initialize import Job as Job
from fsdp_jax.launch._initialize import fail as fail
from fsdp_jax.launch._initialize import initialize as initialize
from fsdp_jax.launch._processes import Processes as Processes
from fsdp_jax.launch._progress import report_progress as report_progress
from fsdp_jax.launch._timeouts import Timeouts as Timeouts
