"""Writes the tables of the docs from the files in benchmarks/results, between the markers that name them.

python benchmarks/table.py            rewrite the pages
python benchmarks/table.py --check    exit 1 if a page is not up to date
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from common import RESULTS, slug

DOCS = RESULTS.parents[1] / "docs"


def records(benchmark: str) -> list[dict[str, Any]]:
    found = (json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json")))
    return [record for record in found if record["benchmark"] == benchmark]


def source(record: dict[str, Any]) -> str:
    return f"`{record['command']}` at {record['commit']}, PyTorch {record['torch']}"


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


def prepare_table() -> str:
    lines = [
        "| machine | processes | throughput | ratio | concurrent ratio | CPU time ratio | main process | "
        "memory: main, each worker |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    found = records("prepare")
    for record in found:
        for case in record["cases"]:
            alone = case["processes"] == 1
            memory = case["main_peak_MB"]
            main = "does everything" if alone else f"{case['main_cpu_share']:.0%} of a core"
            worker = "–" if alone else f"{case['worker_peak_MB']} MB"
            lines.append(
                f"| {record['machine']} | {case['processes']} | {case['MB_per_second']:.1f} MB/s, "
                f"{case['tokens_per_second'] / 1e6:.1f} M tokens/s | {case['ratio']:.2f} | "
                f"{case['ratio_at_once']:.2f} | {case['cpu_ratio']:.2f} | {main} | {memory} MB, {worker} |"
            )
    facts = [
        f"- {record['machine']}: {source(record)}; {record['bytes'] / 1e6:.0f} MB of text, "
        f"tiktoken alone {record['tiktoken_MB_per_second']:.1f} MB/s"
        for record in found
    ]
    return "\n".join([*lines, "", *facts])


def loader_table() -> str:
    found = records("loader")
    lines = ["| machine | | million tokens/s |", "| --- | --- | --- |"]
    for record in found:
        for case in record["cases"]:
            lines.append(f"| {record['machine']} | {case['case']} | {case['million_tokens_per_second']:.0f} |")
    return "\n".join([*lines, "", *(f"- {record['machine']}: {source(record)}" for record in found)])


BARE_STEP = {  # a case of train.py: the case of train_step.py with the same model
    "150m-plain": "150m-plain",
    "150m-r2": "150m-r2-causal-mixture",
    "150m-r2-block": "150m-r2-block-mixture",
    "150m-r2-owt": "150m-r2-causal-mixture",  # its name in earlier results
    "1.9b-plain": "1.9b-plain",
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


CARD = "src/thoughtbubbles/assets/bubbles-7m/README.md"
PAPER = [  # what, plain GPT and r = 2: the paper's tables on scaling, scale-up and wall-clock time
    ("perplexity, 150M parameters, 2.5B tokens of OpenWebText", "24.51", "23.78"),
    ("perplexity, 772M parameters, 2.5B tokens of OpenWebText", "21.22", "20.19"),
    ("perplexity, 1.9B parameters, 40B tokens", "15.03", "12.09"),
    ("forward + backward, 1.9B, 8 × 512 tokens, H100", "234 ms", "327 ms"),
]


def readme_table() -> str:
    """Ours and the paper's side by side, with the control that the paper has not run."""
    (effect,) = records("effect")
    runs = {run["variant"]: run for run in effect["runs"]}
    (speed,) = (record for record in records("train_step") if record["machine"] == effect["machine"])
    passes = {case["name"]: case["forward_backward"]["milliseconds"] for case in speed["cases"] if "step" in case}
    gpu = effect["machine"].removeprefix("NVIDIA ")
    tokens = f"{runs['plain']['steps'] * 64 * 512 / 1e6:.0f}M"

    def row(what: str, number: str, form: str) -> str:
        return (
            f"| ours | {what} | " + " | ".join(form.format(runs[v][number]) for v in ("plain", "gate", "causal")) + " |"
        )

    return "\n".join(
        [
            "| | | plain GPT | scores, no forks (r = 1) | bubbles (r = 2) |",
            "| --- | --- | --- | --- | --- |",
            row(f"validation loss, 64M parameters, {tokens} tokens", "validation_loss", "{:.3f}"),
            row(f"training tokens/s in these runs, {gpu}", "tokens_per_second", "{:,.0f}"),
            shipped_row(),
            f"| ours | forward + backward, 1.9b, 8 × 512 tokens, {gpu} | {passes['1.9b-plain']:.0f} ms | – | "
            f"{passes['1.9b-r2-causal-residual']:.0f} ms |",
            *(f"| paper | {what} | {plain} | – | {bubbles} |" for what, plain, bubbles in PAPER),
            "",
            f"Validation loss: {source(effect)}; the same real text (encyclopedia, books, articles), twice; one seed "
            f"each. Forward + backward: [speed](docs/guides/speed.md#numbers), at {speed['commit']}.",
        ]
    )


def shipped_row() -> str:
    """The model in the package, at its own budget, beside its plain counterpart."""
    (record,) = records("shipped")
    models = record["models"]
    tokens = f"{models['bubbles-7m']['training']['tokens'] / 1e6:.0f}M"
    gate = models.get("bubbles-7m-gate")
    bits = [
        models["bubbles-7m-plain"]["scores"]["2"],
        None if gate is None else gate["scores"]["1"],
        models["bubbles-7m"]["scores"]["2"],
    ]
    shown = " | ".join("–" if each is None else f"{each['bits_per_byte']:.4f}" for each in bits)
    return f"| ours | bits per byte of [bubbles-7m]({CARD}), 6.9M parameters, {tokens} tokens | {shown} |"


def decode_table() -> str:
    cpu = [record for record in records("decode") if "models" in record]
    gpu = [record for record in records("decode") if "rows" in record]
    lines = [
        "| machine | 150m | cached | uncached / cached | largest difference from the parallel forward |",
        "| --- | --- | --- | --- | --- |",
    ]
    for record in cpu:
        for name, model in record["models"].items():
            gap = model["difference_from_the_parallel_forward"]["largest_log_probability"]
            lines.append(
                f"| {record['machine']} | {name} | {model['cached_tokens_per_second']:.1f} tokens/s | "
                f"{model['recomputed_over_cached']:.1f}× | {gap:.1e} |"
            )
    lines += [
        "",
        "| machine | rows | 1.9b | per step | steps: tokens/s | whole loop: tokens/s | share of bandwidth: steps | "
        "loop | cache |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for record in gpu:
        for rows, case in record["rows"].items():
            for name, model in ((name, model) for name, model in case.items() if isinstance(model, dict)):
                lines.append(
                    f"| {record['machine']} | {rows} | {name} | {model['milliseconds_per_step']:.3f} ms | "
                    f"{model['tokens_per_second_of_steps']:,.0f} | {model['tokens_per_second']:,.0f} | "
                    f"{model['share_of_copy_bandwidth']:.0%} | "
                    f"{model['share_of_copy_bandwidth_of_the_whole_loop']:.0%} | "
                    f"{model['cache']['counted_bytes'] / 2**20:,.0f} MiB |"
                )
    lines += [
        "",
        "| machine | engine, 1.9b | requests at a time | tokens/s | of prompts | ms per step | bare step | "
        "of bare steps |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for record in gpu:
        for name, found in record["engine"].items():
            lines.append(
                f"| {record['machine']} | {name} | {found['rows']} | {found['tokens_per_second']:,.0f} | "
                f"{found['tokens_of_prompts_per_second']:,.0f} | {found['milliseconds_per_step']:.2f} | "
                f"{found['milliseconds_of_a_bare_step']:.2f} | {found['share_of_bare_steps']:.0%} |"
            )
    facts = [
        f"- {record['machine']}: {source(record)}. Bubbles over plain, both cached: "
        f"{record['bubbles_over_plain_cached']:.2f}×."
        for record in cpu
    ]
    for record in gpu:
        bubbles_over, private_over = (
            ", ".join(f"{case[name]:.2f}× ({rows})" for rows, case in record["rows"].items())
            for name in ("bubbles_over_plain", "private_over_plain")
        )
        bubbles = record["rows"]["1"]["bubbles, r = 2"]
        gap = bubbles["difference_from_the_parallel_forward"]
        facts.append(
            f"- {record['machine']}: {source(record)}. A step with bubbles over a plain one (rows): {bubbles_over}; "
            f"with private forks: {private_over}. Copy: {record['copy_bytes_per_second'] / 1e12:.2f} TB/s. Cache: "
            f"{bubbles['cache']['predicted_bytes']:,} bytes predicted, {bubbles['cache']['counted_bytes']:,} measured. "
            f"In bfloat16, steps against the parallel forward over 64 tokens: "
            f"{gap['share_of_tokens_with_other_streams']:.1%} of the tokens have another number of streams, and the "
            f"mean loss differs by {abs(gap['mean_loss']):.1e} (random weights)."
        )
    return "\n".join([*lines, "", *facts])


def serve_table() -> str:
    lines = [
        "| machine | clients | serial | all together | answers, every one the serial one | memory, from a third on |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    soaks = []
    for record in records("serve"):
        load, machine = record["load"], record["machine"]
        assert not load["problems"], load["problems"]
        speeds = f"{load['serial_tokens_per_second']:.0f} tokens/s | {load['tokens_per_second']:.0f}, "
        grown = [size / 2**20 for size in load["resident_bytes"]]
        lines.append(
            f"| {machine} | {load['clients']} | {speeds}{load['over_serial']:.1f}× | "
            f"{sum(load['answers'].values()):,} | {grown[0]:,.0f} → {grown[1]:,.0f} MiB |"
        )
        if soak := record.get("soak"):
            assert not soak["problems"], soak["problems"]
            counts = ", ".join(f"{name} {n:,}" for name, n in sorted(soak["counts"].items()))
            before, after = soak["before"], soak["after"]
            soaks.append(
                f"- {machine}: {source(record)}. Then {soak['clients']} clients for {soak['seconds'] / 60:.0f} minutes "
                f"({counts}). Idle before and after: {before['open_files']} and {after['open_files']} open files, "
                f"{before['resident_bytes'] / 2**20:,.0f} and {after['resident_bytes'] / 2**20:,.0f} MiB, "
                f"{after['requests']:.0f} requests left."
            )
    return "\n".join([*lines, "", *soaks])


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


def evals_table() -> str:
    (record,) = records("evals")
    models = record["models"]
    names = list(dict.fromkeys(name for found in models.values() for part in parts(found) for name in part["tasks"]))
    lines = [
        f"| {record['machine']} | documents | {' | '.join(models)} |",
        f"| --- | --- | {' | '.join('---' for _ in models)} |",
    ]
    for name in names:
        tasks = [part["tasks"].get(name) for found in models.values() for part in parts(found)]
        documents = next(task["documents"] for task in tasks if task)
        rates = [
            next((f"{p['tasks'][name]['documents_per_second']:,.0f}/s" for p in parts(m) if name in p["tasks"]), "–")
            for m in models.values()
        ]
        lines.append(f"| `{name}` | {documents:,} | {' | '.join(rates)} |")
    for title, part in (("all with choices, seconds", "choices"), ("`gsm8k`, seconds", "gsm8k")):
        seconds = [f"{found[part]['seconds']:.0f}" if part in found else "–" for found in models.values()]
        lines.append(f"| {title} | | {' | '.join(seconds)} |")
    worst = max(found["largest_difference_in_float32"] for found in models.values())
    lines += [
        "",
        f"- {source(record)}. Seconds are for the whole command except starting Python: reading and encoding the "
        f"questions, compiling, writing results and figures. GSM8K: {record['answers_at_once']} answers per batch, "
        f"each of maximum length, since random weights do not stop. Checked before timing: rows in batches and rows "
        f"alone differ by at most {worst:.1e} nats in float32.",
    ]
    return "\n".join(lines)


def parts(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [found[part] for part in ("choices", "gsm8k") if part in found]


TABLES = {
    DOCS.parent / "README.md": {"results": readme_table},
    DOCS / "index.md": {"loss": loss_table, "selection": selection_table, "memory": memory_table},
    DOCS / "guides" / "data.md": {"prepare": prepare_table, "loader": loader_table},
    DOCS / "guides" / "evaluation.md": {"evals": evals_table},
    DOCS / "guides" / "generation.md": {"decode": decode_table},
    DOCS / "guides" / "serving.md": {"serve": serve_table},
    DOCS / "guides" / "speed.md": {"train-step": train_step_table},
    DOCS / "guides" / "training.md": {"train": train_table},
    DOCS / "log.md": {"loss-chunks": chunks_table, "effect": effect_table},
}


def written(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    for name, table in TABLES[page].items():
        marked = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert marked.search(text), f"{page} has no markers for {name}"
        text = marked.sub(lambda match, table=table: f"{match[1]}{table()}\n{match[2]}", text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(any(page.read_text(encoding="utf-8") != written(page) for page in TABLES))
    for page in TABLES:
        page.write_text(written(page), encoding="utf-8")
