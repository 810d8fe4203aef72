"""What XLA logs while it compiles is not among what a plan says."""

import os
import sys

import pytest

from fsdp_jax.cli._xla_log import without_xla_lines

LOGGED = (
    "WARNING: All log messages before absl::InitializeLog() is called are written to "
    "STDERR",
    "I0000 00:00:1795416054.724921   17290 cudart_stub.cc:31] Could not find cuda "
    "drivers on your machine, GPU will not be used.",
    "W1123 06:54:00.660466   23739 hlo_rematerialization.cc:3231] Can't reduce memory",
    "E1124 03:30:26.685248   11529 gpu_hlo_schedule.cc:968] The byte size of "
    "input/output arguments (105830576508) exceeds the base limit (68000000000).",
    "E1123 06:55:45.770436   24554 slow_operation_alarm.cc:73] ",
    "********************************",
    "[Compiling module jit_step for GPU] Very slow compile? If you want to file a bug",
    "********************************",
)
SAID = (
    "fsdp-jax: compiling ZeRO-2",
    "F1123 06:55:45.770436   24554 gpu_compiler.cc:73] Check failed",
    "E1123 06:55:45.770436   24554 gpu_compiler.cc:73] an error",
    "",
    "the last line has no end",
)


@pytest.fixture
def write():
    def write(lines: tuple[str, ...]) -> None:
        os.write(2, "\n".join(lines).encode())

    return write


def test_lines_that_say_nothing_of_the_plan_are_dropped(write, capfd):
    with without_xla_lines():
        write((*LOGGED, ""))
        print("by Python", file=sys.stderr)
        write(SAID)
    assert capfd.readouterr().err == "\n".join(("by Python", *SAID))


def test_afterwards_all_is_said_again(write, capfd):
    with pytest.raises(KeyError), without_xla_lines():
        raise KeyError
    write(LOGGED)
    assert capfd.readouterr().err == "\n".join(LOGGED)
