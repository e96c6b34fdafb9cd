"""From text to batches."""

from tables.records import records, source


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
