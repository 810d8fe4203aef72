"""A trace holds the steps that were asked for, and nobody pays who did not ask."""

import contextlib
import gzip
import json
from pathlib import Path

import jax
import pytest

from fsdp_jax.cli import main
from fsdp_jax.cli._profile import Profile, Window, tracer


def train(llama, text, folder: Path, *options: str) -> int:
    return main(
        ["train", "--hf", str(llama), "--data", str(text), "--seq", "16"]
        + ["--save", str(folder / "save"), "--metrics", str(folder / "run.jsonl")]
        + list(options)
    )


def traced_steps(folder: Path) -> list[int]:
    """The steps in the only trace of a folder, as its viewers read them."""
    (file,) = folder.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return sorted(
        int(event["args"]["step_num"])
        for event in events
        if "step_num" in event.get("args", {})
    )


def no_trace_runs() -> bool:
    """Whether another trace can start; the profiler runs one at a time."""
    try:
        jax.profiler.stop_trace()
    except RuntimeError:
        return True
    return False


@pytest.fixture(scope="module")
def profiled(tmp_path_factory, llama, text) -> Path:
    """A real run of 4 steps, of which 2 and 3 are traced."""
    folder = tmp_path_factory.mktemp("profiled")
    window = ["--profile", str(folder / "trace"), "--profile-steps", "2"]
    assert train(llama, text, folder, "--steps", "4", *window) == 0
    return folder


def test_the_trace_holds_exactly_the_steps_asked_for(profiled):
    assert traced_steps(profiled / "trace") == [2, 3]
    assert len(list((profiled / "trace").rglob("*.xplane.pb"))) == 1


def test_the_trace_names_what_the_devices_do(profiled):
    (file,) = (profiled / "trace").rglob("*.xplane.pb")
    names = file.read_bytes()
    for scope in (b"(unit:layers)/while/", b"/prefetch/all_gather", b"optimizer/"):
        assert scope in names


def test_a_traced_run_computes_the_same(profiled, llama, text, tmp_path):
    def losses(folder):
        lines = (folder / "run.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    assert train(llama, text, tmp_path, "--steps", "4") == 0
    assert losses(tmp_path) == losses(profiled)


def test_there_is_no_trace_unless_asked(llama, text, tmp_path, fake_step, monkeypatch):
    fake_step(3, 2)
    monkeypatch.delattr(jax.profiler, "start_trace")
    monkeypatch.delattr(jax.profiler, "trace")
    assert train(llama, text, tmp_path, "--steps", "2") == 0
    assert not list(tmp_path.rglob("*.xplane.pb"))


def test_where_the_trace_is_goes_to_stderr(llama, text, tmp_path, capsys, fake_step):
    fake_step(4, 3, 2, 1)
    trace = tmp_path / "trace"
    assert train(llama, text, tmp_path, "--steps", "4", "--profile", str(trace)) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert f"the trace of steps 2 to 4 is now in {trace}" in err
    assert traced_steps(trace) == [2, 3, 4]


def test_a_resumed_run_counts_its_steps_from_the_start(
    trained, text, tmp_path, fake_step
):
    fake_step(3, 2, 1)
    status = main(
        ["train", "--resume", str(trained.save), "--steps", "7", "--data", str(text)]
        + ["--save", str(tmp_path / "save"), "--profile", str(tmp_path / "trace")]
        + ["--profile-from", "5", "--profile-steps", "1"]
    )
    assert status == 0
    assert traced_steps(tmp_path / "trace") == [5]


@pytest.mark.parametrize("loss", [float("nan"), RuntimeError("out of memory")])
def test_an_error_ends_the_trace_and_keeps_it(loss, llama, text, tmp_path, fake_step):
    fake_step(3, 2, loss)
    error = pytest.raises(RuntimeError) if isinstance(loss, Exception) else None
    window = ["--profile", str(tmp_path / "trace"), "--profile-steps", "5"]
    with error or contextlib.nullcontext():
        assert train(llama, text, tmp_path, "--steps", "9", *window) == 1
    assert no_trace_runs()
    assert traced_steps(tmp_path / "trace") == [2, 3]


def test_an_error_after_the_trace_leaves_it_whole(llama, text, tmp_path, fake_step):
    fake_step(3, 2, float("nan"))
    window = ["--profile", str(tmp_path / "trace"), "--profile-steps", "1"]
    assert train(llama, text, tmp_path, "--steps", "9", *window) == 1
    assert no_trace_runs()
    assert traced_steps(tmp_path / "trace") == [2]


def test_the_trace_waits_for_the_devices(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(jax, "block_until_ready", seen.append)
    monkeypatch.setattr(jax.profiler, "trace", lambda _: note(seen, "start", "stop"))
    with tracer(Window(tmp_path, 2, 3)) as trace:
        for step in range(1, 5):
            trace.before(step, f"before {step}")
            trace.after(step, f"after {step}")
    assert seen == ["before 2", "start", "after 3", "stop"]


@contextlib.contextmanager
def note(seen: list, entered, left):
    seen.append(entered)
    yield
    seen.append(left)


@pytest.mark.parametrize(
    "options, start, steps, window",
    [
        ({}, 0, 100, (2, 4)),
        ({}, 10, 100, (12, 14)),
        ({}, 0, 3, (2, 3)),  # what the run has left
        ({}, 0, 1, (1, 1)),
        ({"profile_from": 1}, 0, 100, (1, 3)),
        ({"profile_from": 100}, 0, 100, (100, 100)),
        ({"profile_steps": 99}, 0, 100, (2, 100)),
        ({"profile_from": 1, "profile_steps": 100}, 0, 100, (1, 100)),
    ],
)
def test_the_window_is_what_was_asked_or_what_repeats(options, start, steps, window):
    profile = Profile(Path("trace"), **options)
    assert profile.window(start, steps) == Window(Path("trace"), *window)


def test_without_a_directory_there_is_no_window():
    assert Profile().window(0, 100) is None
