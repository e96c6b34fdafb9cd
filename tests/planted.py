"""Mutation testing with hand-written faults, one at a time: a fault that survives points to a missing test.

    .venv/bin/python tests/planted.py [--only TEXT] [--slow] [--out FILE]

Every fault is a replacement in one file, made in a copy of the tree, where its tests are run: first those of
`make test`; with --slow, survivors are also tried against the slow ones. This is not part of the suite: it takes an
hour or two. A fault whose line has changed is reported as stale: rewrite or remove it. The exit code is 1 unless every
fault is caught.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = "src/thoughtbubbles"
MARKERS = ("not slow and not gpu", "slow and not gpu")
COPIED = ("src", "tests", "benchmarks", "docs", "pyproject.toml", "README.md", "Makefile", "CONTRIBUTING.md")


class Fault(NamedTuple):
    file: str
    old: str
    new: str
    tests: str


ATTENTION = "tests/model/test_attention.py"
LOSS = "tests/model/test_loss.py"
FORK = "tests/model/test_fork.py"
OPTIM = "tests/train/test_optim.py"
GRAPH = "tests/generate/test_graph.py"
PARALLEL = "tests/train/test_parallel.py"
EVALS = "tests/evals"
RESULTS = "tests/evals/test_results.py"
REQUESTS = (
    "tests/generate/test_requests.py tests/generate/test_completion_text.py tests/generate/test_request_mistakes.py"
)
MODEL = (
    "tests/model/test_oracle.py tests/model/test_selection.py tests/model/test_causality.py tests/model/test_fork.py"
)
AUDIT = "tests/analysis/test_audit.py"
PACKED = "tests/generate/test_packed.py"
ENGINE = "tests/generate/test_engine.py"
TRACE = "tests/analysis/test_trace.py"
DECODE = (
    "tests/generate/test_decode.py tests/generate/test_decode_rows.py tests/generate/test_decode_mistakes.py "
    "tests/generate/test_cache.py"
)

FAULTS = [
    # Kernels, through Triton's interpreter
    Fault("kernels/attention.py", "dq * scale, cos", "dq, cos", ATTENTION),
    Fault("kernels/attention.py", "total = total * shrink + tl.sum(p, 1)", "total = total + tl.sum(p, 1)", ATTENTION),
    Fault("kernels/attention.py", "        db = db * weight\n", "", ATTENTION),
    Fault("kernels/attention.py", "/ tl.where(score > 0.0, score, 1.0)", "/ score", ATTENTION),
    Fault("kernels/ops.py", "LEAST_APART = -40.0", "LEAST_APART = -4000.0", ATTENTION),
    Fault(
        "kernels/attention.py",
        "p = tl.where(seen[None, :] > n[:, None], p, 0.0)",
        "p = tl.where(seen[None, :] > n[:, None] + 1, p, 0.0)",
        ATTENTION,
    ),
    Fault("kernels/norm.py", "r * (g - average - xhat * slope)", "r * (g - xhat * slope)", ATTENTION),
    Fault("kernels/norm.py", "tl.sum(centred * centred, 0) / D + eps", "tl.sum(centred * centred, 0) / D", ATTENTION),
    Fault("kernels/norm.py", "dupdate_bias += du\n", "dupdate_bias += whole\n", ATTENTION),
    Fault(
        "kernels/ops.py",
        "needs_update = gate is not None or not ctx.has_sum",
        "needs_update = gate is not None",
        ATTENTION,
    ),
    Fault(
        "kernels/rotary.py",
        "return left * c + right * r, right * c - left * r",
        "return left * c - right * r, right * c + left * r",
        ATTENTION,
    ),
    Fault("kernels/gelu.py", "(below + z * density)", "(below - z * density)", ATTENTION),
    Fault("kernels/gelu.py", "t * 0.5307027145", "t * 0.5317027145", ATTENTION),
    Fault("kernels/sums.py", "mask=(row < R) & (column < C)", "mask=(row < R - 1) & (column < C)", ATTENTION),
    Fault(
        "kernels/fork.py",
        "larger += (theirs >= mine).to(tl.int32)",
        "larger += (theirs > mine).to(tl.int32)",
        FORK,
    ),
    Fault(
        "kernels/fork.py",
        "slot = filled + tl.cumsum(lives, 0) - lives",
        "slot = tl.cumsum(lives, 0) - lives",
        FORK,
    ),
    Fault(
        "kernels/fork.py",
        "            near -= BJ\n",
        "            near -= 0 * BJ\n            first_token = -1\n",
        FORK,
    ),
    Fault("kernels/loss.py", "weight / weights - share", "weight / weights + share", LOSS),
    Fault("kernels/loss.py", "tl.store(score_grad + row, 0.0, mask=owned)", "tl.store(score_grad + row, 0.0)", LOSS),
    Fault("kernels/loss.py", "total = total * tl.exp(most - highest) +", "total = total +", LOSS),
    Fault("kernels/adamw.py", "v += rise2 * (g * g - v)", "v += rise2 * (g - v)", OPTIM),
    Fault("kernels/adamw.py", "decay *= tl.load(row + 6).to(tl.float32)\n", "\n", OPTIM),
    Fault(
        "kernels/adamw.py",
        "tl.where(taken != 0.0, tl.load(row + 4) - begin, 0)",
        "tl.load(row + 4) - begin",
        OPTIM,
    ),
    Fault("kernels/adamw.py", "if self._sizes is None or places != self._places:", "if self._sizes is None:", OPTIM),
    Fault("kernels/chunk.py", "values, summed * fade[:, None])", "values, summed)", GRAPH),
    Fault(
        "kernels/decode_attention.py", "total = total * fade + parts * weight", "total = total + parts * weight", GRAPH
    ),
    Fault("generate/graph.py", "row * width + packed - first[row]", "row * width", GRAPH),
    Fault(
        "kernels/decode_attention.py",
        "(w[None, :] <= w[:, None]) & real[None, :]",
        "(w[None, :] < w[:, None]) & real[None, :]",
        GRAPH,
    ),
    Fault("kernels/decode_attention.py", "key_bias + b * S + slot", "key_bias + slot", GRAPH),
    Fault("kernels/decode_attention.py", "head_gate, stream * N + head,", "head_gate, stream * N,", GRAPH),
    # Training on several ranks, steps, precision
    Fault(
        "train/parallel.py", "group.set_gradient_divide_factor(1.0)", "group.set_gradient_divide_factor(2.0)", PARALLEL
    ),
    Fault(
        "distributed.py",
        "return next(filter(None, self.gather(error)), None)",
        "return self.gather(error)[0]",
        "tests/train/test_state.py",
    ),
    Fault(
        "train/parallel.py",
        "reduce_dtype=reduce_dtype",
        "reduce_dtype=param_dtype",
        f"{PARALLEL} tests/train/test_precision_copies.py",
    ),
    Fault(
        "train/data.py", "slice(self.world.rank * self.micro_batch_size,", "slice(0 * self.micro_batch_size,", PARALLEL
    ),
    Fault(
        "train/loop.py",
        "shares = inputs.real / inputs.all_real.clamp(min=1)",
        "shares = inputs.real / inputs.real.sum()",
        PARALLEL,
    ),
    Fault(
        "train/loop.py",
        "torch.manual_seed(mix(config.seed, n, self.world.rank))",
        "torch.manual_seed(config.seed)",
        "tests/train/test_loop.py",
    ),
    Fault(
        "train/optim.py",
        "        self._updates.fill_(updates)\n",
        "",
        "tests/train/test_resume.py tests/train/test_optim.py",
    ),
    Fault("train/optim.py", "if (p.ndim >= 2) == has_decay", "if (p.ndim >= 1) == has_decay", OPTIM),
    Fault(
        "train/optim.py",
        "return round(optim.warmup * steps)",
        "return int(optim.warmup * steps)",
        "tests/train/test_optim.py tests/train/test_run_config.py",
    ),
    Fault(
        "train/precision.py",
        "versions = [(weight.data_ptr(), weight._version) for weight in weights]",
        "versions = [(weight.data_ptr(), 0) for weight in weights]",
        "tests/train/test_precision_copies.py",
    ),
    Fault(
        "train/step.py",
        "share.backward()",
        "out.loss.backward()",
        "tests/train/test_step.py tests/train/test_loop.py",
    ),
    Fault(
        "train/state.py",
        "if step_of(folder) > step:",
        "if step_of(folder) >= step:",
        "tests/train/test_faults.py tests/train/test_resume.py",
    ),
    # Evaluation
    Fault(
        "evals/likelihood.py",
        "row[-block_size - 1 : -1] for row in whole",
        "row[:-1][:block_size] for row in whole",
        EVALS,
    ),
    Fault(
        "evals/likelihood.py",
        "greedy[part] = logits[:, :vocab_size].argmax(-1)",
        "greedy[part] = logits.argmax(-1)",
        EVALS,
    ),
    Fault("evals/likelihood.py", "np.logical_and.reduceat(greedy", "np.logical_or.reduceat(greedy", EVALS),
    Fault("evals/likelihood.py", "if np.isnan(sums).any():", "if np.isnan(sums).all():", EVALS),
    Fault("evals/autoregressive.py", "active=part.lengths > t", "active=part.lengths > t + 1", EVALS),
    Fault("evals/autoregressive.py", "windows / (windows - 1) * float", "float", EVALS),
    Fault(
        "evals/perplexity.py",
        "whole[rank :: len(shares)] = part",
        "whole[rank * len(part) : (rank + 1) * len(part)] = part",
        EVALS,
    ),
    Fault("evals/perplexity.py", "/ math.log(2) / n_bytes", "/ n_bytes", EVALS),
    Fault("evals/metrics.py", "/ (n - 1) / n)", "/ n / n)", EVALS),
    Fault("evals/metrics.py", "total / max(size, 1)", "total", EVALS),
    Fault(
        "evals/metrics.py",
        'bare = [choice.removeprefix(" ") for choice in document.choices]',
        "bare = list(document.choices)",
        EVALS,
    ),
    Fault("evals/budgets.py", "zip(each, values[0], strict=True)]", "zip(values[0], each, strict=True)]", RESULTS),
    Fault(
        "evals/budgets.py",
        "None if each is scores[0] else compare(each[way], reference)",
        "None if each is scores[0] else compare(reference, each[way])",
        RESULTS,
    ),
    Fault(
        "evals/run.py",
        '"budgets": [None if budget is None else exact(budget) for budget in budgets], "tasks": tasks}',
        '"tasks": tasks}',
        RESULTS,
    ),
    Fault("evals/run.py", "each.checksum, settings.limit]", "each.checksum]", RESULTS),
    # The model and generation
    Fault(
        "model/budget.py",
        "return -(-tokens * numerator // denominator)",
        "return tokens * numerator // denominator + 1",
        "tests/model/test_budget.py",
    ),
    Fault("model/selection.py", ".cummin(-1).values.clamp(max=0)", ".clamp(max=0)", MODEL),
    Fault(
        "model/selection.py",
        "(self.earlier.long()[:, None] * STRIDE >= key[..., None])",
        "(self.earlier.long()[:, None] * STRIDE > key[..., None])",
        DECODE,
    ),
    Fault(
        "model/gradients.py",
        "centred = scale * weight - (scale * weight).mean(-1, keepdim=True)",
        "centred = scale * weight",
        FORK,
    ),
    Fault("model/fork.py", "FLOOR = -20.0", "FLOOR = -25.0", MODEL),
    Fault("model/attention.py", "heads = self.gate_heads(heads, x)", "heads = heads", MODEL),
    Fault(
        "model/attention.py",
        "high = (bias.detach().view(torch.int32) & -(1 << 16)).view(torch.float32)",
        "high = torch.zeros_like(bias)",
        "tests/model/test_attention.py tests/model/test_precision.py",
    ),
    Fault("model/chunked_loss.py", "counts = (first >= 0) & (first < n_owned)", "counts = (first >= 0)", LOSS),
    Fault("model/chunked_loss.py", ".sum().clamp(min=1).to(dtype)", ".sum().to(dtype)", LOSS),
    Fault(
        "generate/sample.py",
        "ranked < least, -math.inf)",
        "ranked <= least, -math.inf)",
        "tests/generate/test_sampling.py",
    ),
    Fault("generate/text.py", "text.endswith(stop[:n])", "text.startswith(stop[:n])", "tests/generate/test_text.py"),
    Fault(
        "data/shuffle.py",
        "while len(outside := np.flatnonzero(place >= np.uint64(n))):",
        "if len(outside := np.flatnonzero(place >= np.uint64(n))):",
        "tests/data/test_loader.py",
    ),
    Fault("generate/cache.py", ') - (name != "kept")', ') - 2 * (name != "kept")', DECODE),
    Fault("generate/cache.py", "not held <= capacity <= config", "not 0 <= capacity <= config", DECODE),
    Fault("generate/readers.py", "if reading.longest > self.cache.capacity:", "if False:", REQUESTS),
    Fault("generate/readers.py", "budget = [self.budgets[row] for row in asked]", "budget = 1", REQUESTS),
    Fault("generate/readers.py", ", room, budget=self._budget)", ", room)", REQUESTS),
    # Hugging Face and the authors' checkpoints
    Fault(
        "interop/hf_cache.py",
        "self.state.crop(left.sum(1))",
        "self.state.crop(left.shape[1])",
        "tests/interop/test_hf_cache.py",
    ),
    Fault(
        "interop/hf_cache.py",
        "_of_rows(self.held.budget, rows))",
        "self.held.budget)",
        "tests/interop/test_hf_cache.py",
    ),
    Fault(
        "interop/hf_unsupported.py",
        "(labels[:, 1:] != IGNORED) & ~is_real[:, :-1]",
        "(labels[:, :-1] != IGNORED) & ~is_real[:, :-1]",
        "tests/interop/test_hf_model.py tests/interop/test_hf_tuning.py tests/interop/test_hf_input.py",
    ),
    Fault(
        "interop/hf_unsupported.py",
        "-n_columns <= column < n_columns",
        "-n_columns <= column <= n_columns",
        "tests/interop/test_hf_model.py tests/interop/test_hf_tuning.py tests/interop/test_hf_input.py",
    ),
    Fault("interop/hf_model.py", "past > 0 and attention_mask", "attention_mask", "tests/interop/test_hf_cache.py"),
    Fault(
        "interop/authors_files.py",
        "if claimed > MOST_PACKED * size:",
        "if claimed < 0:",
        "tests/interop/test_authors_hostile.py",
    ),
    Fault(
        "interop/authors_files.py",
        "file.read(min(PIECE, member.file_size - data.tell()))",
        "file.read()",
        "tests/interop/test_authors_hostile.py",
    ),
    Fault("data/records.py", "        parts.pop()", "        break", "tests/data"),
    # Packed reading and the engine
    Fault(
        "generate/packed.py", "earlier.sort(-1).values, level)", "earlier.sort(-1).values, level, right=True)", PACKED
    ),
    Fault("generate/packed.py", "earlier[:, None] >= level", "earlier[:, None] > level", PACKED),
    Fault("generate/packed.py", "        n_earlier = 2 * used\n", "        n_earlier = n_earlier\n", PACKED),
    Fault("generate/packed.py", "number[streams.token], find", "streams.token, find", PACKED),
    Fault("generate/packed.py", "before=self._before(levels), kept=self.kept", "before=self._before(levels)", PACKED),
    Fault("generate/cache.py", "span.used[row] = earlier = streams", "span.used[row] = streams", PACKED),
    Fault("generate/cache.py", "int(span.used[source])] < n_tokens", "int(span.used[source])] <= n_tokens", PACKED),
    Fault("generate/scheduler.py", "repr(self.budget).encode()", 'b""', ENGINE),
    Fault("generate/scheduler.py", "                self._forget(work.row)\n", "", ENGINE),
    Fault("generate/scheduler.py", "            if n > room:", "            if False:", ENGINE),
    Fault(
        "generate/scheduler.py",
        "            self._reading.append(work)\n\n    def release",
        "            self._reading.appendleft(work)\n\n    def release",
        ENGINE,
    ),
    Fault("generate/scheduler.py", "self.chunk or not work.can_share or", "self.chunk or", ENGINE),
    Fault("generate/engine.py", "sampling.seed, handle.job.n_new) for", "sampling.seed, 0) for", ENGINE),
    Fault("generate/sample.py", "uniform(seed, index + i)", "uniform(seed, index)", ENGINE),
    Fault("generate/handle.py", "            self._seen[token.id] = True\n", "            pass\n", ENGINE),
    Fault("generate/engine.py", "Scored(handle, first + i, token)", "Scored(handle, i, token)", ENGINE),
    Fault("recipes/reproduce/records.py", "/ max(tokens(each)", "/ min(tokens(each)", "tests/recipes/test_report.py"),
    Fault("serve/served.py", "else each[head] for each", "else each[0] for each", "tests/serve/test_watch_api.py"),
    # Looking inside; the first two make the causal rule look ahead
    Fault(
        "model/selection.py",
        "lower_in_run = ((theirs <= mine) & before)",
        "lower_in_run = ((theirs <= mine + 1) & before)",
        AUDIT,
    ),
    Fault(
        "model/selection.py",
        "quota = torch.diff(kept_up_to, prepend=kept_up_to.new_zeros(batch, 1) if kept is None else kept[:, None])",
        "quota = torch.diff(kept_up_to, append=cap[:, -1:].expand(batch, 1))",
        AUDIT,
    ),
    Fault("analysis/audit.py", "torch.arange(n, 0, -1)", "torch.arange(n)", AUDIT),
    Fault("analysis/audit.py", "(drawn + 1) % n_ids, drawn)", "drawn, drawn)", AUDIT),
    Fault("analysis/audit.py", "-float(log_p.mean())", "float(log_p.mean())", AUDIT),
    Fault("analysis/audit.py", "float(log_p.abs().mean())", "float(log_p.mean())", AUDIT),
    Fault("analysis/audit.py", "        if has_moved:", "        if False:", AUDIT),
    Fault("analysis/trace.py", "score[2 * parent + (not is_fork)]", "score[2 * parent + is_fork]", TRACE),
    Fault("analysis/trace.py", "2 * parent + ~is_fork", "2 * parent + is_fork", TRACE),
    Fault("analysis/trace.py", "log_probs[:, : tokenizer.size].topk(top)", "log_probs.topk(top)", TRACE),
]


def plant(fault: Fault, tree: Path) -> str | None:
    """None, or why it cannot be planted."""
    path = tree / PACKAGE / fault.file
    text = path.read_text()
    if text.count(fault.old) < 1:
        return "stale: the line no longer exists"
    path.write_text(text.replace(fault.old, fault.new))
    return None


def run_tests(tree: Path, tests: str, marker: str) -> tuple[bool, str]:
    """Whether a test failed, and which."""
    paths = [str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marker, *tests.split()]
    try:
        run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=1200)
    except subprocess.TimeoutExpired:
        return True, "timeout"
    if run.returncode in (0, 5):  # 5: no test has this marker
        return False, ""
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return True, failed[0][:160] if failed else run.stdout[-160:]


@contextmanager
def copied_tree() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, tree / name)
        yield tree


def fails_as_it_is(tests: str, marker: str) -> str | None:
    """The failing test if there is one without any fault: it would seem to catch every fault."""
    with copied_tree() as tree:
        failed, by = run_tests(tree, tests, marker)
    return by if failed else None


def examine(fault: Fault, *, slow: bool) -> dict[str, object]:
    begun = time.perf_counter()
    with copied_tree() as tree:
        outcome, by = plant(fault, tree), ""
        if outcome is None:
            caught, by = run_tests(tree, fault.tests, MARKERS[0])
            outcome = "caught" if caught else "survived"
            if slow and not caught:
                caught, by = run_tests(tree, fault.tests, MARKERS[1])
                outcome = "caught by a slow test" if caught else "survived"
    return {**fault._asdict(), "outcome": outcome, "by": by, "seconds": round(time.perf_counter() - begun, 1)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only faults whose file or text contains this")
    parser.add_argument("--slow", action="store_true", help="also try survivors against the slow tests")
    parser.add_argument("--processes", type=int, default=1, help="number of faults tried at the same time")
    parser.add_argument("--out", type=Path, help="write all outcomes as JSON")
    options = parser.parse_args(arguments)
    chosen = [fault for fault in FAULTS if options.only in fault.file + fault.old]
    if not chosen:
        sys.exit(f"no fault contains {options.only!r}")
    found: list[dict[str, object]] = []
    with ThreadPoolExecutor(options.processes) as pool:
        plain = [(tests, marker) for tests in {f.tests for f in chosen} for marker in MARKERS[: 1 + options.slow]]
        if broken := [by for by in pool.map(lambda pair: fails_as_it_is(*pair), plain) if by is not None]:
            sys.exit(f"tests fail without any fault: {broken}")
        for each in pool.map(lambda fault: examine(fault, slow=options.slow), chosen):
            found.append(each)
            print(f"{each['outcome']:10} {each['file']}: {str(each['old']).strip()[:60]!r}  {each['by']}", flush=True)
            if options.out:
                about = {"python": platform.python_version(), "machine": platform.machine()}
                options.out.write_text(json.dumps({**about, "faults": found}, indent=1) + "\n")
    outcomes = [str(each["outcome"]) for each in found]
    print({outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))})
    return 0 if all(outcome.startswith("caught") for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
