"""Data preparation compared with tiktoken alone: throughput for 1, 2, … processes, and memory.

    python benchmarks/prepare.py                          the source files of Python's standard library as documents
    python benchmarks/prepare.py --source texts.jsonl     records with a field "text", e.g. of a real corpus
    python benchmarks/prepare.py --processes 1 2 4 8

The throughput is that of the whole preparation: reading, JSON, tokens, hash, writing with checksums, and starting its
processes. `ratio` compares it with N × tiktoken's encode_ordinary in one thread; `ratio_at_once` with N processes that
run only encode_ordinary at the same time, the most that this machine can do under its current load; `cpu_ratio`
compares CPU time. `main_cpu_share` is how busy the process that reads and writes keeps its core. Runs are interleaved,
and the fastest of several counts, since other load can only slow a run down. The shards are first checked to contain
exactly tiktoken's ids.
"""

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from subprocess import PIPE

import numpy as np
import tiktoken
from common import write_results

from thoughtbubbles.data.shards import open_dataset
from thoughtbubbles.data.tokenizer import GPT2_WORDS, tokenizer

PREPARE = """
import json, resource, sys, time
from pathlib import Path
from thoughtbubbles.data.prepare import prepare
if __name__ == "__main__":
    begin, begin_cpu = time.perf_counter(), time.process_time()
    prepare((sys.argv[1],), out=Path(sys.argv[2]), processes=int(sys.argv[3]), val_fraction=0.0)
    seconds = time.perf_counter() - begin
    status = Path("/proc/self/status").read_text()  # ru_maxrss would include the parent's peak
    main = int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    workers = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = {"main_cpu": time.process_time() - begin_cpu, "worker_cpu": workers.ru_utime + workers.ru_stime}
    print(json.dumps({"seconds": seconds, "main": main, "worker": workers.ru_maxrss * 1024 / 1e6, **cpu}))
"""

ALONE = """
import json, sys, time
from thoughtbubbles.data.tokenizer import tokenizer
texts = [json.loads(line)["text"] for line in open(sys.argv[1], encoding="utf-8")]
encode = tokenizer("gpt2")._encoding.encode_ordinary
print("ready", flush=True)
sys.stdin.readline()
begin, begin_cpu = time.perf_counter(), time.process_time()
for text in texts:
    encode(text)
print(time.perf_counter() - begin, time.process_time() - begin_cpu)
"""


def texts_of(source: Path | None) -> list[str]:
    if source is not None:
        return [json.loads(line)["text"] for line in source.read_text().splitlines() if line.strip()]
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts]
    return [text for path in paths if (text := path.read_text(errors="replace"))]


def prepare(lines: Path, out: Path, processes: int) -> dict[str, float]:
    """In a separate process, as a user runs it."""
    words = [sys.executable, "-c", PREPARE, str(lines), str(out), str(processes)]
    shown = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(shown.splitlines()[-1])
    return found


def tiktoken_alone(lines: Path, processes: int) -> tuple[float, float]:
    """Seconds, and CPU seconds, of the slowest of several processes that each encode everything at the same time."""
    words = [sys.executable, "-c", ALONE, str(lines)]
    started = [subprocess.Popen(words, stdin=PIPE, stdout=PIPE, text=True) for _ in range(processes)]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    shown = [process.communicate()[0].split() for process in started]
    return max(float(time) for time, _ in shown), max(float(cpu) for _, cpu in shown)


def check(out: Path, texts: list[str], encoding: tiktoken.Encoding) -> int:
    """Checks that the shards are tiktoken's ids, with end-of-text after each document; returns their number."""
    found = np.concatenate([shard.tokens for shard in open_dataset(out, split="train").shards])
    begin = 0
    for text in texts:
        expected = [*encoding.encode_ordinary(text), 50256]
        if found[begin : begin + len(expected)].tolist() != expected:
            raise SystemExit(f"the shards differ from tiktoken's ids after {begin:,} tokens")
        begin += len(expected)
    if begin != len(found):
        raise SystemExit(f"the shards have {len(found):,} tokens instead of {begin:,}")
    return begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a .jsonl file (default: the standard library's sources)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--copies", type=int, default=1, help="of the text; more hide the time to start processes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/results)")
    args = parser.parse_args()

    texts = texts_of(args.source) * args.copies
    n_bytes = sum(len(text.encode()) for text in texts)
    ranks = {tokenizer("gpt2").token_bytes(i): i for i in range(50256)}
    encoding = tiktoken.Encoding("gpt2", pat_str=GPT2_WORDS, mergeable_ranks=ranks, special_tokens={})
    runs: dict[int, list[dict[str, float]]] = {n: [] for n in args.processes}

    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "texts.jsonl")
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        for n in args.processes:
            prepare(lines, Path(folder, f"check-{n}"), n)
            n_tokens = check(Path(folder, f"check-{n}"), texts, encoding)

        alone: dict[int, list[tuple[float, float]]] = {n: [] for n in {1, *args.processes}}
        for repeat in range(args.repeats):
            for n, times in alone.items():
                times.append(tiktoken_alone(lines, n))
            for n in args.processes:
                runs[n].append(prepare(lines, Path(folder, f"{n}-{repeat}"), n))

    rate = {n: n * n_bytes / 1e6 / min(time for time, _ in times) for n, times in alone.items()}
    print(f"{len(texts):,} documents, {n_bytes / 1e6:.1f} MB, {n_tokens:,} tokens; tiktoken alone {rate[1]:.1f} MB/s")
    cases = []
    for n in args.processes:
        speed = n_bytes / 1e6 / min(found["seconds"] for found in runs[n])
        case = {
            "processes": n,
            "MB_per_second": round(speed, 2),
            "tokens_per_second": round(speed * 1e6 * n_tokens / n_bytes),
            "ratio": round(speed / (n * rate[1]), 3),
            "ratio_at_once": round(speed / rate[n], 3),
            "cpu_ratio": round(
                min(cpu for _, cpu in alone[n]) / min(found["main_cpu"] + found["worker_cpu"] for found in runs[n]), 3
            ),
            "main_cpu_share": round(min(found["main_cpu"] / found["seconds"] for found in runs[n]), 3),
            "main_peak_MB": round(max(found["main"] for found in runs[n])),
            "worker_peak_MB": round(max(found["worker"] for found in runs[n])) if n > 1 else 0,
        }
        cases.append(case)
        print(case, flush=True)
    numbers = {
        "documents": len(texts),
        "bytes": n_bytes,
        "tokens": n_tokens,
        "tiktoken_MB_per_second": round(rate[1], 2),
        "cases": cases,
    }
    print("written to", write_results("prepare", "cpu", numbers, to=args.out))


if __name__ == "__main__":
    main()
