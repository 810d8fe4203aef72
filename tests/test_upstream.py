"""UPSTREAM.md says of Megatron-LM's and verl's tests which of ours show the same.

What it cites exists (read from the source, nothing is imported), what it leaves out has
a reason, and no row is lost.
"""

import ast
import dataclasses
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Megatron-LM's or verl's test file -> how many of its cases are listed, so that no row
# is lost unnoticed. Where a row comes or goes, its number here does too.
ROWS = {
    "mfsdp_v1/test_mfsdp_fully_shard.py": 22,
    "mfsdp_v1/test_mcore_fully_sharded_data_parallel.py": 23,
    "mfsdp_v1/test_mcore_tensor_parallelism_detect.py": 13,
    "mfsdp_v1/test_mfsdp_uneven_dtensor.py": 20,
    "mfsdp_v1/test_mfsdp_fused_mla_checkpoint.py": 4,
    "mfsdp_v2/test_dbuffer.py": 24,
    "mfsdp_v2/test_fully_shard.py": 19,
    "mfsdp_v2/test_memory.py": 6,
    "mfsdp_v2/test_overlap.py": 5,
    "mfsdp_v2/test_symmetric_memory.py": 2,
    "mfsdp_v2/test_cuda_graph.py": 2,
    "mfsdp_v2/test_checkpoint.py": 2,
    "mfsdp_v2/test_context.py": 8,
    "mfsdp_v2/test_annotation.py": 5,
    "mfsdp_v2/test_optimizer.py": 2,
    "mfsdp_v2/test_expert_parallel.py": 1,
    "mfsdp_v2/test_mcore_adapter.py": 6,
    "test_distributed_data_parallel.py": 2,
    "test_torch_fully_sharded_parallel.py": 3,
    "test_param_and_grad_buffer.py": 27,
    "test_finalize_model_grads.py": 10,
    "test_grad_reduce_for_replicated_embedder.py": 2,
    "test_grad_sync_with_expert_parallel.py": 4,
    "test_reduce_scatter_with_fp32_accumulation.py": 5,
    "test_param_layout.py": 25,
    "test_layer_wise_param_layout.py": 25,
    "test_param_readiness.py": 10,
    "dist_checkpointing/test_serialization.py": 21,
    "dist_checkpointing/test_async_save.py": 3,
    "dist_checkpointing/test_async_utils_shutdown.py": 1,
    "dist_checkpointing/test_fully_parallel.py": 6,
    "dist_checkpointing/test_pg_distribution_cache.py": 1,
    "dist_checkpointing/test_local.py": 4,
    "dist_checkpointing/test_replication.py": 2,
    "dist_checkpointing/test_nonpersistent.py": 2,
    "dist_checkpointing/test_strict.py": 4,
    "dist_checkpointing/test_mapping.py": 5,
    "dist_checkpointing/test_checkpointable.py": 2,
    "dist_checkpointing/test_torch_dist.py": 2,
    "dist_checkpointing/test_validation.py": 1,
    "dist_checkpointing/test_integrity.py": 2,
    "dist_checkpointing/test_fp8.py": 2,
    "dist_checkpointing/test_drop_redundant_extra_state.py": 1,
    "dist_checkpointing/test_safe_globals.py": 2,
    "dist_checkpointing/test_optimizer.py": 11,
    "dist_checkpointing/test_layer_wise_optimizer.py": 5,
    "dist_checkpointing/test_pipeline_parallel_layout.py": 1,
    "dist_checkpointing/test_global_metadata_reuse.py": 1,
    "dist_checkpointing/test_rerun_state_machine_ckpt.py": 1,
    "dist_checkpointing/test_msc.py": 1,
    "dist_checkpointing/test_save_tokenizer_assets.py": 3,
    "dist_checkpointing/test_flattened_resharding.py": 1,
    "dist_checkpointing/models/common.py": 4,
    "dist_checkpointing/models/test_gpt_model.py": 3,
    "dist_checkpointing/models/test_bert_model.py": 1,
    "dist_checkpointing/models/test_t5_model.py": 1,
    "dist_checkpointing/models/test_mlp_glu.py": 2,
    "dist_checkpointing/models/test_moe_experts.py": 3,
    "dist_checkpointing/models/test_mamba.py": 1,
    "dist_checkpointing/models/test_gpt_hybrid_interop.py": 1,
    "test_checkpointing.py": 2,
    "special_distributed/test_fsdp_ckpt.py": 3,
    "special_distributed/test_mcore_config_converter.py": 1,
    "special_distributed/test_tensor_dict.py": 2,
    "special_distributed`, files of 2026": 7,
    "special_distributed/test_torch_functional.py": 1,
    "test_protocol_on_cpu.py": 14,
    "Failures of checkpoints": 22,
    "Beyond upstream": 19,
}

HEADER = ["upstream test", "what it shows", "ours"]
# `tests/fsdp/test_x.py::test_y`
CITED = re.compile(r"`(tests/[\w/]+\.py::\w+)`")
# What stands in the place of a test, up to the next one or the end.
EXCUSE = re.compile(r"(N/A|not yet):(.*?)(?=; (?:N/A|not yet):|$)")
LEAST_WORDS = 5


@dataclasses.dataclass(frozen=True)
class Row:
    """One case of a file of upstream's tests, and what shows it here."""

    file: str
    cells: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.file}, {self.cells[0]}"

    @property
    def ours(self) -> str:
        return self.cells[-1]


def rows(text: str) -> list[Row]:
    """The rows of all tables, each with the heading above it."""
    found, file = [], ""
    for line in text.splitlines():
        if line.startswith("### "):
            file = line.removeprefix("### ").strip("`")
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if cells != HEADER and not all(re.fullmatch("-+", c) for c in cells):
                found.append(Row(file, tuple(cells)))
    return found


def defined_in(root: Path, files: Iterable[str]) -> set[str]:
    """`path::name` of every test function in these files; what is absent has none."""
    return {
        f"{file}::{node.name}"
        for file in files
        if (root / file).exists()
        for node in ast.parse((root / file).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def files_cited(table: list[Row]) -> set[str]:
    return {
        cited.partition("::")[0] for row in table for cited in CITED.findall(row.ours)
    }


def problems(table: list[Row], tests: set[str]) -> list[str]:
    """What is wrong with rows, given the tests that there are."""
    return [
        *(f"{name}: twice" for name, n in names(table).items() if n > 1),
        *(problem for row in table for problem in problems_of(row, tests)),
    ]


def names(table: list[Row]) -> Counter[str]:
    return Counter(row.name for row in table)


def problems_of(row: Row, tests: set[str]) -> list[str]:
    if len(row.cells) != len(HEADER) or not all(row.cells):
        return [f"{row.name}: not three cells with something in them"]
    cited, excuses = CITED.findall(row.ours), EXCUSE.findall(row.ours)
    found = [
        f"{row.name}: no such test {test}" for test in cited if test not in tests
    ] + [
        f"{row.name}: {kind} without a reason"
        for kind, reason in excuses
        if len(CITED.sub("", reason).split()) < LEAST_WORDS
    ]
    if row.ours.count("::") != len(cited):
        found.append(f"{row.name}: cites what is no `tests/path.py::test_name`")
    if not cited and not excuses:
        found.append(f"{row.name}: neither a test, nor N/A, nor not yet")
    return found


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return rows((ROOT / "tests" / "UPSTREAM.md").read_text())


def test_every_row_cites_tests_that_exist_or_says_why_not(table):
    assert problems(table, defined_in(ROOT, files_cited(table))) == []


def test_no_row_and_no_file_is_lost(table):
    assert Counter(row.file for row in table) == ROWS


# The checker catches what it is for.


def planted(*ours: str) -> list[Row]:
    """Rows of one table, numbered, with these last cells."""
    lines = [f"| case {i} | something | {cell} |" for i, cell in enumerate(ours)]
    head = ["### `test_upstream.py`", "", f"| {' | '.join(HEADER)} |", "|---|---|---|"]
    return rows("\n".join([*head, *lines]))


GOOD = "`tests/test_a.py::test_good`"
NO_TORCH = "N/A: a reason of a few words"


@pytest.mark.parametrize(
    "ours, problem",
    [
        ("`tests/test_a.py::test_gone`", "no such test tests/test_a.py::test_gone"),
        (f"{GOOD}, `tests/b/test_b.py::test_good`", "no such test tests/b/test_b.py"),
        ("`tests/test_a.py::helper`", "no such test"),
        ("`tests/test_a.py::test_good[id]`", "cites what is no"),
        ("tests/test_a.py::test_good", "cites what is no"),  # without backticks
        ("", "not three cells"),
        ("N/A", "neither a test"),
        ("N/A:", "N/A without a reason"),
        ("N/A: no use", "N/A without a reason"),
        ("not yet: later", "not yet without a reason"),
        (f"{GOOD}; not yet:", "not yet without a reason"),
        (f"not yet: {GOOD} and {GOOD}", "not yet without a reason"),
        ("as above", "neither a test"),
        (f"{GOOD} | {GOOD}", "not three cells"),
    ],
)
def test_a_planted_fault_is_caught(ours, problem):
    found = problems(planted(GOOD, ours), {"tests/test_a.py::test_good"})
    assert any(problem in each for each in found), found
    assert all(each.startswith("test_upstream.py, case 1: ") for each in found)


def test_a_planted_second_row_of_one_name_is_caught():
    assert problems(planted(GOOD) * 2, {"tests/test_a.py::test_good"}) == [
        "test_upstream.py, case 0: twice"
    ]


@pytest.mark.parametrize(
    "ours",
    [
        GOOD,
        f"{GOOD} [one case], {GOOD} (and why)",
        NO_TORCH,
        f"not yet: a reason of a few words; for a part of it {GOOD}",
        f"{GOOD}; not yet: a reason of a few words",
    ],
)
def test_a_good_row_is_let_be(ours):
    assert problems(planted(ours), {"tests/test_a.py::test_good"}) == []


def test_tests_are_read_from_the_source(tmp_path):
    (tmp_path / "test_a.py").write_text(
        "import absent\ndef test_one():\n    def test_inner(): ...\n"
        "def helper(): ...\n# def test_comment(): ...\nclass test_class: ..."
    )
    found = defined_in(tmp_path, ["test_a.py", "test_absent.py"])
    assert found == {"test_a.py::test_one"}
