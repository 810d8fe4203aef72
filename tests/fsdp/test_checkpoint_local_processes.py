"""Four hosts, each with its own disk: what one of them loses comes from its peer."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import shutil
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.checkpoint_managers as policies
import pytest
from helpers.damage import file_size_limited
from helpers.processes import run_processes
from jax.sharding import NamedSharding, PartitionSpec

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import _orbax_handler
from fsdp_jax.checkpoint._multihost import exchange
from fsdp_jax.checkpoint.local import _store

pytestmark = pytest.mark.distributed

PROCESSES = 4
LOST_SECS = 6  # After so long without an answer a process is given up.


def like(**sizes) -> fsdp.TrainState:
    """Every sort of leaf: split, padded, whole, a key; on any mesh."""
    mesh = fsdp.make_mesh(**sizes)
    num_shards = mesh.shape["dp_shard"]

    def leaf(shape, dtype, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    padded = (-13 % num_shards + 13, 5)
    params = {
        "rows": leaf((64, 32), jnp.float32, "dp_shard"),
        "columns": leaf((3, 16), jnp.bfloat16, None, "dp_shard"),
        "odd": fsdp.Padded(leaf(padded, jnp.float32, "dp_shard"), (13, 5)),
    }
    key = jax.eval_shape(lambda: jax.random.key(0)).dtype
    scalar = leaf((), jnp.int32)
    whole = {"scale": leaf((7,), jnp.float32)}
    return fsdp.TrainState(scalar, params, whole, {}, leaf((), key), scalar)


def value_of(name: str, shape: tuple[int, ...], dtype, step: int) -> np.ndarray:
    """Other numbers in each leaf and step."""
    if name in ("step", "num_skipped"):
        return np.asarray(step, dtype)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return np.random.default_rng([seed, step]).normal(size=shape).astype(dtype)


def state_at(step: int, **sizes) -> fsdp.TrainState:
    def make(name, leaf):
        if isinstance(leaf, fsdp.Padded):
            value = np.zeros(leaf.value.shape, leaf.dtype)
            inside = tuple(slice(size) for size in leaf.shape)
            value[inside] = value_of(name, leaf.shape, leaf.dtype, step)
            return fsdp.Padded(spread(value, leaf.value.sharding), leaf.shape)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            make_key = jax.jit(jax.random.key, out_shardings=leaf.sharding)
            return make_key(step)
        return spread(value_of(name, leaf.shape, leaf.dtype, step), leaf.sharding)

    named = fsdp.sharding.named_leaves(like(**sizes))
    treedef = jax.tree.structure(
        like(**sizes), is_leaf=lambda x: isinstance(x, fsdp.Padded)
    )
    return treedef.unflatten(make(name, leaf) for name, leaf in named)


def spread(value: np.ndarray, sharding) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding, lambda i: value[i])


def step_held(state: fsdp.TrainState | None, **sizes) -> int | None:
    """The step of a state, every bit of which is what belongs to that step."""
    if state is None:
        return None
    step = int(state.step)
    for got, want in zip(
        jax.tree.leaves(state), jax.tree.leaves(state_at(step, **sizes)), strict=True
    ):
        assert got.dtype == want.dtype and got.sharding == want.sharding
        if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        for a, b in zip(got.addressable_shards, want.addressable_shards, strict=True):
            assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
    return step


@dataclasses.dataclass
class Place:
    """Where a process stands in its data."""

    at: list[int]

    def get_state(self) -> list[int]:
        return self.at

    def set_state(self, at: list[int]) -> None:
        self.at = at


class Job:
    """One process of the job, and its disk."""

    def __init__(self, directory: str):
        self.rank = jax.process_index()
        self.run = Path(directory, "run")
        self.disk = Path(directory, "disks", str(self.rank))
        self.vocab = Path(directory, "text", str(self.rank), "vocab.txt")
        self.vocab.parent.mkdir(parents=True)
        self.vocab.write_text("a b c")
        self.log: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.log.append(record.getMessage())
        logging.getLogger("fsdp_jax").addHandler(handler)

    def open(self, **options) -> fsdp.Checkpointer:
        local = fsdp.checkpoint.LocalCheckpoints(self.disk, every=2, keep=2)
        return fsdp.Checkpointer(
            self.run,
            save_decision_policy=policies.FixedIntervalPolicy(5),
            local=options.pop("local", local),
            **options,
        )

    def outcome(self, action, *arguments, **options) -> dict:
        """What came of it: result or error, what the log says, seconds."""
        self.log.clear()
        start = time.monotonic()
        try:
            said = {"kind": "well", "result": action(*arguments, **options)}
        except Exception as error:
            said = {"kind": type(error).__name__, "result": str(error)}
        secs = time.monotonic() - start
        exchange(None)  # all are done, before the next begins
        return said | {"log": "\n".join(self.log), "secs": secs}

    def resume(self, *, places=False, **sizes) -> list:
        place = Place([])
        extras = {"place": fsdp.checkpoint.PerProcess(place)} if places else {}
        with self.open() as checkpointer:
            state = checkpointer.resume(like(**sizes), extras=extras)
            if state is not None:
                carried = checkpointer.files("vocab") / "vocab.txt"
                assert carried.read_text() == "a b c"
            said = [step_held(state, **sizes), checkpointer.metadata]
        return [*said, place.at] if places else said

    def save(self, *steps: int, extras=None, had=None, **sizes) -> list[bool]:
        with self.open() as checkpointer:
            checkpointer.resume(like(), extras=had)
            beside = {"extras": extras, "files": {"vocab": self.vocab}}
            return [
                checkpointer.save(
                    n, state_at(n, **sizes), metadata={"at": [n]}, **beside
                )
                for n in steps
            ]

    def files(self) -> dict[str, str]:
        """Digest of each file on the disk, by step and writer."""
        return {
            f"{path.parent.name.split('-')[0]}/{path.name}": hashlib.sha256(
                path.read_bytes()
            ).hexdigest()
            for path in self.disk.glob("*/*/*.*")
        }

    def lose(self, *ranks: int, folder: str = "") -> None:
        """The disks of some processes, or a step on them, are empty."""
        if self.rank in ranks:
            for path in self.disk.glob(f"*/{folder}-*" if folder else "*"):
                shutil.rmtree(path)
        exchange(None)


def scenario(directory: str) -> dict[str, dict]:
    """All that one process sees; by the end process 2 is killed."""
    job, seen = Job(directory), {}

    def see(what: str, action, *arguments, **options) -> None:
        seen[what] = job.outcome(action, *arguments, **options)

    see("first start", job.resume)
    see("save", job.save, *range(1, 7))
    see("files", job.files)
    job.lose(2, 3, folder="6")
    see("lost 6 of 2 and 3", job.resume)
    if job.rank == 0:
        shutil.rmtree(job.run / "5")
    see("lost 6 of 2 and 3, and the persistent step", job.resume)
    see("save again", job.save, 8)
    see("files of 8", job.files)
    job.lose(1)
    see("lost 1", job.resume)
    job.lose(0, 3)
    see("lost 0 and 3", job.resume)
    see("files restored", job.files)
    see("flipped", flipped, job)
    see("no room", no_room, job)
    see("files after no room", job.files)
    place = {"place": fsdp.checkpoint.PerProcess(Place([job.rank, 14]))}
    see("save after no room", job.save, 14, extras=place)
    job.lose(3)
    see("replicas", job.resume, dp_outer=2, places=True)
    see("save replicas", job.save, 16, had=place, dp_outer=2)
    job.lose(0, 1)
    see("lost one of two replicas", job.resume)
    see("other like", other_abstract_tree, job)
    see("one directory", one_directory, job, directory)
    see("hangs", interrupted_save, job, 18, 3, signal.SIGSTOP)
    seen["killed"] = interrupted_save(job, 22, 2, signal.SIGKILL)
    return seen


def flipped(job: Job) -> list:
    """The last bit of the file of process 3, in its own directory, is wrong."""
    if job.rank == 3:
        (path,) = job.disk.glob("*/8-*/3.shards")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    return job.resume()


def no_room(job: Job) -> str:
    """Process 2 cannot write step 12."""
    with job.open() as checkpointer:
        checkpointer.resume(like())
        limit = file_size_limited(1000)
        with limit if job.rank == 2 else contextlib.nullcontext():
            checkpointer.save(12, state_at(12))
            with pytest.raises(RuntimeError) as failed:
                checkpointer.wait()
    return str(failed.value)


def other_abstract_tree(job: Job) -> None:
    with job.open() as checkpointer:
        checkpointer.resume({"step": like().step, "w": like().step})


def one_directory(job: Job, directory: str) -> None:
    job.open(
        local=fsdp.checkpoint.LocalCheckpoints(
            Path(directory, "shared"), every=1, replication_groups=[(0, 1), (2, 3)]
        )
    )


def interrupted_save(job: Job, step: int, rank: int, number: int) -> list:
    """A process gets a signal before it writes the copy of its peer's shards.

    One that is stopped goes on when all others have given it up.
    """
    given_up = job.run.parent / "given up"
    given_up.mkdir(exist_ok=True)
    pid = exchange(os.getpid())[rank]
    interrupted = interrupted_copies(number) if job.rank == rank else None
    with job.open(timeout_secs=LOST_SECS) as checkpointer:
        checkpointer.resume(like())
        with interrupted or contextlib.nullcontext():
            checkpointer.save(step, state_at(step))
            if interrupted:  # waiting would count the time in which it is stopped
                until_given_up(given_up)
            start = time.monotonic()
            try:
                checkpointer.wait()
                said = ["well", ""]
            except Exception as error:
                said = [type(error).__name__, str(error)]
        secs = time.monotonic() - start
    (given_up / f"{step} {job.rank}").touch()
    if number == signal.SIGSTOP and job.rank == 0:
        until_given_up(given_up)
        os.kill(pid, signal.SIGCONT)
    return [*said, secs]


def until_given_up(directory: Path) -> None:
    """Returns when all processes but one have said there that they wait no more."""
    while len(list(directory.iterdir())) < PROCESSES - 1:
        time.sleep(0.01)


@contextlib.contextmanager
def interrupted_copies(number: int):
    """This process gets the signal when it begins to write what a peer sent it."""
    write = _store._write

    def interrupted(path, writer, content):
        if writer != jax.process_index():
            os.kill(os.getpid(), number)
        write(path, writer, content)

    _store._write = interrupted
    try:
        yield
    finally:
        _store._write = write


def hangs_in_a_persistent_save(directory: str) -> list:
    """Process 1 wrote its part, and does not say so until it is given up."""
    given_up, publish = Path(directory, "given up"), _orbax_handler.publish

    def publish_late(*arguments):
        while not given_up.exists():
            time.sleep(0.01)
        publish(*arguments)

    with fsdp.Checkpointer(directory, timeout_secs=LOST_SECS) as checkpointer:
        if jax.process_index() == 1:
            _orbax_handler.publish = publish_late
        checkpointer.save(1, state_at(1))
        start = time.monotonic()
        with pytest.raises(RuntimeError) as failed:
            checkpointer.wait()
        secs = time.monotonic() - start
        given_up.touch()
        exchange(None)
        _orbax_handler.publish = publish
        checkpointer.save(2, state_at(2))
    return [str(failed.value), secs]


def test_a_process_that_hangs_in_a_persistent_save_is_named_in_time(tmp_path):
    for message, secs in run_processes(
        hangs_in_a_persistent_save, 2, str(tmp_path), devices=4
    ):
        assert "Step 1 is not saved" in message and secs < 4 * LOST_SECS
        assert "timed out task names:\n1\n" in message
    assert fsdp.latest_step(tmp_path) == 2  # and the next is saved
    assert step_held(fsdp.load(tmp_path, like())) == 2


def one_goes_back_late(directory: str) -> list[str]:
    """Two processes of one disk go back to step 1; the second is late to do so."""
    together = _store.together

    @contextlib.contextmanager
    def late(what, timeout_secs):
        with together(what, timeout_secs):
            if jax.process_index() == 1:
                time.sleep(1)
            yield

    disk = Path(directory, "disk")
    options = {"local": fsdp.checkpoint.LocalCheckpoints(disk, every=1, keep=3)}
    options["save_decision_policy"] = policies.FixedIntervalPolicy(100)
    for after, steps in ((None, (1, 2, 3)), (1, (2,))):
        with fsdp.Checkpointer(Path(directory, "run"), **options) as checkpointer:
            checkpointer.resume(like(), step=after)
            _store.together = together if after is None else late
            for step in steps:
                checkpointer.save(step, state_at(step))
    _store.together = together
    return sorted(path.name for path in disk.glob("*/*-*"))


def test_steps_set_aside_stay_where_two_processes_have_one_disk(tmp_path):
    there, _ = run_processes(one_goes_back_late, 2, str(tmp_path), devices=4)
    kinds = [(name.split("-")[0], name.endswith(".abandoned")) for name in there]
    assert sorted(kinds) == [("1", False), ("2", False), ("2", True), ("3", True)]


def killed_in_a_persistent_save(directory: str) -> list:
    """Process 1 is killed after it wrote its part, before it says so."""
    with fsdp.Checkpointer(directory, timeout_secs=LOST_SECS) as checkpointer:
        checkpointer.save(1, state_at(1))
        checkpointer.wait()
        begun = Path(directory, "begun")
        if jax.process_index() == 1:
            _orbax_handler.publish = lambda *_: killed_after(begun)
        checkpointer.save(2, state_at(2))
        begun.touch()
        start = time.monotonic()
        with pytest.raises(RuntimeError) as failed:
            checkpointer.wait()
        return [str(failed.value), time.monotonic() - start]


def killed_after(begun: Path) -> None:
    while not begun.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_in_a_persistent_save_is_named_in_time(tmp_path):
    said, _ = run_processes(
        killed_in_a_persistent_save, 2, str(tmp_path), killed=[1], devices=4
    )
    message, secs = said
    assert "Step 2 is not saved" in message and secs < 60
    assert "timed out task names:\n1\n" in message
    assert fsdp.latest_step(tmp_path) == 1
    assert step_held(fsdp.load(tmp_path, like())) == 1
    fsdp.save(tmp_path, state_at(2))  # what is left is not in the way


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def seen(directory) -> list[dict[str, dict]]:
    return run_processes(scenario, PROCESSES, str(directory), killed=[2])


def results(seen, what: str) -> list:
    """What each process that is left got."""
    alive = [process[what] for process in seen if process is not None]
    assert [one["kind"] for one in alive] == ["well"] * len(alive), alive
    return [one["result"] for one in alive]


def log(seen, what: str) -> str:
    return "\n".join(p[what]["log"] for p in seen if p is not None)


def held(seen, what: str, step: int | None) -> bool:
    """Whether all have that step, bit for bit, and what was saved with it."""
    metadata = None if step is None else {"at": [step]}
    return results(seen, what) == [[step, metadata]] * 3


def test_the_newest_of_local_and_persistent_steps_wins(seen):
    assert held(seen, "first start", None)
    assert results(seen, "save") == [[False, True, False, True, True, True]] * 3
    assert held(seen, "lost 1", 8)  # local, and 5 is not
    assert held(seen, "lost 6 of 2 and 3", 5)  # persistent, and 4 is local


def test_each_host_keeps_its_own_shards_and_those_of_its_peer_byte_for_byte(seen):
    first, second, fourth = results(seen, "files")
    assert first == second
    writers = ["0.shards", "1.shards"]
    assert sorted(first) == [f"{step}/{name}" for step in (4, 6) for name in writers]
    assert sorted(fourth) == [f"{n}/{s}.shards" for n in (4, 6) for s in (2, 3)]


def test_a_lost_host_gets_its_shards_from_its_peer_bit_for_bit(seen):
    assert held(seen, "lost 1", 8)
    assert "1.shards' was restored from process 0" in seen[1]["lost 1"]["log"]
    assert held(seen, "lost 0 and 3", 8)  # and 0 gets its own from the restored 1


def test_a_lost_host_is_a_peer_again_at_once(seen):
    def of_step_8(what):
        return [
            {name: digest for name, digest in files.items() if name.startswith("8/")}
            for files in results(seen, what)
        ]

    assert of_step_8("files restored") == of_step_8("files of 8")


def test_a_flipped_bit_in_a_shard_is_noticed_and_the_copy_of_the_peer_taken(seen):
    assert held(seen, "flipped", 8)
    said = seen[3]["flipped"]["log"]
    damage = "1 shard(s): files/vocab/vocab.txt[[0, 5]]"
    assert f"3.shards' is not as it was written: {damage}" in said
    assert "3.shards' was restored from process 2" in said


def test_two_lost_hosts_of_a_clique_are_named_and_the_next_older_step_is_taken(seen):
    assert held(seen, "lost 6 of 2 and 3", 5)
    said = log(seen, "lost 6 of 2 and 3")
    assert (
        "Local step 6 is not complete: of 4 processes' shards no copy is left" in said
    )
    assert "of those of process 2, kept by 2 (" in said and ") and 3 (" in said
    assert held(seen, "lost 6 of 2 and 3, and the persistent step", 4)


def test_a_full_disk_leaves_the_last_step_and_nothing_else(seen):
    for said in results(seen, "no room"):
        assert "Local step 12 is not saved: " in said and "File too large" in said
    for files in results(seen, "files after no room"):
        assert {name.split("/")[0] for name in files} == {"8"}
    assert results(seen, "save after no room") == [[True]] * 3


def test_another_mesh_fills_itself_from_the_shards_of_all_hosts(seen):
    for step, metadata, _ in results(seen, "replicas"):
        assert step == 14 and metadata == {"at": [14]}
    assert "restored from process" in log(seen, "replicas")


def test_each_process_gets_the_objects_that_it_had_of_its_own(seen):
    # Process 3 had lost its disk.
    places = [place for _, _, place in results(seen, "replicas")]
    assert places == [[0, 14], [1, 14], [3, 14]]


def test_where_there_are_replicas_a_replication_group_may_be_lost(seen):
    assert held(seen, "lost one of two replicas", 16)


def test_an_abstract_tree_that_does_not_fit_is_refused_in_all(seen):
    for process in (seen[rank]["other like"] for rank in (0, 1, 3)):
        assert process["kind"] == "ValueError"
        assert "only in the checkpoint: params.rows" in process["result"]
        assert "not in the checkpoint: w" in process["result"]


def test_copies_beside_what_they_are_copies_of_are_refused(seen):
    for process in (seen[rank]["one directory"] for rank in (0, 1, 3)):
        assert process["kind"] == "ValueError"
        assert "would lose it together: 0, 1; 2, 3" in process["result"]


def test_a_process_that_hangs_while_it_saves_is_named_in_time(seen):
    said = results(seen, "hangs")
    for kind, message, secs in said[:2]:
        assert kind == "LostProcessError" and secs < 2 * LOST_SECS
        assert "1 of 4 processes did not answer" in message and ": 3." in message
    assert said[2][0] == "well"


def test_a_process_that_is_killed_while_it_saves_is_named_in_time(seen):
    for kind, message, secs in (seen[rank]["killed"] for rank in (0, 1, 3)):
        assert kind == "LostProcessError" and secs < 60
        assert "1 of 4 processes did not answer" in message and ": 2." in message


@pytest.mark.parametrize(
    "left, step",
    [
        ([0, 1, 3], 22),  # what process 2 was to write, 3 has
        ([0, 3], 22),  # one of each group
        ([2, 3], 16),  # one of two replicas
        ([0, 1], None),
    ],
)
def test_what_a_killed_process_left_is_loaded_by_whoever_has_enough_of_it(
    seen, directory, tmp_path, left, step
):
    """Here by one process, which has the disks of those that are left."""
    for rank in left:
        shutil.copytree(directory / "disks" / str(rank), tmp_path, dirs_exist_ok=True)
    local = fsdp.checkpoint.LocalCheckpoints(tmp_path, every=2)
    with fsdp.Checkpointer(directory / "run", local=local) as checkpointer:
        assert step_held(checkpointer.resume(like())) == step
