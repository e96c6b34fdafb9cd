"""Run in a separate process: compiled parts of a step (`parts`), and on a GPU the graph (`graph`, `generate …`).

Prints one JSON object.
"""

import json
import sys
from typing import Any

import torch

from helpers import lively_model, named, random_ids, small_config
from thoughtbubbles import kernels
from thoughtbubbles.generate.decode import decode_step, prefill
from thoughtbubbles.generate.graph import GraphStep, compiled_whole, keep_counts, widths_within
from thoughtbubbles.generate.requests import Request, generate, stream
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.generate.step import Parts, advance, enter, finish
from thoughtbubbles.model.budget import Budget
from thoughtbubbles.model.transformer import Thoughtbubbles


def parts(**changes: Any) -> dict[str, Any]:
    """The compiled parts against plain steps on the CPU, and the number of compiled graphs after each step."""
    config = small_config(**changes)
    model, ids = lively_model(config, dtype=torch.float32), random_ids(config, 2, 16)
    compiled = [compiled_whole(part) for part in (enter, finish, keep_counts)]
    fast, keep = Parts(enter=compiled[0], finish=compiled[1]), compiled[2]
    caches = [prefill(model, ids[:, :4], budget=[2, 3] if config.scores else None)[1] for _ in range(2)]
    worst, same, graphs, fits = 0.0, True, [], torch.tensor(True)
    for t in range(4, 12):
        active = torch.tensor([t != 6, t % 3 < 2])
        expected, caches[0] = decode_step(model, caches[0], ids[:, t], active=active)
        for room in (1, None):  # in the first, too few streams have room, so it is repeated
            found, after = advance(model, caches[1], ids[:, t], active, widths=widths_within(config, 8), parts=fast)
            keep(caches[1], after, fits, room)
            same &= torch.equal(caches[1].n_tokens, caches[0].n_tokens - (0 if room is None else 1) * active)
            same &= room is None or not bool(fits)
        worst = max(worst, float((found.logits - expected.logits)[active].abs().max()))
        same &= torch.equal(found.streams[active], expected.streams[active])
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return {"logits": worst, "same_streams": same, "graphs": graphs}


def gpu_model(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Thoughtbubbles:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Thoughtbubbles(named("150m-causal", **{"n_layer": 12, **changes})).to(dtype).eval()


def graph() -> dict[str, Any]:
    """A graph against plain steps, each from its own cache."""
    results = {}
    forking: dict[str, Any] = {"fork_layers": (3, 7, 11), "merge": "residual"}
    plain_model: dict[str, Any] = {"fork_layers": (), "merge": "original"}
    feedback = {"fork_layers": (3,), "merge": "forks", "fork_reach": 0, "feedback": True}
    near = {**feedback, "fork_reach": 7, "head_gate": True, "scores": False}
    of_forks = forking, {**forking, "fork_reach": 0}, {**forking, "fork_reach": 7}, feedback, near
    for form in (*of_forks, plain_model, {**plain_model, "head_gate": True}):
        model = gpu_model(**form)
        for rows in (1, 3, 9):
            ids = torch.randint(50000, (rows, 96), generator=torch.Generator().manual_seed(1)).cuda()
            lengths = [80 - 7 * row for row in range(rows)]
            fast, plain = (prefill(model, ids[:, :80], lengths=lengths, capacity=128)[1] for _ in range(2))
            step = GraphStep(model, fast, budget=Budget.of(2))
            step.active.fill_(True)
            errors, same = [], []
            for t in range(80, 90):
                step.ids.copy_(ids[:, t])
                found = step(2 * rows)
                with kernels.disabled():
                    expected, plain = decode_step(model, plain, ids[:, t])
                alike = found.streams == expected.streams
                same.append(alike.double().mean())
                errors.append((found.logits - expected.logits)[alike].norm() / expected.logits[alike].norm())
            results[f"{rows} rows, {form}"] = {
                "error": float(torch.stack(errors).nanmedian()),
                "same_streams": float(torch.stack(same).mean()),
                "same_tokens": torch.equal(fast.n_tokens, plain.n_tokens),
            }
    return results


def generation(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> dict[str, Any]:
    """Compiled texts, and their log-probabilities as prompts of an engine that is not compiled."""
    model = gpu_model(dtype, n_layer=4, fork_layers=(1, 3), **changes)
    requests = [
        Request(
            prompt=list(range(1, 3 + 3 * number)),
            max_new=4 + 5 * (number % 9),
            budget=(1, 1.5, 2, 4)[number % 4],
            sampling=Sampling(temperature=0.9 * (number % 3 > 0), top_k=40, seed=number),
            top=2 * (number % 2),
        )
        for number in range(40)
    ]
    found, again = (generate(model, requests, batch_size=24, compiled=True) for _ in range(2))
    read = [
        Request(prompt=[*request.prompt, *completion.ids], max_new=0, score_prompt=True, budget=request.budget)
        for request, completion in zip(requests, found, strict=True)
    ]
    differences, others, other_prompts = [], 0, 0
    with kernels.disabled():
        read_again = generate(model, read)
    for request, completion, scored in zip(requests, found, read_again, strict=True):
        expected = scored.prompt_log_probs[len(request.prompt) :]
        text = torch.tensor([[*request.prompt, *completion.ids]]).cuda()
        _, cache = prefill(model, text[:, : len(request.prompt)], budget=request.budget)
        of_prompt = cache.streams(int(cache.n_tokens))[0].tolist()
        with kernels.disabled():  # as the expected log-probabilities
            _, cache = prefill(model, text, budget=request.budget)
        whole = cache.streams(int(cache.n_tokens))[0].tolist()
        if whole[: len(request.prompt)] != of_prompt:
            other_prompts += 1  # rounding decided about a stream of the prompt, which changes all that follows
            continue
        streams = whole[len(request.prompt) - 1 : -1]
        same = next((i for i, (a, b) in enumerate(zip(streams, completion.streams, strict=True)) if a != b), None)
        others += sum(a != b for a, b in zip(streams, completion.streams, strict=True))
        differences += [abs(a - b) for a, b in zip(completion.log_probs[:same], expected[:same], strict=True)]
    return {
        "again_the_same": [c.ids for c in found] == [c.ids for c in again],
        "lengths": [len(c.ids) for c in found],
        "asked": [request.max_new for request in requests],
        "log_prob": max(differences),
        "other_prompts": other_prompts / len(requests),
        "with_other_streams": others / sum(len(c.ids) for c in found),
        "streamed": list(stream(model, requests[:1], compiled=True))[-1].finish,
    }


if __name__ == "__main__":
    checks = {
        "parts": parts,
        "private parts": lambda: parts(fork_layers=(1, 3), fork_reach=0),
        "feedback parts": lambda: parts(fork_layers=(1,), fork_reach=0, feedback=True),
        "parts without scores": lambda: parts(fork_layers=(0, 2), budget=4, scores=False),
        "near parts": lambda: parts(fork_layers=(1,), fork_reach=3, feedback=True, scores=False),
        "graph": graph,
        "generate": generation,
        "generate in float16": lambda: generation(torch.float16),
        "generate with private forks": lambda: generation(torch.float16, fork_reach=0),
    }
    json.dump(checks[sys.argv[1]](), sys.stdout)
