"""What one GPU does: steps beside the planner and PyTorch FSDP2, kernels, checkpoints.

    python benchmarks/gpu_check.py --out FILE [--minutes M] [--only PART ...]
    python benchmarks/gpu_check.py --predict [--gpu h100]    no GPU; before the others
    python benchmarks/gpu_check.py --rehearse                tiny models, on any machine

Each part runs in a process of its own, so that its peak of memory is its own and a part
that fails says so and ends no other; the next process imports while one runs, and waits
for its turn. The parts are in order of importance, and FILE is written after each: a
run that is cut short has the first ones, and the same command goes on with the others.
Parts that FILE has are kept, those that failed too; `--only` runs them again.

Steps are of Llama 3.2 1B and 3B in bfloat16 at sequence 4,096 with AdamW: the median
step, tokens a second, model FLOPs utilization with attention counted as a square and as
a triangle, and the peak of memory beside what was predicted. Beside them: the same in
`jax.jit` alone, and transformers' model under PyTorch's FSDP2 with compiled layers;
attention kernels and experts' products, how fast and how far from float32; a checkpoint
of a state on the GPU; commands of `fsdp-jax`; and whether XLA's watchdog ends a process
whose program waits for ever.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import gpu_attention
import gpu_checkpoint
import gpu_decoder
import gpu_experts
import gpu_watchdog
import jax
import result

from fsdp_jax.planner import find_gpu

PREDICTED = result.RESULTS / "gpu_check_predicted.json"
PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax"),
    *("optax", "orbax-checkpoint", "torch", "transformers", "numpy"),
)
PARTS = (
    *("1b", "fsdp2_1b", "attention", "jit_1b", "1b_float8", "1b_recompute"),
    *("fsdp2_1b_recompute", "3b", "fsdp2_3b", "experts", "checkpoint"),
    *("1b_experts", "commands", "1b_offload", "watchdog", "3b_float8", "1b_stream"),
    *("1b_all", "fsdp2_1b_eager"),
)
"""Parts in order of importance."""
LONGEST = 150
"""Seconds after which a part is ended."""
WAIT = 40
"""Seconds that a program waits which XLA's watchdog should end."""


def fsdp2_command(part, *, rehearse):
    """The command of PyTorch's training that stands beside a case."""
    name = part.removeprefix("fsdp2_").removesuffix("_eager")
    case = gpu_decoder.CASES[name]
    case = case.rehearsed() if rehearse else case
    fields = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim"),
        "tie_word_embeddings",
    )
    sizes = {
        "config": {name: getattr(case.config, name) for name in fields},
        "rows": case.rows,
        "seq": case.seq,
        "steps": gpu_decoder.STEPS,
        "recompute": case.remat == "nothing",
        "compiled": not part.endswith("_eager") and not rehearse,
    }
    script = Path(__file__).with_name("gpu_fsdp2.py")
    return [sys.executable, str(script), json.dumps(sizes)]


def run_part(part, *, rehearse, profile):
    """Measures one part in this process, when a line on stdin says so."""
    sys.stdin.readline()
    # These two start processes of their own, which need the GPU's memory.
    if part == "commands":
        return run_commands()
    if part == "watchdog":
        return gpu_watchdog.measure_watchdog(1 if rehearse else WAIT)
    if jax.devices()[0].platform == "cpu" and not rehearse:
        sys.exit("gpu_check.py measures a GPU, and jax sees none: try --rehearse.")

    def case(name):
        found = gpu_decoder.CASES[name]
        return found.rehearsed() if rehearse else found

    if part in gpu_decoder.CASES:
        return gpu_decoder.measure(case(part), profile if part == "1b" else None)
    if part == "jit_1b":
        return gpu_decoder.measure_jit(case("1b"))
    if part == "attention":
        sizes = gpu_attention.REHEARSAL if rehearse else gpu_attention.FULL
        return gpu_attention.measure_attention(sizes)
    if part == "experts":
        sizes = gpu_experts.REHEARSAL if rehearse else gpu_experts.FULL
        return gpu_experts.measure_experts(sizes)
    assert part == "checkpoint", part
    return gpu_checkpoint.measure_checkpoint(case("1b_recompute"))


def run_commands():
    """What the commands of the documentation print on this machine."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text(Path(__file__).read_text() * 20)
        model, run, trace = (str(Path(folder, name)) for name in ("m", "run", "trace"))
        train = ["train", "--hf", model, "--data", str(text), "--steps", "12"]
        train += ["--save", run, "--profile", trace, "--profile-from", "6"]
        for words in (
            ["doctor"],
            ["make-tiny-llama", model],
            [*train, "--profile-steps", "3", "--seq", "128"],
            ["explain", trace],
            ["generate", run, "--prompt", "def", "--max-new-tokens", "8"],
            ["verify", run],
        ):
            done = subprocess.run(
                [sys.executable, "-m", "fsdp_jax", *words],
                capture_output=True,
                text=True,
            )
            said = (done.stdout + done.stderr).replace(folder, "FOLDER").splitlines()
            found[words[0]] = {"status": done.returncode, "said": said[-40:]}
    return found


class Process:
    """A part in a process of its own, which waits for `finish`."""

    def __init__(self, part, args, folder):
        """Starts it."""
        self.part = part
        own = [sys.executable, __file__, "--part", part]
        own += ["--rehearse"] * args.rehearse
        own += ["--profile", str(args.profile)] if args.profile else []
        is_peer = part.startswith("fsdp2_")
        command = fsdp2_command(part, rehearse=args.rehearse) if is_peer else own
        self.out, self.err = (Path(folder, f"{part}.{kind}") for kind in ("out", "err"))
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=err
            )

    def finish(self, seconds):
        """Lets it run, and returns what it found or why it found nothing."""
        started = time.perf_counter()
        try:
            self.process.communicate(b"\n", timeout=max(1.0, seconds))
            status = self.process.returncode
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            status = f"ended after {seconds:.0f} s"
        took = round(time.perf_counter() - started, 1)
        if status == 0:
            return json.loads(self.out.read_text().splitlines()[-1]) | {"part_s": took}
        said = self.err.read_text().strip().splitlines()[-25:]
        return {"not_run": said, "status": status, "part_s": took}


def measured(parts, args, folder) -> Iterator[tuple[str, dict]]:
    """Runs parts one after the other, until the minutes are over."""
    ends = time.monotonic() + 60 * args.minutes
    waiting = [*parts]
    following = Process(waiting.pop(0), args, folder) if waiting else None
    while following is not None:
        current = following
        following = Process(waiting.pop(0), args, folder) if waiting else None
        left = ends - time.monotonic()
        if left < 1:
            for process in (current, following):
                if process is not None:
                    process.process.kill()
            return
        yield current.part, current.finish(min(LONGEST, left))


def measure_parts(args):
    """Runs the parts that are left, and writes the result after each."""
    conditions = result.begin(args, PACKAGES)
    predicted = json.loads(PREDICTED.read_text()) if PREDICTED.is_file() else {}
    found = {"device": described(), "parts": {}}
    if args.out:
        found = result.resumed(args, found)
    parts = args.only or [part for part in PARTS if part not in found["parts"]]
    result.write(args, conditions, found, show=False)
    with tempfile.TemporaryDirectory() as folder:
        for part, of_part in measured(parts, args, folder):
            found["parts"][part] = of_part
            if not args.rehearse and part in predicted.get("parts", {}):
                of_part["predicted"] = compared(of_part, predicted["parts"][part])
            print(f"{part}: {shown(of_part)}", file=sys.stderr, flush=True)
            result.write(args, conditions, found | ratios(found["parts"]), show=False)
    print(json.dumps(found | ratios(found["parts"])))


def described():
    """Name of the GPU, its memory and its driver."""
    query = "--query-gpu=name,memory.total,driver_version"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        return "no GPU"
    return done.stdout.strip()


def compared(found, predicted):
    """What was predicted of a step, and what part of the measured it is."""
    if "median_step_s" not in found or "step_s" not in predicted:
        return predicted
    peak = found["memory"]["peak_in_use"]
    return predicted | {
        "step_of_measured": round(predicted["step_s"] / found["median_step_s"], 4),
        "compiled_bytes_of_peak": peak and round(predicted["compiled_bytes"] / peak, 4),
        "memory_of_peak": peak and round(predicted["memory"] / peak, 4),
    }


RATIOS = {
    "faster_than_fsdp2": ("fsdp2_1b", "1b"),
    "faster_than_fsdp2_with_recompute": ("fsdp2_1b_recompute", "1b_recompute"),
    "faster_than_fsdp2_at_3b": ("fsdp2_3b", "3b"),
    "faster_than_jit": ("jit_1b", "1b"),
    "float8_faster": ("1b", "1b_float8"),
    "float8_faster_at_3b": ("3b", "3b_float8"),
    "faster_than_offload": ("1b_offload", "1b_recompute"),
}
"""Ratios of median steps: name -> the part above and that below."""


def ratios(parts):
    """Ratios of the parts that there are."""
    steps = {
        name: part["median_step_s"]
        for name, part in parts.items()
        if "median_step_s" in part
    }
    return {
        "compared": {
            name: round(steps[above] / steps[below], 4)
            for name, (above, below) in RATIOS.items()
            if above in steps and below in steps
        }
    }


def shown(found):
    """A line about a part."""
    if "not_run" in found:
        return f"not run ({found['status']}): {' | '.join(found['not_run'][-2:])}"
    names = ("median_step_s", "mfu_attention_square", "compile_s", "part_s")
    return ", ".join(f"{name} {found[name]}" for name in names if name in found)


def write_predictions(args):
    """What the planner says of each step, for a GPU that is not here."""
    conditions = result.begin(args, PACKAGES)
    gpu, parts = find_gpu(args.gpu), {}
    for name, case in gpu_decoder.CASES.items():
        if args.only and name not in args.only:
            continue
        try:
            parts[name] = gpu_decoder.predict(case, gpu)
        except ValueError as error:
            parts[name] = {"refused": str(error)}
        print(f"{name}: {parts[name]}", file=sys.stderr, flush=True)
    result.write(args, conditions, {"gpu": gpu.name, "parts": parts})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    result.add_arguments(parser)
    parser.add_argument("--rehearse", action="store_true", help="tiny models")
    parser.add_argument("--predict", action="store_true", help="without a GPU")
    parser.add_argument("--gpu", default="h100", help="GPU to predict for")
    parser.add_argument("--minutes", type=float, default=15.0, help="of all parts")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts to run")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--profile", type=Path, help="directory to keep a profile in")
    args = parser.parse_args()
    args.force |= args.rehearse  # which measures nothing
    if args.part:
        profile = args.profile and str(args.profile)
        found = run_part(args.part, rehearse=args.rehearse, profile=profile)
        print(json.dumps(found))
    elif args.predict:
        write_predictions(args)
    else:
        measure_parts(args)


if __name__ == "__main__":
    main()
