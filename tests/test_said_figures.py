"""What the README and the documentation say was measured is what the JSON says."""

from __future__ import annotations

import json

import pytest
from helpers import tiers
from helpers.markdown import ROOT, pages

RESULTS = ROOT / "benchmarks" / "results"
MEASURED = "docs/pages/explanation/measured.md"
TUNE = "docs/pages/how-to/tune-performance.md"
BRING = "docs/pages/how-to/bring-your-model.md"
SECURITY = "docs/pages/explanation/security.md"
HOLDS = "docs/pages/explanation/what-holds.md"
LIMITS = "docs/pages/explanation/limits.md"
LANES = ("0.10.2", "0.12.0.1")
FORMS = ("annotations", "plain_scan", "fsdp_jax")
LARGER = {
    "llama-3-70b": 1,
    "mixtral-8x7b": 1,
    "mixtral-8x7b-float8-gather": 1,
    "mixtral-8x7b-16": 1,
    "mixtral-8x7b-dropless": 1,
    "deepseek-v3": 1,
    "deepseek-v3-float8": 1,
    "llama-3-70b-pp": 1,
    "llama-3-8b-cp": 2,
    "llama-3-8b-float8": 1,
    "llama-3-8b-float8-gather": 1,
}
"""Decoder -> digits of a percent of its exposed communication."""
IN_PARTS = (
    "llama-3-70b",
    "mixtral-8x7b",
    "mixtral-8x7b-float8-gather",
    "mixtral-8x7b-16",
    "deepseek-v3",
    "deepseek-v3-float8",
)
"""Decoders whose second row runs a batch in two parts."""


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def said(page: str) -> str:
    return " ".join(pages()[page].split())


def row(gpus: int, lane: str, form: str) -> dict:
    rows = read(f"overlap_{gpus}_jax{lane}")["rows"]
    (found,) = [row for row in rows if row["form"] == form]
    return found


@pytest.mark.parametrize(
    "gpus, ending", [(8, ""), (8, "_4_microbatches"), (64, ""), (64, "_hsdp")]
)
def test_the_table_of_overlap_is_that_of_the_runs(gpus, ending):
    cells = []
    for form in FORMS:
        lanes = [row(gpus, lane, form + ending) for lane in LANES]
        exposed = " / ".join(f"{lane['exposed_of_step']:.1%}" for lane in lanes)
        steps = " / ".join(f"{lane['step_ms']:,.0f}" for lane in lanes)
        cells.append(f"{exposed} of {steps} ms")
    assert " | ".join(cells) in said(MEASURED)


@pytest.mark.parametrize("gpus", [8, 64])
def test_the_table_of_a_depth_that_recurs_is_that_of_the_runs(gpus):
    rows = {r["order"]: r for r in read("foreign_looped")["rows"] if r["gpus"] == gpus}
    row, without = rows["prefetch=1"], rows["prefetch=0"]
    exposed = [
        f"{r['exposed_of_step']:.1%} of {r['step_ms']:.1f} ms" for r in (row, without)
    ]
    memory = [f"{r['compiled_gb']:.2f} GB" for r in (row, without)]
    units = [str(r["units_unsharded"]) for r in (row, without)]
    cells = [str(gpus), *exposed, *memory, f"{row['predicted_gb']:.2f} GB", *units]
    assert f"| {' | '.join(cells)} |" in said(BRING)


@pytest.mark.parametrize("gpus", [8, 64])
def test_the_table_of_models_of_others_is_that_of_the_runs(gpus):
    rows = read("foreign")["rows"]
    by_order = {(r["model"], r["order"]): r for r in rows if r["gpus"] == gpus}
    models = [model for model, order in by_order if order == "prefetch=1"]
    assert len(models) == 7
    for model in models:
        row, left = (by_order[model, f"prefetch={ahead}"] for ahead in (1, 0))
        cells = [
            *(exposed_of(r) for r in (row, left)),
            *(f"{r['compiled_gb']:.2f} GB" for r in (row, left)),
            f"{row['predicted_gb']:.2f} GB",
            f"{row['units_unsharded']}",
        ]
        assert f"| `{model}` | {' | '.join(cells)} |" in said(BRING)


def test_what_is_said_of_all_models_of_others_holds_of_each():
    found = read("foreign")["compared"]
    rows = [r for r in read("foreign")["rows"] if r["order"] == "prefetch=1"]
    shares = [r["predicted_gb"] / r["compiled_gb"] for r in rows]
    span = f"{min(shares):.2f} to {max(shares):.2f}"
    assert f"The predicted memory is {span} of the compiled one" in said(BRING)
    spans = []
    for figure in ("faster_than_without", "faster_at_most"):
        values = [one[figure] for one in found]
        spans.append(f"{min(values):.2f} to {max(values):.2f}")
    assert f"makes these steps {spans[0]} times as fast" in said(BRING)
    assert f"would be {spans[1]} times as fast as with" in said(BRING)


def test_models_of_others_wait_at_the_ends_of_a_step_as_said():
    rows = [r for r in read("foreign")["rows"] if r["order"] == "prefetch=1"]
    begin = [
        wait["begins_at"]
        for row in rows
        for wait in row.get("waits", ())
        if row["gpus"] == 64 and (row["model"], wait["unit"]) != ("scanned", "embed")
    ]
    early = [at for at in begin if at < 0.5]
    late = [at for at in begin if at >= 0.5]
    span = f"their first {max(early):.0%} or after {min(late):.0%} of them"
    assert early and late and span.replace("%", " %") in said(BRING)


def test_no_order_makes_models_of_others_much_faster_as_said():
    found = {
        one["model"]: one["faster_at_most"]
        for one in read("foreign")["compared"]
        if one["gpus"] == 64 and one["exposed_without"] >= 0.15
    }
    gains = ", ".join(f"`{model}` {gain:.2f}" for model, gain in sorted(found.items()))
    assert f"would be as much faster: {gains}" in said(BRING)


def test_merged_collectives_of_fixed_sizes_cost_models_of_others_what_is_said():
    rows = {(r["model"], r["gpus"], r["order"]): r for r in read("foreign")["rows"]}
    compared = read("foreign")["compared"]
    shares = [one["exposed_of_fixed"] for one in compared]
    memory = [
        rows[one["model"], one["gpus"], "prefetch=1"]["compiled_gb"]
        / one["gb_of_fixed"]
        for one in compared
    ]
    gains = ", ".join(
        f"`{one['model']}` {one['faster_than_fixed']:.2f}"
        for one in sorted(compared, key=lambda one: one["model"])
        if one["gpus"] == 64
    )
    exposed = f"{min(shares):.1%} to {max(shares):.1%} of a step".replace("%", " %")
    assert exposed in said(BRING)
    assert f"{min(memory):.2f} to {max(memory):.2f} times the memory" in said(BRING)
    assert f"On 64 GPUs it is as much faster: {gains}." in said(BRING)


def exposed_of(row: dict) -> str:
    return f"{row['exposed_of_step']:.1%} of {row['step_ms']:.1f} ms"


def test_the_rows_of_annotations_are_those_of_the_runs():
    rows = {(r["model"], r["gpus"], r["order"]): r for r in read("foreign")["rows"]}
    assert len(rows) == 7 * 2 * 5
    for (model, gpus, order), row in rows.items():
        if order == "annotations":
            cells = [
                f"{exposed_of(r)} | {r['compiled_gb']:.2f} GB"
                for r in (row, rows[model, gpus, "saved"])
            ]
            assert f"| `{model}` | {gpus} | {' | '.join(cells)} |" in said(BRING)


def test_what_is_exposed_of_a_deeper_model_is_that_of_the_runs():
    rows = read("foreign_12_layers")["rows"]
    ahead, left = ({r["order"]: r for r in rows}[f"prefetch={n}"] for n in (1, 0))
    (shallow,) = [
        found["faster_than_without"]
        for found in read("foreign")["compared"]
        if (found["model"], found["gpus"]) == ("readme", 8)
    ]
    gain = f"{left['step_ms'] / ahead['step_ms']:.2f}x after {shallow:.2f}x"
    memory = f"{left['compiled_gb']:.2f} GB in the place of {ahead['compiled_gb']:.2f}"
    for text in (exposed_of(ahead), exposed_of(left), gain, memory):
        assert text in said(BRING)


@pytest.mark.parametrize("form", ["fsdp_jax", "annotations"])
def test_the_readme_says_the_same_of_overlap(form):
    found = row(8, LANES[0], form)
    exposed, step = found["exposed_of_step"], found["step_ms"]
    assert f"{exposed:.1%} of {step:,.0f} ms" in said("README.md")


def test_the_page_on_tuning_says_the_same():
    def waits(found: dict) -> str:
        return f"{100 * found['exposed_of_step']:.1f} % of {found['step_ms']:,.0f} ms"

    split, in_parts = read("overlap_llama-3-70b_jax0.10.2")["rows"]
    experts = {(r["dispatch"], r["product"]): r for r in read("experts")["rows"]}
    dropless = [
        experts["dropless", product]["step_ms"]
        for product in ("grouped_matmul", "ragged_dot")
    ]
    capacity = experts["capacity 1.0", "grouped_matmul"]["step_ms"]
    blocked = read("checkpoint")["compared"]["blocked_of_copy_to_host"]
    for figure in (
        f"from {waits(row(8, LANES[0], 'annotations'))}",
        f"to {waits(row(8, LANES[0], 'fsdp_jax'))}",
        f"{waits(row(64, LANES[0], 'fsdp_jax'))} without",
        f"{waits(row(64, LANES[0], 'fsdp_jax_hsdp'))} with a replica",
        f"exposes {100 * split['exposed_of_step']:.1f} % of its step",
        f"{100 * in_parts['exposed_of_step']:.1f} % in two parts",
        "{:,.0f} in place of {:,.0f} ms".format(*dropless),
        f"and {capacity:,.0f} ms where each expert",
        f"for {blocked:.2f} of the time that a copy",
    ):
        assert figure in said(TUNE), figure


def test_estimates_are_off_by_what_is_said():
    held_back = read("validate_planner")["held_back"]
    there = (
        f"median error {held_back['median']:.1%}, 90th percentile "
        f"{held_back['percentile_90']:.1%}, of {held_back['rows']} runs"
    )
    assert there in said("README.md")


def test_fine_tuning_equals_trl_as_said():
    found = read("trl_comparison")
    sft, dpo = (found[part]["largest_relative_difference"] for part in ("sft", "dpo"))
    text = f"at most {sft:.1e} of the loss, over 20 steps of DPO by {dpo:.1e}"
    assert text.replace("e-0", "e-") in said("docs/pages/how-to/fine-tune.md")


def test_the_table_of_published_steps_is_that_of_the_report():
    found = read("validate_planner")
    kinds = {"test": "held back", "fit": "fit"}
    for source, errors in found["by_source"].items():
        cells = [kinds[errors["split"]], f"{errors['rows']}"]
        cells += [f"{errors[key]:.1%}" for key in ("median", "percentile_90")]
        repository = source.split(":")[0].split("@")[0].split(" ")[0]
        assert f"| {' | '.join(cells)} |" in said(MEASURED), source
        assert repository in said(MEASURED)
    for part, name in (("held_back", "all held back"), ("all", "all")):
        cells = [f"{found[part]['rows']}"]
        cells += [f"{found[part][key]:.1%}" for key in ("median", "percentile_90")]
        assert f"| {name} | | {' | '.join(cells)} |" in said(MEASURED)
    built, listed = found["all"]["rows"], found["all"]["rows"] + len(found["not_built"])
    assert f"These are {built} of the {listed} rows" in said(MEASURED)


def test_the_memory_of_published_steps_is_as_said():
    page = said(MEASURED)
    rows = read("validate_planner")["memory"]
    assert len(rows) == 13
    for row in rows:
        published, predicted = row["published_gib"], row["predicted_gib"]
        cells = f"{published:.1f} GiB | {predicted:.1f} GiB ({row['error']:+.1%})"
        assert cells in page, cells


@pytest.mark.parametrize(
    "decoder, digits, row",
    [
        *((decoder, digits, 0) for decoder, digits in LARGER.items()),
        *((decoder, 1, 1) for decoder in IN_PARTS),
    ],
)
def test_the_larger_decoders_wait_as_said(decoder, digits, row):
    lanes = [read(f"overlap_{decoder}_jax{lane}")["rows"][row] for lane in LANES]
    exposed = " / ".join(f"{lane['exposed_of_step']:.{digits}%}" for lane in lanes)
    steps, floors = (
        " / ".join(f"{lane[figure]:,.0f}" for lane in lanes)
        for figure in ("step_ms", "floor_ms")
    )
    assert f"{exposed} of {steps} ms | floor {floors} ms" in said(MEASURED)


def test_experts_with_many_tokens_are_within_a_twentieth_of_their_floor():
    lanes = [read(f"overlap_mixtral-8x7b-16_jax{lane}")["rows"] for lane in LANES]
    for row in (row for rows in lanes for row in rows):
        assert row["step_ms"] <= 1.05 * row["floor_ms"]
    memory = " / ".join(f"{rows[0]['memory_gb']:.1f}" for rows in lanes)
    assert f"{memory} GB" in said(MEASURED)


def test_the_pipeline_bubble_is_as_said():
    (found,) = read("overlap_llama-3-70b-pp_jax0.10.2")["rows"]
    assert f"bubble is {found['bubble']:.1%}" in said(MEASURED)


def test_experts_take_what_is_said():
    rows = {(row["dispatch"], row["product"]): row for row in read("experts")["rows"]}
    for dispatch in ("dropless", "capacity 1.0"):
        before = rows[dispatch, "ragged_dot"]
        after = rows[dispatch, "grouped_matmul"]
        modelled = " as modelled" if dispatch == "dropless" else ""
        assert (
            f"| {dispatch} | {before['memory_gb']:.1f} GB, {before['step_ms']:,.0f} ms"
            f"{modelled} | {after['memory_gb']:.1f} GB, {after['step_ms']:,.0f} ms |"
        ) in said(MEASURED)
        assert after["memory_predicted_gb"] == pytest.approx(after["memory_gb"], 0.06)


def test_imports_take_what_is_said():
    found = read("import")["compared"]
    for figure in (
        f"cold import, kernels transposed and layers stacked: "
        f"{found['cold_of_raw_read']:.2f}x the time",
        f"warm import: {found['warm_of_safetensors_device_put']:.2f}x the time",
        f"bridge takes {found['cold_of_transformers']:.2f}x its time cold, "
        f"{found['warm_of_transformers']:.2f}x warm",
        *(
            f"bridge takes {found[f'cold_of_{peer}']:.2f}x its time cold, "
            f"{found[f'warm_of_{peer}']:.2f}x warm, "
            f"{found[f'peak_of_{peer}']:.2f}x its memory"
            for peer in ("orbax", "orbax_as_fsdp")
        ),
        f"beside the arrays: {found['peak_above_destination_mb']:.0f} MB",
        f"reads {found['disk_of_an_eighth']:.3f}x its bytes",
        f"export: {found['export_speed_of_raw_write']:.2f}x the speed",
        f"{found['conversion_speed_of_raw_copy']:.2f}x the speed, "
        f"{found['conversion_resident_mb']:.0f} MB",
    ):
        assert figure in said(MEASURED), figure
    cold, peak = found["cold_of_raw_read"], found["peak_above_destination_mb"]
    there = f"{cold:.2f}x the time of a raw read; {peak:.0f} MB beside the arrays"
    assert there in said("README.md")


def test_checkpoints_take_what_is_said():
    found = read("checkpoint")
    compared, peak = found["compared"], found["peak_memory_gb"]["fsdp_jax"]
    beside = peak["load"] - found["gigabytes"]
    for peer in ("dd", "orbax", "np_save", "torch_dcp"):
        save, load = compared[f"save_of_{peer}"], compared[f"load_of_{peer}"]
        assert f"| {save:.2f}x | {load:.2f}x |" in said(MEASURED), peer
    for figure in (
        f"| {compared['save_of_no_checksums']:.2f}x (the rounds differ by more) |",
        f"{compared['blocked_of_copy_to_host']:.2f} of the time that a copy",
        f"a load takes {beside:.2f} GB beside the state",
    ):
        assert figure in said(MEASURED), figure
    there = (
        f"{compared['save_of_dd']:.2f}x the speed of `dd`, "
        f"{compared['save_of_orbax']:.1f}x that of Orbax; "
        f"loads at {compared['load_of_orbax']:.1f}x that of Orbax, "
        f"{compared['load_of_torch_dcp']:.2f}x that of torch DCP"
    )
    assert there in said("README.md")


def test_no_committed_step_was_lost_as_said():
    found = read("torture")
    kills, flips = found["kills"], found["flips"]
    committed, lost = kills["steps_committed"], kills["steps_lost"]
    assert lost == 0
    assert f"saves killed {kills['rounds']} times" in said("README.md")
    assert f"of {committed:,} committed steps none lost" in said("README.md")
    assert f"none of {flips['rounds']:,} flipped bits" in said(MEASURED)
    assert f"{committed:,} steps committed in {kills['rounds']} runs" in said(MEASURED)


def test_object_stores_take_what_is_said():
    found = read("checkpoint_stores")
    for scheme, of in found["object_stores"].items():
        speeds, times = of["gb_per_s"], of["in_the_background"]
        row = (
            f"| `{scheme}://` | {speeds['save']:.3f} | {speeds['load']:.3f} "
            f"| {times['blocked_s']:.2f} s | {times['rest_s']:.1f} s |"
        )
        assert row in said(MEASURED), row
    assert not found["forced"]  # An idle machine.


def test_the_page_on_elastic_jobs_says_what_the_kills_did():
    found = read("elastic")
    text = said("docs/pages/how-to/elastic.md")
    assert f"killed {found['killed']} processes" in text
    assert f"{found['killed']} kills" in said("README.md")
    assert found["steps_lost"] == 0 and "No saved step was lost" in text
    # Of 1.15e-7 "at most 1.2e-7" is said.
    assert 1.1e-7 < found["largest_difference"] <= 1.2e-7
    assert "by at most 1.2e-7" in text
    seconds = f"{found['median_seconds']:.1f} s later in the median"
    assert f"{seconds} and {found['most_seconds']:.1f} s at most" in text
    found = read("elastic_more_victims")
    assert found["killed_of"] == {"two at once": 6, "rank 0": 6}
    assert "processes at once 6 times, and 6 times rank 0" in text
    assert found["killed_in"]["load"] == 6 and found["steps_lost"] == 0
    assert 1.1e-7 < found["largest_difference"] <= 1.2e-7
    assert f"after {found['most_seconds']:.1f} s at most" in text


def test_the_page_on_corruption_says_what_a_replay_costs():
    found = read("replay_cost")
    assert found["every"] == 100 and found["model"]["rows"] == 8 * 2048
    assert 0 < sum(found["of_step"].values()) < 0.02
    text = said("docs/pages/how-to/silent-corruption.md")
    assert (
        f"in 100 takes {found['of_step']['replaying']:.1%} on average, and the digests "
        f"between steps {found['of_step']['watching']:.1%}"
    ).replace("%", " %") in text


def test_where_a_step_is_computed_is_as_said():
    found = row(8, LANES[0], "fsdp_jax")
    text = f"computes for {found['compute_ms']:.0f} ms, and for {found['floor_ms']:.0f}"
    assert text in said(MEASURED)
    (long,) = read("overlap_llama-3-8b-cp_jax0.10.2")["rows"]
    assert f"communication takes {long['wire_ms']:.0f} ms" in said(MEASURED)
    split = read("overlap_llama-3-70b_jax0.10.2")["rows"][0]
    share = f"{100 * split['exposed_of_step']:.1f} % of a modelled 70B step"
    assert share in said("docs/pages/explanation/limits.md")


def test_what_was_fitted_and_what_was_left_out_is_as_said():
    found, page = read("validate_planner"), said(MEASURED)
    fit = found["fit"]
    cells = f"{fit['rows']} | {fit['median']:.1%} | {fit['percentile_90']:.1%} |"
    assert f"| all for the fit | | {cells}" in page
    left = [case["reason"] for case in found["not_built"]]
    kept = found["held_back"]["rows"]
    assert f"and {kept} of 42 that are held back: {len(left)} are not built" in page
    assert not any("not compiled yet" in reason for reason in left)
    sources = found["by_source"].items()
    (mosaic,) = [of["rows"] for name, of in sources if "llm-foundry" in name]
    assert f"{fit['rows'] - mosaic} rows of compiled steps" in page
    assert f"the {mosaic} of llm-foundry" in page
    gpus = found["gpus"]
    hoppers = sum(count for gpu, count in gpus.items() if gpu != "b200")
    assert gpus["b200"] == 1
    limits = said("docs/pages/explanation/limits.md")
    assert f"compared with {hoppers} published runs, B200 with one" in limits


def test_the_worst_published_steps_are_those_said():
    page, rows = said(MEASURED), read("validate_planner")["rows"]
    errors = {(r["source"].split("@")[0].split(":")[0], r["model"]): r for r in rows}
    worst = sorted((r for r in rows if r["split"] == "test"), key=lambda r: -r["error"])
    slowest, fastest = worst[0], worst[-1]
    (b200,) = (row["error"] for row in rows if row["gpu"] == "B200")
    assert "Megatron-Bridge" in slowest["source"]
    assert f"is {100 * slowest['error']:.0f} % too slow" in page
    assert "eager" in fastest["system"] and fastest["gpus"] == "128"
    assert f"128 H100s is {-100 * fastest['error']:.0f} % too fast" in page
    assert f"not of this row, it is {-100 * b200:.0f} %" in page
    titan = [row for row in rows if "torchtitan" in row["source"]]
    long = [row["error"] for row in titan if int(row["seq"]) > 8192]
    span = f"{-100 * min(long):.0f} % too fast to {100 * max(long):.0f} % too slow"
    assert f"Long rows are {span}" in page
    axlearn = errors["apple/axlearn", "fuji-70B-v2 (Llama2)"]["error"]
    assert f"axlearn's 70B for the fit is {-100 * axlearn:.0f} % too fast" in page


def test_what_was_moved_and_killed_is_as_said():
    found = read("torture")
    kinds = ("chunk_moved", "file_of_another_step", "folders_exchanged")
    moved = sum(found[kind]["rounds"] for kind in kinds)
    for page in (MEASURED, "docs/pages/explanation/what-holds.md"):
        assert f"{moved} moved chunks, files" in said(page) or (
            f"{moved} chunks, files and folders moved" in said(page)
        )
    assert f"{moved} moved chunks" in said("docs/pages/explanation/security.md")
    rounds = [
        found[kind]["rounds"] for kind in ("rollbacks", "second_writers", "full_disk")
    ]
    assert "{} rollbacks, {} second writers and {} full disks".format(*rounds) in said(
        MEASURED
    )
    assert found["full_disk"]["previous_step_spoilt"] == 0


def test_annotations_alone_are_slower_in_scans_as_said():
    rows = {(r["model"], r["gpus"], r["order"]): r for r in read("foreign")["rows"]}
    ratios = [
        rows[m, 64, "annotations"]["step_ms"] / rows[m, 64, "saved"]["step_ms"]
        for m in ("scanned", "reference")
    ]
    assert "are {:.1f} and {:.1f} times as fast on 64".format(*ratios) in said(BRING)


def test_units_that_save_all_are_beside_annotations_as_said():
    unrolled = [r for r in read("foreign")["compared"] if r["model"] != "scanned"]
    faster = [one["saved_faster_than_annotations"] for one in unrolled]
    memory = [one["gb_saved"] / one["gb_of_annotations"] for one in unrolled]
    assert (
        f"are {min(faster):.2f} to {max(faster):.2f} times as fast as by annotations, "
        f"with {min(memory):.2f} to {max(memory):.2f} times the memory"
    ) in said(BRING)
    rows = [r for r in read("foreign")["rows"] if r["order"] == "saved"]
    parts = [row["predicted_gb"] / row["compiled_gb"] for row in rows]
    assert {row["units_unsharded"] for row in rows} == {2}
    assert f"is {min(parts):.2f} to {max(parts):.2f} of the compiled one" in said(BRING)


def test_compiling_with_units_ahead_takes_what_is_said():
    spans = [
        f"{row['times_as_long']:.2f} for `{row['model']}`"
        for row in read("foreign")["compile_times"]
    ]
    assert f"that with `prefetch=0` times {' and '.join(spans)}" in said(BRING)


def test_there_are_as_many_tests_of_hostile_files_as_said():
    recorded = json.loads((ROOT / "tests" / "durations.json").read_text())
    count = sum(len(recorded[file]) for file in recorded if "hostile" in file)
    assert f"{count} tests are of damaged or hostile" in said(SECURITY)
    assert f"hostile checkpoints, in {count} tests," in said(HOLDS)


def test_as_many_compositions_are_as_planned_as_said():
    found = read("composition_audit")
    assert found["refused"] == 1
    assert (
        f"Of {found['cases']} models, plans and runs that are put together at random, "
        f"`tp` among them, and compiled for H200s, {found['as_planned']} do what their "
        "plans say, and one is refused before"
    ) in said(HOLDS)


def test_the_readme_says_the_budget_of_the_light_tests():
    assert f"at most {tiers.BUDGET:,.0f} CPU-seconds" in said("README.md")


def test_tokens_once_a_node_and_in_float8_take_what_is_said():
    weights, both, neither = (
        {row["batch_parts"]: row for row in read(f"overlap_{name}_jax0.10.2")["rows"]}
        for name in (
            "deepseek-v3-by-node-float8-gather",
            "deepseek-v3-by-node-float8",
            "deepseek-v3",
        )
    )
    seconds, floors = (
        [row["step_ms"] / 1e3 for row in (both[2], neither[2], weights[2])],
        [row["step_ms"] / row["floor_ms"] for row in (both[2], weights[2])],
    )
    page = said("docs/pages/how-to/tensor-and-expert-parallelism.md")
    assert (
        f"take {seconds[0]:.1f} s a step, {floors[0]:.2f} times its floor, in place of "
        f"{seconds[1]:.1f} s with `batch_parts=2` alone"
    ) in page
    assert f"{seconds[2]:.1f} s and {floors[1]:.2f} times." in page
    # What is hidden slows what hides it.
    slower = read("overlap_deepseek-v3-by-node-float8-gather_jax0.10.2")["cost_model"]
    hidden = weights[2]["wire_ms"] * slower["overlap_slowdown"]
    bound = 1 + hidden / weights[2]["floor_ms"]
    assert f"it would take {bound:.2f} times the floor" in page


def test_rows_between_nodes_take_as_long_by_both_versions_of_jax():
    name = "overlap_deepseek-v3-by-node-float8-gather"
    older, newer = (
        min(row["step_ms"] for row in read(f"{name}_{jax}")["rows"]) / 1e3
        for jax in ("jax0.10.2", "jax0.12.0.1")
    )
    assert abs(newer / older - 1) < 0.01
    assert f"takes {newer:.1f} s, by jax 0.10.2 {older:.1f} s" in said(LIMITS)


def test_training_with_products_in_float8_comes_to_what_is_said():
    small, large = (read("float8_products")["models"][name] for name in ("0.9m", "5m"))
    last, held_out = (
        [100 * (1 - one["float8_over_bfloat16"][name]) for one in (small, large)]
        for name in ("last_loss", "held_out_loss")
    )
    wide = large["runs"]["bfloat16"]
    for sentence in (
        f"tenth is {last[0]:.1f} and {last[1]:.1f} % lower than in bfloat16",
        f"is {held_out[0]:.1f} % lower and {-held_out[1]:.1f} % higher",
        f"{wide['last_loss']:.2f} against {wide['held_out_loss']:.2f} held out",
        f"{large['params'] / 1e6:.1f} million parameters",
    ):
        assert sentence in said("docs/pages/how-to/low-precision.md")


def test_what_is_said_of_saving_products_alone_is_what_was_predicted():
    parts = read("gpu_check_predicted")["parts"]
    few, all_, none = (parts[name] for name in ("1b", "1b_all", "1b_recompute"))
    steps = [part["step_s"] * 1e3 for part in (few, all_)]
    assert "{:.0f} in place of {:.0f} ms".format(*steps) in said(TUNE)
    sizes = [part["compiled_bytes"] / 1e9 for part in (few, all_)]
    assert "{:.1f} in place of {:.1f} GB".format(*sizes) in said(TUNE)
    assert f"{none['step_s'] * 1e3:.0f} ms with nothing saved" in said(TUNE)
