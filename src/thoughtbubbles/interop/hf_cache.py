"""Our KV cache as a Hugging Face cache: it counts columns, including padding, where ours counts tokens.

A call that computes the logits of all tokens does not fill the cache: the ids are held, and read when the cache is
passed to the next call. So an evaluation that never uses `past_key_values` pays nothing for it.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import torch
import transformers
from torch import Tensor

from thoughtbubbles.generate.cache import Cache, new_cache
from thoughtbubbles.generate.decode import check_next, prefill
from thoughtbubbles.generate.packed import Batch, read
from thoughtbubbles.interop.hf_padding import Padding
from thoughtbubbles.model.budget import Budget, BudgetLike
from thoughtbubbles.model.transformer import Thoughtbubbles

HOLDS = "this cache holds streams, not the keys and values of layers: pass it to the model"


class Held(NamedTuple):
    """Ids to read before anything else."""

    ids: Tensor  # (rows, columns)
    budget: BudgetLike | Budget


class ThoughtbubblesCache(transformers.Cache):
    """What a batch has read so far. `capacity` is the initial capacity in tokens per row."""

    def __init__(self, capacity: int | None = None):
        super().__init__(layers=[])  # the base class keeps keys and values by layer; ours belong to streams
        self.capacity = capacity
        self.reset()

    def reset(self) -> None:
        self.state: Cache | None = None
        self.held: Held | None = None
        self.is_real: Tensor | None = None  # (rows, columns): which of the columns read or held were tokens
        self.n_layer = 0  # of the model

    def hold(
        self, model: Thoughtbubbles, ids: Tensor, padding: Padding | None, budget: BudgetLike | Budget | None
    ) -> None:
        """Stores ids in an empty cache, to be read later."""
        self.held = Held(ids.clone(), model.config.budget if budget is None else budget)
        self.is_real = torch.ones_like(ids, dtype=torch.bool) if padding is None else padding.is_real
        self.n_layer = model.config.n_layer

    def _read_held(self, model: Thoughtbubbles) -> None:
        if self.held is not None and self.is_real is not None:
            padding = None if bool(self.is_real.all()) else Padding.of(self.is_real)
            fresh = ThoughtbubblesCache(self.capacity)
            fresh.read(model, self.held.ids, padding, self.held.budget)
            self.state, self.held = fresh.state, None

    def read(
        self, model: Thoughtbubbles, ids: Tensor, padding: Padding | None, budget: BudgetLike | Budget | None
    ) -> Tensor:
        """Reads more columns. Returns the logits after the last one (B, V), or after each one (B, T, V).

        An empty cache returns the last, unless a row has no token yet. The budget is that of the first call: no earlier
        decision can be revised.
        """
        self._read_held(model)
        real = torch.ones_like(ids, dtype=torch.bool) if padding is None else padding.is_real
        at_once = self.state is None and (padding is None or bool((padding.lengths > 0).all()))
        room = self._room(model, ids.shape[0], real.sum(1), budget)
        if at_once:
            rows, lengths = (ids, None) if padding is None else (padding.to_rows(ids), padding.lengths)
            prediction, self.state = prefill(model, rows, lengths=lengths, budget=budget, into=room)
            logits = prediction.logits
        else:
            logits, self.state = _read_more(model, room, ids, real), room
        self.is_real = real if self.is_real is None else torch.cat([self.is_real, real], dim=1)
        self.n_layer = model.config.n_layer
        return logits

    def _room(self, model: Thoughtbubbles, rows: int, n_new: Tensor, budget: BudgetLike | Budget | None) -> Cache:
        """The storage, grown if necessary; a row beyond block_size is left for the model to reject."""
        config, old = model.config, self.state
        if old is not None:
            if rows != old.rows:
                raise ValueError(f"input_ids has {rows} rows, past_key_values {old.rows}: give the same rows")
            n_new = old.n_tokens + n_new
            if int(n_new.max()) <= old.capacity or old.capacity == config.block_size:
                return old
        wanted = max(int(n_new.max()), 1, 2 * old.capacity if old is not None else self.capacity or 0)
        if old is not None:
            return old.grown(config, min(wanted, config.block_size))
        weight, kind = model.embedding.weight, model.embedding.weight.device.type
        return new_cache(
            config,
            rows=rows,
            capacity=min(wanted, config.block_size),
            budget=Budget.of(config.budget if budget is None else budget),
            dtype=torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype,
            device=weight.device,
        )

    # The interface that `generate` and its users expect of a cache.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.is_real is None else self.is_real.shape[1]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # it grows up to block_size, which the model knows

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    @property
    def batch_size(self) -> int:
        return -1 if self.is_real is None else self.is_real.shape[0]

    @property
    def is_initialized(self) -> bool:
        return self.is_real is not None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_real is not None:
            rows = torch.arange(self.batch_size, device=self.is_real.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_real is None:
            return
        rows = torch.arange(self.batch_size, device=self.is_real.device)[indices.to(self.is_real.device)]
        self.is_real = self.is_real[rows]
        if self.state is not None:
            self.state = self.state.reorder(rows)
        if self.held is not None:
            self.held = Held(self.held.ids[rows], _of_rows(self.held.budget, rows))

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Removes the last columns; their number is negative, as in Hugging Face."""
        end = int(tokens_to_remove)
        if end > 0:
            raise ValueError(f"crop({end}): give the number of columns to remove as a negative number")
        if self.is_real is None or end == 0:
            return
        left = self.is_real[:, :end]
        if left.shape[1] == 0:
            self.reset()
            return
        if not bool(left.any(1).all()):
            raise ValueError(f"crop({end}): a row keeps at least its first token; remove fewer columns")
        if self.state is not None:
            self.state = self.state.crop(left.sum(1))
        if self.held is not None:
            self.held = Held(self.held.ids[:, :end], self.held.budget)
        self.is_real = left

    def __len__(self) -> int:
        """The number of layers, as in other caches; 0 before anything was read."""
        return self.n_layer

    def __iter__(self) -> Iterator[Any]:
        raise ValueError(HOLDS)

    def __getitem__(self, layer_idx: int) -> NoReturn:
        raise ValueError(HOLDS)

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise ValueError(HOLDS)


def _read_more(model: Thoughtbubbles, cache: Cache, ids: Tensor, real: Tensor) -> Tensor:
    """Adds the columns to the cache, in place; returns the logits after each, 0 where it is padding."""
    check_next(model, cache, ids, real)
    logits = torch.zeros(*ids.shape, model.config.vocab_size, dtype=cache.spans[0].log_score.dtype, device=ids.device)
    lengths = real.sum(1).tolist()
    if rows := [row for row, n in enumerate(lengths) if n]:
        batch = Batch.of(rows, [lengths[row] for row in rows], device=ids.device)
        every = torch.arange(sum(lengths), device=ids.device)
        logits[real] = read(model, cache, ids[real], batch, predict=every).logits.to(logits.dtype)
    return logits


def _of_rows(budget: BudgetLike | Budget, rows: Tensor) -> Budget:
    exact = Budget.of(budget)
    if exact.rows == 1:
        return exact
    return Budget(*(tuple(part[row] for row in rows.tolist()) for part in exact))
