"""The training loop, used for pretraining, mid-training and fine-tuning. Order: step → log → save → evaluate.

Step n reads batch n and seeds its random numbers with (seed, n). The number of finished steps is therefore the only
state besides weights and optimizer, and a run that is killed and resumed is bit-identical to one that is not.

The device never waits for the host: `launch` queues a step and the copies of the next step's batches. Its loss and norm
are read after the next step has been launched, unless logging, saving or evaluation needs them earlier.
"""

import math
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thoughtbubbles import __version__
from thoughtbubbles.distributed import World, joined
from thoughtbubbles.model.fork import ForkRecord
from thoughtbubbles.train.config import RunConfig
from thoughtbubbles.train.data import RunData, StepInputs
from thoughtbubbles.train.forks import fork_statistics
from thoughtbubbles.train.initialize import build_model, check_tokenizer, own_folder
from thoughtbubbles.train.kernel_warmup import warm_up_kernels
from thoughtbubbles.train.log import Log, Speed, peak_tflops
from thoughtbubbles.train.optim import Optimizer, learning_rate, warmup_steps
from thoughtbubbles.train.parallel import find_precision, parallelize, sync_gradients, uses_graph
from thoughtbubbles.train.precision import MixedPrecision
from thoughtbubbles.train.resume import describe, find_checkpoint, same_run, same_settings
from thoughtbubbles.train.state import Checkpoints, SaveError, clean, folder_name, read_state, restore, set_aside
from thoughtbubbles.train.step import AsyncScalars, ForwardBackward, MicroBatch
from thoughtbubbles.train.validation import mix, samples, validation_losses
from thoughtbubbles.train.watch import Watch


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    checkpoint: Path  # the last one
    step: int
    finished: bool  # False: stopped by a signal, to be resumed
    validation_loss: dict[str, float]  # of each source at the last evaluation; empty where there is none
    stopped_by: int | None = None  # the signal's number

    @property
    def exit_code(self) -> int:
        """0 for a finished run, else 128 + signal number, as shells and schedulers expect."""
        return 0 if self.finished else 128 + (self.stopped_by or signal.SIGTERM)


class Launched(NamedTuple):
    """A step that has been queued on the device."""

    step: int  # counted from 1
    numbers: AsyncScalars  # loss, gradient norm, real targets, and whether a rank was asked to stop
    lr: float
    budget: float | None  # None: the model's own
    forks: tuple[ForkRecord, ...] | None  # of the last forward, if this step is logged
    lengths: Tensor
    n_tokens: int


def train(config: RunConfig, *, resume: bool = False) -> Result:
    with joined(config.device) as world:
        try:
            with own_folder(config.folder, world):
                return Trainer(config, world, resume=resume).run()
        except BaseException as error:
            if not world.is_distributed:
                raise
            # Other ranks may be waiting for this one, in a step or in a save: torchrun ends them once it exits.
            text = str(error) if isinstance(error, ValueError) else traceback.format_exc()
            print(f"rank {world.rank}: {text}", file=sys.stderr, flush=True)
            os._exit(1)


class Trainer:
    def __init__(self, config: RunConfig, world: World, *, resume: bool = False):
        self.config, self.world, self.folder = config, world, config.folder
        self.log = Log(self.folder, config.log, name=config.name, steps=config.steps, is_first=world.is_first)
        found = world.first(lambda: find_checkpoint(self.folder, resume=resume, say=self.log.say))
        self.precision = find_precision(config.compute, world.device.type)
        if found is not None:
            same_settings(read_state(found), found, config, precision=self.precision)  # before anything is written
        self.data = RunData(config, world)
        state = None
        self.warmup = warmup_steps(config.optim, config.steps)
        if found is not None:
            state = same_run(found, config, precision=self.precision, fingerprints=self.data.fingerprints)
            self.warmup = state.warmup_steps if state.warmup_steps is not None else self.warmup
        elif config.init_from is not None:
            check_tokenizer(config.init_from, self.data.tokenizer.name)

        join = warm_up_kernels(config.model, config.compute, world)
        self.model = build_model(config if found is None else replace(config, init_from=None), self.log.say)
        self.model.to(world.device, torch.float64 if self.precision == "float64" else torch.float32)
        parallelize(self.model, world, config.compute)
        self.products = MixedPrecision(
            self.model, self.precision, device=world.device.type, is_sharded=world.is_distributed
        )

        def settle() -> None:
            join()
            self.checkpoints.wait()

        graph = uses_graph(config.compute, world)
        self.passes = ForwardBackward(self.model, self.products, graph=graph, join=settle)
        self.optimizer = Optimizer(self.model, config.optim)
        self.checkpoints = Checkpoints(
            self.folder,
            world,
            keep=config.save.keep,
            milestones=config.milestone_steps | set(state.milestones or () if state is not None else ()),
            tokenizer=self.data.tokenizer,
        )
        self.done = self.skipped_in_a_row = 0  # finished steps; how many of the latest ones were skipped
        if found is not None and state is not None:
            restore(found, self.model, self.optimizer, world)
            self.done, self.skipped_in_a_row = state.step, state.skipped_in_a_row
        self._ahead: StepInputs | None = None  # of the next step
        self._unread: Launched | None = None  # the step whose loss and norm have not been read yet
        self._most_skipped = 0  # steps in a row, in this process
        self._begun_at = self.done
        self.validation_loss: dict[str, float] = {}
        self._signal: int | None = None  # the signal that asked this rank to stop
        self._stop = False  # as agreed by all ranks

    def run(self) -> Result:
        config = self.config
        if self.world.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            clean(self.folder)
            set_aside(self.folder, self.done)
            describe(self.folder, config, done=self.done, warmup=self.warmup)
        self.log.start(config.as_dict(), done=self.done)
        self._announce()
        speed = Speed(
            flops_per_token=config.flops_per_row / config.model.block_size,
            peak=peak_tflops(config.log, self.world.device),
            world=self.world.size,
            tokens=self.done * config.tokens_per_step,
        )
        watch = Watch(config, self.world, self.log, begin=self.done)
        try:
            with self._signals():
                if self.done and config.evaluates_after(self.done):  # the run may have been killed before evaluating
                    self.evaluate()
                while self.done < config.steps and not self._stop:
                    if watch.is_due(self.done):
                        watch.look(lambda: self._round(speed), is_over=lambda: self._stop)
                        speed.pause(self.done * config.tokens_per_step)
                    else:
                        self._round(speed)
                watch.close()
                self._report_failed_save(final=True)  # still with signals handled: the save must finish
            finished = self.done == config.steps
            if not finished:
                command = f"thoughtbubbles train --resume {self.folder}"
                self.log.say(f"stopped after step {self.done}; resume with: {command}")
            checkpoint = self.folder / folder_name(self.done)
            return Result(self.folder, checkpoint, self.done, finished, self.validation_loss, self._signal)
        except Exception:
            if not self.world.is_distributed:  # finishing a save needs all ranks, and the others are being ended
                with suppress(Exception):
                    self.checkpoints.finish()  # a save that started before the error
            raise
        finally:
            with suppress(Exception):  # do not hide the original error
                self._note_unread(speed)
            self.log.close()

    def _round(self, speed: Speed) -> None:
        """One step, and the logging, saving and evaluation due after it, which need its loss and norm.

        Otherwise these are read after the next step has been launched, so that the device never waits for the host.
        """
        config, before = self.config, self._unread
        self._unread = self.launch()
        self.done += 1
        if not self.world.is_distributed:  # several ranks must agree: they learn of a signal one step later
            self._stop = self._stop or self._signal is not None
        if before is not None:
            self._note(before, speed)
        is_due = config.logs_after(self.done) or config.saves_after(self.done) or config.evaluates_after(self.done)
        is_due = is_due or self.done == self._begun_at + 1  # report the first step right away
        if is_due or self._stop or self.skipped_in_a_row:
            self._note_unread(speed)
        self._end_if_too_many_were_skipped()
        if self.checkpoints.is_written:
            self._report_failed_save()
        tokens = self.done * config.tokens_per_step
        if config.saves_after(self.done) or self._stop:
            self.save()
            speed.pause(tokens)
        if config.evaluates_after(self.done) and (not self._stop or self.done == config.steps):  # else at --resume
            self.evaluate()
            speed.pause(tokens)

    def _note_unread(self, speed: Speed) -> None:
        if self._unread is not None:
            launched, self._unread = self._unread, None
            self._note(launched, speed)

    def _note(self, launched: Launched, speed: Speed) -> None:
        facts, step = self.read(launched), launched.step
        tokens = step * self.config.tokens_per_step
        if self.config.logs_after(step):
            of_row = self.config.flops_per_row_in(step - 1)
            facts |= speed.read(tokens, flops_per_token=of_row / self.config.model.block_size)
            if self.world.device.type == "cuda":
                facts["peak_memory_GiB"] = torch.cuda.max_memory_allocated() / 2**30
        self.log.step({"step": step, "tokens": tokens, **facts})
        self._count_skipped(facts["skipped"], step)

    def launch(self) -> Launched:
        """Queues an optimizer step on global batch `done`, then the copies of the next step's batches.

        The loss is the mean over all real targets of all ranks. The host does not wait for the device.
        """
        config, device, n = self.config, self.world.device, self.done
        torch.manual_seed(mix(config.seed, n, self.world.rank))
        inputs = self._ahead if self._ahead is not None and self._ahead.step == n else self.data.inputs(n)
        shares = inputs.real / inputs.all_real.clamp(min=1)
        last = len(inputs.micros) - 1

        total = torch.zeros((), device=device)
        is_logged, budget = config.logs_after(n + 1), config.budget_of(n)
        for index, (ids, targets, lengths) in enumerate(inputs.micros):
            sync_gradients(self.model, index == last)
            micro = MicroBatch(ids, targets, lengths, shares[index])
            passed = self.passes(micro, is_first=index == 0, budget=budget, trace=is_logged and index == last)
            total = total + passed.loss
        loss, stop = self.world.total(torch.stack([total, torch.full_like(total, self._signal is not None)]))
        lr = learning_rate(config.optim, n, config.steps, self.warmup)
        norm = self.optimizer.step(lr, clip=config.optim.clip, loss=loss)
        self.passes.release()
        numbers = torch.stack([number.to(inputs.real.dtype) for number in (loss, norm, inputs.all_real, stop)])
        later = AsyncScalars(numbers)
        self._ahead = self.data.inputs(n + 1) if n + 1 < config.steps else None
        return Launched(n + 1, later, lr, budget, passed.forks if is_logged else None, lengths, ids.shape[1])

    def read(self, step: Launched) -> dict[str, Any]:
        """Loss, gradient norm and fork statistics of a step. Only here does the host wait for the device."""
        loss, norm, targets, stop = step.numbers.read()
        self._stop = self._stop or stop > 0  # all ranks stop after the same step
        facts: dict[str, Any] = {"loss": loss, "targets": max(1, int(targets)), "lr": step.lr, "gradient_norm": norm}
        facts["skipped"] = not (math.isfinite(loss) and math.isfinite(norm))  # same rule as in the optimizer
        if step.budget is not None:
            facts["budget"] = step.budget
        if step.forks:
            facts["forks"] = fork_statistics(step.forks, step.lengths, step.n_tokens)
        return facts

    def save(self) -> None:
        self._report_failed_save()
        facts = {
            "format": 1,
            "step": self.done,
            "updates": self.optimizer.updates,
            "skipped_in_a_row": self.skipped_in_a_row,
            "warmup_steps": self.warmup,
            "ranks": self.world.size,
            "milestones": sorted(self.checkpoints.milestones),
            "precision": self.precision,
            "data": self.data.fingerprints,
            "config": self.config.as_dict(),
            "version": __version__,
        }
        self.checkpoints.save(self.model, self.optimizer, facts)
        self.log.write({"step": self.done, "saving": folder_name(self.done)})

    def evaluate(self) -> None:
        """Validation loss of each source and of the mixture, and samples."""
        was_training = self.model.training
        self.model.eval()
        budget = self.config.validation_budget(self.done)
        self.validation_loss = validation_losses(
            self.model, self.data, world=self.world, products=self.products, budget=budget
        )
        if self.validation_loss:
            of_budget = {} if budget is None else {"budget": budget}
            self.log.write({"step": self.done, "validation_loss": self.validation_loss, **of_budget})
            shown = "  ".join(f"{name} {loss:.4f}" for name, loss in self.validation_loss.items())
            at = "" if budget is None else f" (budget {budget:g})"
            self.log.say(f"step {self.done}/{self.config.steps}  validation loss{at}: {shown}")
        for prompt, text in samples(self.model, self.data, self.config, products=self.products, step=self.done):
            self.log.write({"step": self.done, "sample": text, "prompt": prompt})
            self.log.say(f"  sample: {text!r}")
        self.model.train(was_training)

    def _count_skipped(self, skipped: bool, step: int) -> None:
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if skipped:
            self.log.say(f"step {step}: the loss or its gradient is not finite; skipping the step")
        self._most_skipped = max(self._most_skipped, self.skipped_in_a_row)

    def _end_if_too_many_were_skipped(self) -> None:
        if self._most_skipped > self.config.optim.max_skipped:
            in_a_row, self.skipped_in_a_row = self._most_skipped, 0
            self.save()  # the weights of the last good step
            where = f"The weights of the last good step are in {self.folder / folder_name(self.done)}"
            try:
                self.checkpoints.finish()
            except SaveError as error:
                where = f"They could not be saved ({error}); earlier checkpoints are complete"
            raise ValueError(
                f"{in_a_row} steps in a row were not finite, so the run stops after step {self.done}. {where}: check "
                "the data, lower --optim.lr in a new run with --init-from, or try again with --resume"
            )

    def _report_failed_save(self, *, final: bool = False) -> None:
        """Reports a checkpoint that failed in the background; at the end of a run this is an error."""
        try:
            self.checkpoints.finish()
        except SaveError as error:
            if final:
                raise ValueError(f"{error}. Earlier checkpoints are complete: free disk space and --resume") from None
            self.log.say(f"{error}. The run continues; the next checkpoint will be saved as planned")

    def _announce(self) -> None:
        config, data, world = self.config, self.data, self.world
        if self.done:
            self.log.say(f"resumed {self.folder} after step {self.done}")
            if self.warmup != warmup_steps(config.optim, config.steps):
                self.log.say(f"its length has changed; the warm-up is still {self.warmup} steps")
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.log.say(
            f"{config.name}: {parameters:,} parameters, {config.steps:,} steps of {config.tokens_per_step:,} tokens "
            f"({config.rows} rows = {data.n_micro} × {data.micro_batch_size} × {world.size} "
            f"rank{'s' * (world.size > 1)}), {world.device.type}, {self.precision}; writing to {self.folder}"
        )
        for line in [*data.describe(config.steps), *data.notes]:
            self.log.say(f"  {line}")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """On SIGTERM and the first Ctrl-C, finishes the step (with several ranks also the next one), saves and exits.

        A second Ctrl-C exits immediately.
        """

        def stop(number: int, _: Any) -> None:
            if self._signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._signal = number
            self.log.say(f"{signal.Signals(number).name}: finishing this step, then saving")

        try:
            before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        except ValueError:  # not in the main thread: the caller handles signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
