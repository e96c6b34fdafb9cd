"""Evaluation during a run: the validation loss of each source, and generated samples."""

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from thoughtbubbles.data.loader import Batch
from thoughtbubbles.distributed import World
from thoughtbubbles.generate.requests import Request, generate
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.model.loss import IGNORED
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.train.budget import at_budget
from thoughtbubbles.train.config import RunConfig
from thoughtbubbles.train.data import RunData, to_device
from thoughtbubbles.train.precision import MixedPrecision


def validation_losses(
    model: Thoughtbubbles, data: RunData, *, world: World, products: MixedPrecision, budget: float | None = None
) -> dict[str, float]:
    """Per source, and for the mixture if all its sources have a validation split; empty without validation data.

    `budget`: None is the model's own.
    """
    if not data.validation:
        return {}
    sums = validation_sums(
        model,
        data.validation_batches(),
        n_sources=len(data.validation),
        device=world.device,
        precision=products,
        budget=budget,
    )
    sums = world.total(sums)
    each = (sums[:, 0] / sums[:, 1]).tolist()
    losses = dict(zip((name for name, *_ in data.validation), each, strict=True))
    if data.is_own and len(losses) > 1:
        losses["mixture"] = sum(share * loss for share, loss in zip(data.shares, each, strict=True))
    return losses


@torch.no_grad()
def validation_sums(
    model: Thoughtbubbles,
    batches: Iterable[Batch],
    *,
    n_sources: int,
    device: torch.device,
    precision: Callable[[], AbstractContextManager[object]] = nullcontext,
    budget: float | None = None,
) -> Float[Tensor, "sources 2"]:
    """Per source: the sum of the losses and the number of targets, to be summed over ranks."""
    sums = torch.zeros(n_sources, 2, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    for batch in batches:
        ids, targets, lengths = to_device(batch, device)
        with precision(), at_budget(model, budget) as given:
            nll = model(ids, targets=targets, lengths=lengths, budget=given, want=("token_nll",)).token_nll
        sums[int(batch.source[0]), 0] += nll.sum(dtype=sums.dtype)
        sums[int(batch.source[0]), 1] += (targets != IGNORED).sum()
    return sums


def samples(
    model: Thoughtbubbles, data: RunData, config: RunConfig, *, products: MixedPrecision, step: int
) -> Iterator[tuple[str, str]]:
    """Each prompt, and its text with the generated continuation."""
    settings, tokenizer, limit = config.eval, data.tokenizer, config.model.block_size
    if settings.sample_tokens == 0 or tokenizer.size > config.model.vocab_size or limit < 2:
        return
    given = [tokenizer.encode(prompt) or [tokenizer.end_of_text] for prompt in settings.prompts]
    for index, prompt in enumerate(given or data.beginnings):
        ids = prompt[: limit - 1] if given else prompt[: max(1, limit // 2)]
        request = Request(
            prompt=ids,
            max_new=min(settings.sample_tokens, limit - len(ids)),
            sampling=Sampling(temperature=settings.temperature, seed=mix(config.seed, step, index)),
            end_ids=(),
        )
        # Every length is a new shape, not worth compiling. Without a cache: a sharded model only runs full forwards.
        at = at_budget(model, config.validation_budget(step))
        with products(), torch.compiler.set_stance("force_eager"), at as budget:
            (written,) = generate(model, [replace(request, budget=budget)], tokenizer=tokenizer, method="uncached")
        yield tokenizer.decode(ids), tokenizer.decode([*ids, *written.ids])


def mix(*numbers: int) -> int:
    """One seed from several numbers."""
    return zlib.crc32(repr(numbers).encode())
