"""Training steps and runs."""

from typing import Any

from common import slug

from tables.records import DOCS, records, source

BARE_STEP = {  # a case of train.py: the case of train_step.py with the same model
    "150m-plain": "150m-plain",
    "150m-causal": "150m-r2-causal-mixture",
    "150m-paper": "150m-r2-block-mixture",
    "1.9b-plain": "1.9b-plain",
    "1.9b-causal": "1.9b-r2-causal-residual",
    # The names of recipes in earlier results.
    "150m-r2": "150m-r2-causal-mixture",
    "150m-r2-block": "150m-r2-block-mixture",
    "150m-r2-owt": "150m-r2-causal-mixture",
    "1.9b-r2": "1.9b-r2-causal-residual",
}


def train_table() -> str:
    lines = [
        "| machine | commit | recipe | rows × 512 tokens | tokens/s | of the bare step | TFLOP/s | MFU | peak memory | "
        "time to first step |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    found = records("train")
    bare = {
        (record["machine"], case["name"]): case["step"]["tokens_per_second"]
        for record in records("train_step")
        for case in record["cases"]
        if "step" in case
    }
    for record in found:
        for case in record["cases"]:
            first = case.get("seconds_to_the_first_step")
            rate = bare.get((record["machine"], BARE_STEP.get(case["recipe"], "")))
            # Older results have no first step: they are from older code than the measured bare step.
            share = "–" if rate is None or first is None else f"{case['tokens_per_second'] / rate:.1%}"
            lines.append(
                f"| {record['machine']} | {record['commit'][:7]} | `{case['recipe']}` | {case['rows']} | "
                f"{case['tokens_per_second']:,.0f} | {share} | {case['tflops']:.0f} | {case['mfu']:.1%} | "
                f"{case['peak_memory_GiB']:.1f} GiB | {'–' if first is None else f'{first:.0f} s'} |"
            )
    behaviour = [f"- {record['machine']}: {source(record)}.{train_check(record)}" for record in found]
    return "\n".join([*lines, "", *behaviour])


def train_check(record: dict[str, Any]) -> str:
    if "resumed_has_the_same_bits" not in record:
        return ""
    resumed = "bit-identical" if record["resumed_has_the_same_bits"] else "close"
    return (
        f" Resumed against uninterrupted: {resumed}; FSDP2 on one rank against no FSDP2: losses within "
        f"{record['largest_loss_difference_fsdp2_on_one_rank']:.1e} over 8 steps."
    )


def train_step_table() -> str:
    found = records("train_step")
    if not found:
        return "Not measured yet."
    parts = []
    for record in found:
        parts += [
            f"{record['machine']}; one large matrix product: {record['product_tflops']:.3g} TFLOP/s.",
            "",
            "| case | rows × tokens | forward + backward | full step | tokens/s | TFLOP/s | of product rate | "
            "peak memory | compilation | same bits twice |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
            *(train_step_row(case) for case in record["cases"]),
            "",
            "| ratio | | |",
            "| --- | --- | --- |",
        ]
        for bar in record["bars"]:
            below = "" if bar["over"] == bar["case"] else f" / `{bar['over']}`"
            parts.append(f"| {bar['what']} | `{bar['case']}`{below} | {bar['ratio']:.3f} |")
        parts += ["", *train_step_facts(record), "", *profile_table(record)]
    return "\n".join(parts)


def profile_table(record: dict[str, Any]) -> list[str]:
    """Milliseconds of a full step by kind of kernel, one column per case."""
    cases = [case for case in record["cases"] if case.get("profile")]
    if not cases:
        return []
    kinds = {kind["name"]: None for case in cases for kind in case["profile"]["kinds"]}
    found = [{kind["name"]: kind for kind in case["profile"]["kinds"]} for case in cases]
    lines = [
        "| ms of a full step | " + " | ".join(f"`{case['name']}`" for case in cases) + " |",
        "| --- |" + " --- |" * len(cases),
    ]
    for kind in kinds:
        cells = (f"{each[kind]['ms']:.1f} ({each[kind]['share']:.0%})" if kind in each else "–" for each in found)
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return [*lines, "| all | " + " | ".join(f"{case['profile']['ms']:.1f}" for case in cases) + " |"]


def train_step_row(case: dict[str, Any]) -> str:
    if "error" in case:
        return f"| `{case['name']}` | {case['error']} |" + " |" * 8
    passes, step = case["forward_backward"], case["step"]
    memory = "–" if step["peak_memory_GiB"] is None else f"{step['peak_memory_GiB']:.1f} GiB"
    return (
        f"| `{case['name']}` | {case['rows']} × {case['tokens']} | {passes['milliseconds']:.1f} ms "
        f"({passes['low']:.1f}–{passes['high']:.1f}) | {step['milliseconds']:.1f} ms | "
        f"{step['tokens_per_second']:,.0f} | {passes['tflops']:.4g} | {passes['share_of_product']:.1%} | {memory} | "
        f"{case['compile_seconds']:.0f} s | {'yes' if case['same_bits_twice'] else 'no'} |"
    )


def train_step_facts(record: dict[str, Any]) -> list[str]:
    checks = [case["check"] for case in record["cases"] if "error" not in case]
    facts = f"- {record['machine']}: {source(record)}, Triton {record['triton'] or 'not installed'}."
    if checks:
        loss, gradient, decisions = (max(check[name] for check in checks) for name in ("loss", "gradient", "decisions"))
        facts += (
            f" Largest differences from the reference path in float32: loss {loss:.1e}, gradient {gradient:.1e} (both "
            f"relative), {decisions:.2%} of the candidates decided differently."
        )
    images = DOCS.glob(f"figures/train_step-{slug(record['machine'])}.png")
    return [facts, *(f"\n![TFLOP/s and milliseconds of each case](../figures/{image.name})" for image in images)]
