"""Parts of the model: the loss, causal selection, memory; and what all of it brings."""

from tables.records import records, source


def loss_table() -> str:
    lines = [
        "| machine | rows × width × vocabulary | merge | extra peak memory | dense form | time / dense form |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for record in records("loss"):
        for case in record["cases"]:
            size = f"{case['rows']} × {case['width']} × {case['vocabulary']}"
            memory = f"{case['extra_peak_MB']:.0f} MB | {case['dense_extra_peak_MB']:.0f} MB"
            lines.append(f"| {record['machine']} | {size} | {case['merge']} | {memory} | {case['time_ratio']:.2f}× |")
    return "\n".join([*lines, "", *(f"- {record['machine']}: {source(record)}" for record in records("loss"))])


def selection_table() -> str:
    lines = [
        "| machine | rows | | forward, causal | forward, block | causal rule alone | share of the forward |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    found = records("selection") + records("selection-compiled")
    for record in found:
        time = record["milliseconds"]
        shown = [f"{time[name]:.1f} ms" for name in ("forward, causal", "forward, block")]
        kind = "compiled" if record["compiled"] else "eager"
        lines.append(
            f"| {record['machine']} | {record['rows']} | {kind} | {' | '.join(shown)} | "
            f"{time['causal rule alone']:.2f} ms | {record['share_of_forward']:.1%} |"
        )
    behaviour = [
        f"- {record['machine']}, {'compiled' if record['compiled'] else 'eager'}: {source(record)}. "
        f"Causal selection used {record['budget_used']:.1%} of the budget; with bfloat16 products "
        f"{record['decisions_that_differ_in_bfloat16']:.1%} of decisions differ from float32, and the loss by "
        f"{abs(record['loss_difference_in_bfloat16']):.1e} (random weights)."
        for record in found
    ]
    return "\n".join([*lines, "", *behaviour])


def memory_table() -> str:
    lines = ["| machine | model | rows | predicted | measured |", "| --- | --- | --- | --- | --- |"]
    for record in records("memory"):
        for case in record["cases"]:
            sizes = f"{case['predicted_GiB']:.2f} GiB | {case['measured_GiB']:.2f} GiB"
            lines.append(f"| {record['machine']} | {case['model']} | {case['rows']} | {sizes} |")
    return "\n".join([*lines, "", *(f"- {record['machine']}: {source(record)}" for record in records("memory"))])


def chunks_table() -> str:
    lines = [
        "| rows × width × vocabulary | rows per chunk | extra peak | time / dense form: one row per token | mixture |",
        "| --- | --- | --- | --- | --- |",
    ]
    found = records("loss-chunks")
    for record in found:
        cases = {(case["rows"], case["chunk_rows"], case["merge"]): case for case in record["cases"]}
        for rows, chunk in sorted({key[:2] for key in cases}):
            single, mixture = cases[rows, chunk, "one row per token"], cases[rows, chunk, "mixture"]
            size = f"{rows} × {single['width']} × {single['vocabulary']}"
            times = f"{single['time_ratio']:.2f}× | {mixture['time_ratio']:.2f}×"
            lines.append(f"| {size} | {chunk} | {single['extra_peak_MB']:.0f} MB | {times} |")
    return "\n".join([*lines, "", *(f"- {record['machine']}: {source(record)}" for record in found)])


def effect_table() -> str:
    found = records("effect")
    steps = sorted({int(step) for record in found for run in record["runs"] for step in run["curve"]})
    lines = [
        f"| machine | model | seed | {' | '.join(f'step {step}' for step in steps)} |",
        "| --- | --- | --- |" + " --- |" * len(steps),
    ]
    for record in found:
        for run in record["runs"]:
            curve = " | ".join(f"{run['curve'][str(step)]:.4f}" for step in steps)
            lines.append(f"| {record['machine']} | {run['variant']} | {run['seed']} | {curve} |")
    return "\n".join([*lines, "", *(f"- {record['machine']}: {source(record)}" for record in found)])
