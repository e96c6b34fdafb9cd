"""The one loop: pretraining, mid-training and fine-tuning are recipes for it. Order: step → log → save → evaluate.

Step n reads batch n and draws its random numbers from (seed, n), so the number of finished steps is all the state there
is besides weights and optimizer, and a run that is killed and resumed gives the same bits as one that is not.
"""

import math
import os
import signal
import sys
import traceback
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from thoughtbubbles import __version__
from thoughtbubbles.data.loader import Batch
from thoughtbubbles.evals.heldout import held_out_sums, to_device
from thoughtbubbles.generate.requests import Request, generate
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.model.cost import cost
from thoughtbubbles.model.loss import IGNORED
from thoughtbubbles.train.config import RunConfig
from thoughtbubbles.train.data import RunData
from thoughtbubbles.train.forks import fork_statistics
from thoughtbubbles.train.log import Log, Speed, peak_tflops
from thoughtbubbles.train.optim import Optimizer, clip, learning_rate
from thoughtbubbles.train.parallel import World, find_precision, join, parallelize, sync_gradients
from thoughtbubbles.train.start import build_model, describe, find_checkpoint, own_folder, same_run
from thoughtbubbles.train.state import Checkpoints, SaveError, clean, folder_name, restore, set_aside


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    checkpoint: Path  # the last one
    step: int
    finished: bool  # False: stopped by a signal, to be resumed
    held_out: dict[str, float]  # loss of each source at the last evaluation


def train(config: RunConfig, *, resume: bool = False) -> Result:
    with join(config.device) as world:
        try:
            with own_folder(config.folder, world):
                return Trainer(config, world, resume=resume).run()
        except BaseException as error:
            if not world.is_distributed:
                raise
            # Others may wait for this rank, in a step or in a save: only its end makes torchrun end them.
            text = str(error) if isinstance(error, ValueError) else traceback.format_exc()
            print(f"rank {world.rank}: {text}", file=sys.stderr, flush=True)
            os._exit(1)


class Trainer:
    def __init__(self, config: RunConfig, world: World, *, resume: bool = False):
        self.config, self.world, self.folder = config, world, config.folder
        self.log = Log(self.folder, config.log, name=config.name, steps=config.steps, is_first=world.is_first)
        found = world.first(lambda: find_checkpoint(self.folder, resume=resume, say=self.log.say))
        self.precision = find_precision(config.compute, world.device.type)
        self.data = RunData(config, world)
        state = None
        if found is not None:
            state = same_run(found, config, precision=self.precision, fingerprints=self.data.fingerprints)

        self.model = build_model(config if found is None else replace(config, init_from=None), self.log.say)
        self.model.to(world.device, torch.float64 if self.precision == "float64" else torch.float32)
        parallelize(self.model, world, config.compute)
        self.optimizer = Optimizer(self.model, config.optim)
        self.checkpoints = Checkpoints(
            self.folder,
            world,
            keep=config.save.keep,
            milestones=config.milestone_steps,
            tokenizer=self.data.tokenizer,
        )
        self.done = self.skipped_in_a_row = 0  # finished steps, and how many of the last were skipped
        if found is not None and state is not None:
            restore(found, self.model, self.optimizer, world)
            self.done, self.skipped_in_a_row = state["step"], state["skipped_in_a_row"]
        self._ahead: tuple[int, list[Batch]] = (-1, [])  # the next step's batches, made while the device still works
        self.held_out: dict[str, float] = {}
        self._asked_to_stop = False  # by a signal to this rank
        self._stop = False  # as agreed by all ranks

    def run(self) -> Result:
        config = self.config
        if self.world.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            clean(self.folder)
            set_aside(self.folder, self.done)
            describe(self.folder, config, done=self.done)
        self.log.start(config.as_dict(), done=self.done)
        self._announce()
        speed = Speed(
            flops_per_token=cost(config.model).flops / config.model.block_size,
            peak=peak_tflops(config.log, self.world.device),
            world=self.world.size,
            tokens=self.done * config.tokens_per_step,
        )
        try:
            with self._signals():
                if self.done and self._evaluation_is_due():  # a kill may have come before it
                    self.evaluate()
                while self.done < config.steps and not self._stop:
                    self._round(speed)
            self._report_failed_save(final=True)
            finished = self.done == config.steps
            if not finished:
                self.log.say(f"stopped after step {self.done}; go on with --resume")
            return Result(self.folder, self.folder / folder_name(self.done), self.done, finished, self.held_out)
        finally:
            self.log.close()

    def _round(self, speed: Speed) -> None:
        config = self.config
        facts = self.step()
        self.done += 1
        tokens = self.done * config.tokens_per_step
        if self.done % config.log.every == 0 or self.done == config.steps:
            facts |= speed.read(tokens)
            if self.world.device.type == "cuda":
                facts["peak_memory_GiB"] = torch.cuda.max_memory_allocated() / 2**30
        self.log.step({"step": self.done, "tokens": tokens, **facts})
        self._count_skipped(facts["skipped"])
        if self.checkpoints.is_written:
            self._report_failed_save()
        if self._save_is_due():
            self.save()
            speed.pause(tokens)
        if self._evaluation_is_due() and (not self._stop or self.done == config.steps):  # else it waits for --resume
            self.evaluate()
            speed.pause(tokens)

    def step(self) -> dict[str, Any]:
        """One optimizer step on global batch `done`. Its loss is one mean over all real targets of all ranks."""
        config, device, n = self.config, self.world.device, self.done
        torch.manual_seed(_mix(config.seed, n, self.world.rank))
        micros = self._ahead[1] if self._ahead[0] == n else self.data.micro_batches(n)
        real = [int((batch.targets != IGNORED).sum()) for batch in micros]
        wide = torch.float32 if device.type == "mps" else torch.float64
        all_real = self.world.total(torch.tensor(sum(real), dtype=wide, device=device)).clamp(min=1)

        total = torch.zeros((), device=device)
        for index, batch in enumerate(micros):
            sync_gradients(self.model, index == len(micros) - 1)
            ids, targets, lengths = to_device(batch, device)
            with self.autocast():
                out = self.model(ids, targets=targets, lengths=lengths, trace=True)
            assert out.loss is not None
            share = out.loss * (real[index] / all_real).to(out.loss.dtype)
            share.backward()
            total = total + share.detach()
        norm = clip(self.model.parameters(), config.optim.clip)
        seen = self.world.total(torch.stack([total, torch.full_like(total, self._asked_to_stop)]))
        loss, stop = seen.tolist()
        self._stop = stop > 0  # all ranks stop after the same step
        lr = learning_rate(config.optim, n, config.steps)
        facts = {"loss": loss, "targets": int(all_real), "lr": lr, "gradient_norm": norm.item()}
        facts["skipped"] = not (math.isfinite(loss) and math.isfinite(facts["gradient_norm"]))
        if not facts["skipped"]:
            self.optimizer.step(lr)
        self.optimizer.zero_grad()
        if n + 1 < config.steps:
            self._ahead = (n + 1, self.data.micro_batches(n + 1))
        if out.forks and ((n + 1) % config.log.every == 0 or n + 1 == config.steps):  # of this rank's last forward
            facts["forks"] = fork_statistics(out.forks, lengths, ids.shape[1])
        return facts

    def save(self) -> None:
        self._report_failed_save()
        facts = {
            "format": 1,
            "step": self.done,
            "updates": self.optimizer.updates,
            "skipped_in_a_row": self.skipped_in_a_row,
            "precision": self.precision,
            "data": self.data.fingerprints,
            "config": self.config.as_dict(),
            "version": __version__,
        }
        self.checkpoints.save(self.model, self.optimizer, facts)
        self.log.write({"step": self.done, "saving": folder_name(self.done)})

    def evaluate(self) -> None:
        """Held-out loss of each source and of the mixture, and samples."""
        was_training = self.model.training
        self.model.eval()
        sums = held_out_sums(
            self.model,
            self.data.held_out_batches(),
            n_sources=len(self.data.names),
            device=self.world.device,
            precision=self.autocast,
        )
        sums = self.world.total(sums)
        each = (sums[:, 0] / sums[:, 1]).tolist()
        losses = dict(zip(self.data.names, each, strict=True))
        if len(losses) > 1:
            losses["mixture"] = sum(share * loss for share, loss in zip(self.data.shares, each, strict=True))
        self.held_out = losses
        self.log.write({"step": self.done, "held_out": losses})
        shown = "  ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        self.log.say(f"step {self.done}/{self.config.steps}  held-out loss: {shown}")
        self._sample()
        self.model.train(was_training)

    def autocast(self) -> AbstractContextManager[object]:
        if self.precision != "bf16":
            return nullcontext()
        return torch.autocast(self.world.device.type, torch.bfloat16)

    def _sample(self) -> None:
        settings, tokenizer = self.config.eval, self.data.tokenizer
        limit = self.config.model.block_size
        if settings.sample_tokens == 0 or tokenizer.size > self.config.model.vocab_size or limit < 2:
            return
        for index, prompt in enumerate(settings.prompts):
            ids = (tokenizer.encode(prompt) or [tokenizer.end_of_text])[: limit - 1]
            request = Request(
                prompt=ids,
                max_new=min(settings.sample_tokens, limit - len(ids)),
                sampling=Sampling(temperature=settings.temperature, seed=_mix(self.config.seed, self.done, index)),
                end_ids=(),
            )
            # Every length is a new shape: not worth compiling for. Recomputed, since a sharded model runs as a whole.
            with self.autocast(), torch.compiler.set_stance("force_eager"):
                (written,) = generate(self.model, [request], tokenizer=tokenizer, method="recomputed")
            text = tokenizer.decode([*ids, *written.ids])
            self.log.write({"step": self.done, "held_out_sample": text, "prompt": prompt})
            self.log.say(f"  sample: {text!r}")

    def _save_is_due(self) -> bool:
        every, at_end = self.config.save.every, self.done == self.config.steps or self._stop
        return at_end or self.done in self.config.milestone_steps or (every > 0 and self.done % every == 0)

    def _evaluation_is_due(self) -> bool:
        every = self.config.eval.every
        return self.done == self.config.steps or (every > 0 and self.done % every == 0)

    def _count_skipped(self, skipped: bool) -> None:
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if skipped:
            self.log.say(f"step {self.done}: the loss or its gradient is not finite; the step is skipped")
        if skipped and self.skipped_in_a_row > self.config.optim.max_skipped:
            in_a_row, self.skipped_in_a_row = self.skipped_in_a_row, 0
            self.save()  # the weights of the last good step
            where = f"The weights of the last good step are in {self.folder / folder_name(self.done)}"
            try:
                self.checkpoints.finish()
            except SaveError as error:
                where = f"They could not be saved ({error}); earlier checkpoints are whole"
            raise ValueError(
                f"{in_a_row} steps in a row were not finite, so the run stops after step {self.done}. {where}: look at "
                "the data, lower --optim.lr in a new run with --init-from, or try further with --resume"
            )

    def _report_failed_save(self, *, final: bool = False) -> None:
        """A checkpoint that failed in the background is reported; at the end of a run it is an error."""
        try:
            self.checkpoints.finish()
        except SaveError as error:
            if final:
                raise ValueError(f"{error}. The checkpoints before it are whole: make room and --resume") from None
            self.log.say(f"{error}. The run goes on, and the next checkpoint is tried as planned")

    def _announce(self) -> None:
        config, data, world = self.config, self.data, self.world
        if self.done:
            self.log.say(f"resumed {self.folder} after step {self.done}")
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.log.say(
            f"{config.name}: {parameters:,} parameters, {config.steps:,} steps of {config.tokens_per_step:,} tokens "
            f"({config.rows} rows = {data.n_micro} × {data.micro_rows} × {world.size} "
            f"rank{'s' * (world.size > 1)}), {world.device.type}, {self.precision}; writing to {self.folder}"
        )
        for line in data.describe(config.steps):
            self.log.say(f"  {line}")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and the first Ctrl-C let the step finish, save and end; the second Ctrl-C ends at once."""

        def stop(number: int, _: Any) -> None:
            if self._asked_to_stop and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._asked_to_stop = True
            self.log.say(f"{signal.Signals(number).name}: finishing this step, then saving")

        try:
            before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        except ValueError:  # not the main thread: whoever started us handles signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _mix(*numbers: int) -> int:
    """One seed from several numbers."""
    return zlib.crc32(repr(numbers).encode())
