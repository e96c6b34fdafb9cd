"""Ours and the paper's, side by side."""

from tables.records import records

GPU = "NVIDIA H200"  # of the speeds in the README
CARD = "src/thoughtbubbles/assets/bubbles-7m/README.md"


PAPER = [  # what, plain GPT and r = 2: the paper's tables on scaling, scale-up and wall-clock time
    ("perplexity, 150M parameters, 2.5B tokens of OpenWebText", "24.51", "23.78"),
    ("perplexity, 772M parameters, 2.5B tokens of OpenWebText", "21.22", "20.19"),
    ("perplexity, 1.9B parameters, 40B tokens", "15.03", "12.09"),
    ("forward + backward, 1.9B, 8 × 512 tokens, H100", "234 ms", "327 ms"),
]


def readme_table() -> str:
    """Ours and the paper's side by side."""
    found = {record["machine"]: record for record in records("train_step")}
    if GPU not in found:
        raise ValueError(
            f"benchmarks/results has no times of training steps on {GPU}: run benchmarks/train_step.py there"
        )
    speed = found[GPU]
    gpu = GPU.removeprefix("NVIDIA ")
    passes = {case["name"]: case["forward_backward"]["milliseconds"] for case in speed["cases"] if "step" in case}
    return "\n".join(
        [
            "| | | plain GPT | forks by learned scores (r = 2) |",
            "| --- | --- | --- | --- |",
            shipped_row(),
            f"| ours | forward + backward, 1.9b, 8 × 512 tokens, {gpu} | {passes['1.9b-plain']:.0f} ms | "
            f"{passes['1.9b-r2-causal-residual']:.0f} ms |",
            *(f"| paper | {what} | {plain} | {bubbles} |" for what, plain, bubbles in PAPER),
            "",
            f"Forward + backward: [speed](docs/guides/speed.md#numbers), at {speed['commit']}.",
        ]
    )


def shipped_row() -> str:
    """The model in the package, at its own budget, beside its plain counterpart."""
    (record,) = records("shipped")
    models = record["models"]
    tokens = f"{models['bubbles-7m']['training']['tokens'] / 1e6:.0f}M"
    bits = [models[name]["scores"]["2"]["bits_per_byte"] for name in ("bubbles-7m-plain", "bubbles-7m")]
    shown = " | ".join(f"{each:.4f}" for each in bits)
    return f"| ours | bits per byte of [bubbles-7m]({CARD}), 6.9M parameters, {tokens} tokens | {shown} |"
