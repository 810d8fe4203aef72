"""When a job starts, whom it awaits, and why it ends: time and messages are given."""

from __future__ import annotations

import pytest
from helpers.errors import facts

from fsdp_jax.launch._coordinator_state import CoordinatorState
from fsdp_jax.launch._handshake import Handshake, as_facts
from fsdp_jax.launch._timeouts import Timeouts

PATIENCE = Timeouts(
    start_secs=100, silent_secs=20, report_secs=30, stall_secs=200, left_secs=40
)


class Job:
    """A state, and what each process was sent."""

    def __init__(self, num_processes: int = 3):
        self.reports: list[str] = []
        self.state = CoordinatorState(
            num_processes, PATIENCE, self.reports.append, now=0.0
        )
        self.sent: list[list[dict]] = []
        self.members = []

    def come(self, rank: int, *, of: int = 3, at: float = 0.0, **facts: str) -> None:
        inbox: list[dict] = []
        handshake = Handshake(
            rank, of, f"host{rank}", 100 + rank, 5000 * (rank == 0), facts
        )
        self.sent.append(inbox)
        self.members.append(self.state.admit(handshake, inbox.append, at))

    def say(self, rank: int, at: float, **message) -> None:
        self.state.handle_message(self.members[rank], message, at)

    def told(self) -> list[dict]:
        """The last message of each."""
        return [inbox[-1] if inbox else {} for inbox in self.sent]


def started() -> Job:
    job = Job()
    for rank in range(3):
        job.come(rank)
    return job


def test_the_job_starts_when_the_last_has_come():
    job = Job()
    job.come(1)
    job.come(0)
    assert job.told() == [{}, {}]
    job.come(2)
    welcome = {"service": 5000, "beat_secs": PATIENCE.beat_secs}
    assert job.told() == [welcome] * 3


@pytest.mark.parametrize(
    "coming, says",
    [
        ([(0, 3), (1, 4)], ["process 1", "(host1, pid 101)", "4", "3"]),
        ([(0, 3), (3, 3)], ["process 3", "(host3, pid 103)", "0", "2"]),
        (
            [(0, 3), (1, 3), (1, 3)],
            ["process 1", "2", "host1, pid 101; host1, pid 101"],
        ),
    ],
)
def test_processes_that_contradict_each_other_are_all_told_so(coming, says):
    job = Job()
    for rank, size in coming:
        job.come(rank, of=size)
    job.state.check_timeouts(2.0)
    for message in job.told():
        with pytest.raises(ValueError, match=facts(*says)):
            raise ValueError(message["refused"])


def test_every_contradiction_is_told_at_once_also_to_who_comes_later():
    job = Job()
    job.come(0, lr="0.1", jax="0.10")
    job.come(1, lr="0.2", jax="0.10")
    job.state.check_timeouts(0.5)
    assert job.told() == [{}, {}]  # others may still come
    job.come(2, of=2, lr="0.1")
    job.state.check_timeouts(0.6)
    job.come(1, at=0.7)
    (said,) = {message["refused"] for message in job.told()}
    assert "lr differs: 0.1 in processes 0, 2; 0.2 in process 1" in said
    assert "jax differs: 0.10 in processes 0, 1; nothing in process 2" in said
    assert "process 2 (host2, pid 102) was told that the job has 2" in said


def test_who_does_not_come_is_named_first_in_a_report_then_as_the_end():
    job = Job()
    job.come(1)
    job.state.check_timeouts(31.0)
    job.state.check_timeouts(32.0)
    assert job.reports == ["waiting since 31 s for processes 0, 2"]
    job.state.check_timeouts(101.0)
    assert "processes 0, 2 of 3 had not come" in job.told()[0]["refused"]


@pytest.mark.parametrize("is_last", [True, False])
def test_a_contradiction_that_has_gone_does_not_end_the_job(is_last):
    job = Job()
    for rank in (0, 1, 1):
        job.come(rank)
    job.state.handle_disconnect(job.members[2], 0.5)
    if is_last:
        job.come(2, at=0.6)
    job.state.check_timeouts(2.0)
    if not is_last:
        job.come(2, at=2.5)
    first, second, _, last = job.told()
    assert all("service" in message for message in (first, second, last))


def test_a_host_is_shown_without_what_a_terminal_would_follow():
    name = f"\x1b[2J\nfsdp_jax: all done{'x' * 1000}"
    shown = str(Handshake(0, 1, name, 7, 0, {}))
    assert shown.isprintable() and "?[2J?fsdp_jax" in shown and len(shown) < 300


def test_who_goes_before_the_start_may_come_again():
    job = Job()
    job.come(1)
    job.state.handle_disconnect(job.members[0], 1.0)
    for rank in range(3):
        job.come(rank)
    assert all("service" in message for message in job.told()[1:])


def test_who_comes_to_a_job_that_runs_is_sent_away_and_it_goes_on():
    job = started()
    job.come(2)
    assert "Restart all its processes together" in job.told()[3]["refused"]
    assert all("service" in message for message in job.told()[:3])


def test_the_death_of_one_is_told_with_where_it_was():
    job = started()
    job.say(1, 10.0, step=7, phase="train step", secs=2.0)
    job.state.handle_disconnect(job.members[1], 13.0)
    assert job.told()[0] == job.told()[2]
    assert job.told()[0]["end"] == (
        "process 1 (host1, pid 101) ended without a word (was it killed?), in step 7, "
        "'train step' for 5 s"
    )


def test_an_abort_is_the_effect_of_an_error_that_was_reported_before():
    job = started()
    job.say(1, 1.0, failed="ValueError: no rows")
    job.state.handle_exit(2, "was ended by SIGABRT", 1.1, is_abort=True)
    assert job.state.blamed == {1} and "no rows" in job.told()[0]["end"]
    closed = started()
    closed.say(1, 1.0, failed="ValueError: no rows")
    closed.state.handle_disconnect(closed.members[2], 1.1)
    closed.state.handle_exit(2, "was ended by SIGABRT", 1.2, is_abort=True)
    assert closed.state.blamed == {1}


def test_an_abort_that_comes_first_is_the_reason():
    job = started()
    job.state.handle_disconnect(job.members[2], 1.0)
    job.say(1, 1.1, failed="gloo: connection closed by peer")
    job.state.handle_exit(2, "was ended by SIGABRT", 1.2, is_abort=True)
    assert job.state.blamed == {2}
    job = started()
    job.state.handle_exit(2, "was ended by SIGABRT", 1.0, is_abort=True)
    assert job.state.blamed == {2}


def test_an_end_that_its_starter_saw_is_told_with_where_it_was():
    job = started()
    job.say(1, 10.0, step=7, phase="train step", secs=2.0)
    job.state.handle_exit(1, "was ended by SIGKILL", 13.0)
    assert job.told()[0]["end"] == (
        "process 1 (host1, pid 101) was ended by SIGKILL, in step 7, "
        "'train step' for 5 s"
    )


def test_what_a_process_said_of_itself_comes_before_its_status():
    job = started()
    job.say(2, 1.0, failed="ValueError: no such file")
    job.state.handle_exit(2, "ended with status 1", 1.1)
    assert job.told()[0]["end"].endswith("ValueError: no such file")


def test_the_error_of_one_is_told_to_the_others_and_its_echoes_are_not():
    job = started()
    job.say(2, 1.0, failed="ValueError: no such file")
    job.say(0, 1.1, failed="RuntimeError: what follows from it")
    job.state.check_timeouts(1.2)
    assert all("service" in message for message in job.told())
    job.state.check_timeouts(1.6)
    for rank in (0, 1):
        assert job.told()[rank]["end"] == (
            "process 2 (host2, pid 102) failed in 'starting' for 1 s:\n"
            "  ValueError: no such file"
        )
    assert job.told()[2] == {"noted": True}


def test_a_death_comes_before_the_errors_that_it_makes():
    job = started()
    job.say(0, 1.0, failed="RuntimeError: connection closed by peer")
    job.state.handle_disconnect(job.members[1], 1.1)
    job.state.check_timeouts(2.0)
    for rank in (0, 2):
        assert (
            "process 1 (host1, pid 101) ended without a word"
            in (job.told()[rank]["end"])
        )


def test_who_gives_no_sign_of_life_is_named():
    job = started()
    job.say(0, 19.0, step=3, phase="train step", secs=1.0)
    job.say(1, 19.0, step=3, phase="train step", secs=1.0)
    job.state.check_timeouts(20.5)
    assert (
        "process 2 (host2, pid 102) gave no sign of life for 20 s"
        in (job.told()[0]["end"])
    )
    assert job.state.blamed == {2}


def test_one_process_is_blamed_and_not_those_that_end_as_an_effect():
    for blame in (
        lambda state, members: state.handle_disconnect(members[1], 1.0),
        lambda state, members: state.handle_exit(1, "was ended by SIGKILL", 1.0),
        lambda state, members: state.handle_message(
            members[1], {"failed": "ValueError"}, 1.0
        ),
    ):
        job = started()
        assert job.state.blamed == set()
        blame(job.state, job.members)
        job.state.check_timeouts(3.0)
        job.state.handle_disconnect(job.members[2], 4.0)
        job.state.handle_exit(0, "ended with status 1", 4.0)
        assert job.state.blamed == {1}


def test_nobody_is_blamed_for_a_stall_of_all():
    assert stalled(until=300.0).state.blamed == set()


def test_a_coordinator_that_was_stopped_itself_blames_nobody():
    job = started()
    job.state.add_suspension(1000.0)
    job.state.check_timeouts(1010.0)
    assert all("service" in message for message in job.told()) and not job.reports
    job.state.check_timeouts(1021.0)
    assert "gave no sign of life for 21 s" in job.told()[0]["end"]


def stalled(until: float) -> Job:
    """Two wait in step 4 for one that reads a batch."""
    job = started()
    for second in range(0, int(until), 5):
        for rank, phase in enumerate(["train step", "reading a batch", "train step"]):
            job.say(rank, second, step=4, phase=phase, secs=max(second - 1.0, 0))
        job.state.check_timeouts(second)
    return job


def test_a_standstill_is_reported_with_the_awaited_first():
    job = stalled(until=40)
    assert job.reports == [
        "no process went on for 34 s:\n"
        "  process 1 (host1, pid 101): step 4, 'reading a batch' for 34 s\n"
        "  process 0 (host0, pid 100), process 2 (host2, pid 102): step 4, "
        "'train step' for 34 s"
    ]
    assert all("service" in message for message in job.told())


def test_a_standstill_that_lasts_is_the_end():
    job = stalled(until=210)
    assert all("'reading a batch'" in message["end"] for message in job.told())


def test_a_job_of_which_some_go_on_is_let_be():
    job = started()
    for second in range(0, 1000, 5):
        for rank in range(3):
            secs = 0.0 if rank == 1 else float(second)
            job.say(rank, second, step=1, phase="x", secs=secs)
        job.state.check_timeouts(second)
    assert job.reports == []


def test_who_ended_its_program_while_others_wait_ends_them_soon():
    job = started()
    job.say(1, 1.0, left=True)
    for second in range(0, 50, 5):
        # Work that needs no other process, for longer than a silence may last.
        assert "end" not in job.told()[0]
        for rank in (0, 2):
            job.say(rank, second, step=1, phase="x", secs=float(second))
        job.state.check_timeouts(second)
    end = job.told()[0]["end"]
    assert "and its program has ended" in end
    assert "report_progress" in end and "left_secs" in end


def test_who_reports_progress_is_not_ended_once_another_has_left():
    job = started()
    job.say(1, 1.0, left=True)
    for second in range(0, 1000, 5):
        for rank in (0, 2):
            job.say(rank, second, step=1, phase=f"part {second // 30}", secs=0.0)
        job.state.check_timeouts(second)
    assert "end" not in job.told()[0]


def test_a_job_whose_programs_have_all_ended_is_let_be():
    job = started()
    for rank in range(3):
        job.say(rank, 1.0, left=True)
        job.state.handle_disconnect(job.members[rank], 2.0)
    job.state.check_timeouts(10_000.0)
    assert all("service" in message for message in job.told())


def test_a_config_is_compared_field_by_field_and_long_values_by_their_hash():
    facts = as_facts({"lr": 0.1, "text": "x" * 100})
    assert facts["lr"] == "0.1"
    assert facts["text"].startswith("sha256 ")
    assert as_facts(PATIENCE)["start_secs"] == "100"
    assert as_facts([1, 2]) == {"config": "[1, 2]"}


def test_patience_of_no_seconds_is_refused():
    with pytest.raises(ValueError, match=facts("silent_secs=0, stall_secs=-1")):
        Timeouts(silent_secs=0, stall_secs=-1)
