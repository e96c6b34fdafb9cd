"""The chunked loss, which never stores all logits, against the dense form: peak memory and time of both passes.

    python benchmarks/loss.py                    4096 rows × width 256 × vocabulary 50304, float32 on the CPU
    python benchmarks/loss.py --device cuda      the same with bfloat16 products on a GPU, and a larger size
    python benchmarks/loss.py --chunk-rows 256 1024    with other chunk sizes

Loss and gradients of both forms are first compared on the same inputs. `mixture` has bubbles of 1 to 8 rows per token.
"""

import argparse
import contextlib
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from common import extra_peak_bytes, seconds, write_results
from torch import Tensor

from thoughtbubbles.model.chunked_loss import CHUNK_ROWS
from thoughtbubbles.model.loss import mean_loss
from thoughtbubbles.model.streams import bubble_scan

MAX_BUBBLE = 8


class Case:
    """Random rows, one per token or in bubbles, with the two ways to compute their loss."""

    def __init__(self, rows: int, width: int, vocabulary: int, *, bubbles: bool, device: str):
        generator = torch.Generator().manual_seed(0)
        size = torch.randint(1, MAX_BUBBLE + 1, (rows,), generator=generator) if bubbles else torch.ones(rows).long()
        token = torch.repeat_interleave(torch.arange(rows), size)[:rows].contiguous()
        self.max_bubble = MAX_BUBBLE if bubbles else 1
        self.start = torch.searchsorted(token, token).to(device)
        self.end = (torch.searchsorted(token, token, right=True) - 1).to(device)
        self.target = torch.randint(vocabulary, (rows,), generator=generator)[token].to(device)
        self.hidden = torch.randn(rows, width, generator=generator).to(device).requires_grad_()
        self.weight = (torch.randn(vocabulary, width, generator=generator) / width**0.5).to(device).requires_grad_()
        self.log_score = (-3 * torch.rand(rows, generator=generator)).to(device).requires_grad_()
        self.device = device

    def ours(self) -> Tensor:
        return mean_loss(
            self.hidden,
            self.weight,
            self.target,
            log_score=self.log_score,
            start=self.start,
            end=self.end,
            max_bubble=self.max_bubble,
        )

    def dense(self) -> Tensor:
        logits = F.linear(self.hidden, self.weight)
        nll = F.cross_entropy(logits.float(), self.target, reduction="none")
        if self.max_bubble == 1:
            return nll.mean()
        original = self.end == torch.arange(len(self.end), device=self.end.device)
        joint = bubble_scan(self.log_score - nll, self.start, torch.logaddexp, max_bubble=self.max_bubble)
        total = bubble_scan(self.log_score, self.start, torch.logaddexp, max_bubble=self.max_bubble)
        return (total - joint)[original].mean()

    def step(self, form: str) -> list[Tensor]:
        """One forward and backward; returns loss and gradients."""
        for leaf in self.leaves:
            leaf.grad = None
        products = torch.autocast("cuda", torch.bfloat16) if self.device == "cuda" else contextlib.nullcontext()
        with products:
            loss: Tensor = getattr(self, form)()
        loss.backward()
        return [loss.detach(), *(leaf.grad for leaf in self.leaves if leaf.grad is not None)]

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.log_score

    def check(self) -> float:
        """Largest relative error (by norm) of loss and gradients between the two forms."""
        ours, dense = self.step("ours"), self.step("dense")
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(ours, dense, strict=False) if b.norm() > 0]
        bound = 2e-2 if self.device == "cuda" else 1e-4
        if not max(errors) < bound:
            raise SystemExit(f"the two forms disagree: relative errors {errors}")
        return max(errors)


def measure(
    rows: int, width: int, vocabulary: int, *, bubbles: bool, device: str, repeats: int
) -> dict[str, float | str | int]:
    case = Case(rows, width, vocabulary, bubbles=bubbles, device=device)
    error = case.check()
    memory = {}
    for form in ("ours", "dense"):
        for leaf in case.leaves:
            leaf.grad = None
        memory[form] = extra_peak_bytes(lambda form=form: case.step(form), device=device)  # type: ignore[misc]
    time = seconds({form: lambda form=form: case.step(form) for form in memory}, device=device, repeats=repeats)  # type: ignore[misc]
    return {
        "merge": "mixture" if bubbles else "one row per token",
        "rows": rows,
        "width": width,
        "vocabulary": vocabulary,
        "chunk_rows": CHUNK_ROWS[device],
        "relative_error": error,
        "extra_peak_MB": round(memory["ours"] / 1e6, 1),
        "dense_extra_peak_MB": round(memory["dense"] / 1e6, 1),
        "milliseconds": round(time["ours"] * 1e3, 2),
        "dense_milliseconds": round(time["dense"] * 1e3, 2),
        "time_ratio": round(time["ours"] / time["dense"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunk-rows", type=int, nargs="+", help="maximum rows per chunk (default: the device's)")
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/results)")
    args = parser.parse_args()
    sizes = [(4096, 256, 50304)] + ([(32768, 768, 50304)] if args.device == "cuda" else [])
    chunks = args.chunk_rows or [CHUNK_ROWS[args.device]]
    found = []
    for size, bubbles, CHUNK_ROWS[args.device] in itertools.product(sizes, (False, True), chunks):
        row = measure(*size, bubbles=bubbles, device=args.device, repeats=args.repeats)
        found.append(row)
        print(
            f"{row['merge']:>16} {size}, chunks of {row['chunk_rows']}: "
            f"extra peak {row['extra_peak_MB']} MB (dense {row['dense_extra_peak_MB']}), "
            f"{row['milliseconds']} ms (dense {row['dense_milliseconds']}), ratio {row['time_ratio']}",
            flush=True,
        )
    name = "loss-chunks" if args.chunk_rows else "loss"
    print("written to", write_results(name, args.device, {"cases": found}, to=args.out))


if __name__ == "__main__":
    main()
