"""Decoding, serving and benchmarks."""

from typing import Any

from tables.records import records, source


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
