"""Fine-tuning with Hugging Face's Trainer takes the steps that our loop takes."""

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import thoughtbubbles
from helpers import lively_model
from interop.hf_models import config_of
from thoughtbubbles import Thoughtbubbles
from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.distributed import joined
from thoughtbubbles.interop.export import export
from thoughtbubbles.interop.hf import ThoughtbubblesForCausalLM
from thoughtbubbles.train.data import RunData
from thoughtbubbles.train.loop import train
from train.runs import small_run, uneven_examples

STEPS = 5
SAME_LOSS = 1e-5  # float32, after steps of two implementations of AdamW


class InOrder(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class Recording(Trainer):
    """Logged losses are rounded; these are not."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), float(loss.detach())]
        return loss


def arguments(out, *, rows=8, **changes):
    return TrainingArguments(
        output_dir=str(out),
        max_steps=STEPS,
        per_device_train_batch_size=rows,
        lr_scheduler_type="constant",
        learning_rate=1e-3,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **changes,
    )


def rows_of(ids, targets, lengths):
    """Hugging Face shifts labels by itself, so a row is its ids and the last target; here padded on the right."""
    rows = []
    for tokens, following, n in zip(ids, targets, lengths.tolist(), strict=True):
        row = torch.cat([tokens[:n], following[n - 1 : n].clamp(min=0)])
        labels = torch.cat([torch.tensor([-100]), following[:n]])
        empty = torch.zeros(32 - len(row), dtype=torch.long)
        rows.append(
            {
                "input_ids": torch.cat([row, empty]),
                "labels": torch.cat([labels, empty - 100]),
                "attention_mask": torch.cat([torch.ones_like(row), empty]),
            }
        )
    return rows


@pytest.mark.parametrize(("merge", "accumulated"), [("mixture", 2), ("residual", 1)])
@pytest.mark.slow
def test_the_trainer_takes_our_steps(tmp_path, merge, accumulated):
    """Rows of 3 to 31 tokens, of which some count: the mean is over all of a step, however it is split."""
    corpus = uneven_examples(tmp_path / "examples")
    run = small_run(tmp_path / "run", steps=STEPS, model_merge=merge, data_mixture=(str(corpus),), eval_every=99)
    run = replace(
        run,
        device="cpu",
        init_from=tmp_path / "start",
        optim=replace(run.optim, lr=1e-3, schedule="constant", warmup=0.0, weight_decay=0.0, clip=1.0),
        compute=replace(run.compute, precision="float32"),
    )
    torch.manual_seed(0)
    save_model(tmp_path / "start", Thoughtbubbles(run.model))
    train(run)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    ours = [line["loss"] for line in lines if "loss" in line]
    with joined("cpu") as world:
        data = RunData(run, world)
        batches = [micro for step in range(STEPS) for micro in data.inputs(step).micros]

    trainer = Recording(
        model=ThoughtbubblesForCausalLM.from_pretrained(tmp_path / "start"),
        args=arguments(tmp_path / "theirs", rows=8 // accumulated, gradient_accumulation_steps=accumulated),
        train_dataset=InOrder([row for batch in batches for row in rows_of(*batch)]),
    )
    trainer.train()
    theirs = [sum(trainer.losses[i : i + accumulated]) for i in range(0, len(trainer.losses), accumulated)]
    assert len(ours) == len(theirs) == STEPS
    assert ours[-1] < ours[0] - 0.05
    torch.testing.assert_close(torch.tensor(theirs), torch.tensor(ours), atol=SAME_LOSS, rtol=0)


def test_text_in_a_fine_tuned_model_out(tmp_path):
    """The usual way: tokenizer, collator, Trainer with evaluation, save; and both sides open what was saved."""
    core = lively_model(config_of("causal", vocab_size=300, block_size=32), dtype=torch.float32)
    save_model(tmp_path / "start", core, tokenizer=tokenizer("bytes"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "start")
    texts = [{"input_ids": theirs(f"{n} and {n} make {2 * n}")["input_ids"]} for n in range(16)]
    trainer = Trainer(
        model=model,
        args=arguments(tmp_path / "out", gradient_checkpointing=True, prediction_loss_only=False),
        train_dataset=texts,
        eval_dataset=texts[:5],
        processing_class=theirs,
        data_collator=DataCollatorForLanguageModeling(theirs, mlm=False),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    assert trainer.predict(texts[:2]).predictions.shape[-1] == 300
    trainer.save_model(str(tmp_path / "tuned"))
    ids = torch.tensor([texts[0]["input_ids"]])
    native = thoughtbubbles.load(tmp_path / "tuned").eval()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").eval()
    with torch.no_grad():
        assert torch.equal(native(ids, want=("logits",)).logits, again(ids).logits)
    assert again.config.n_ids == 257
    written = again.generate(ids[:, :5], max_new_tokens=2, return_dict_in_generate=True)
    assert written.past_key_values is not None  # the Trainer turns the cache off for itself alone
    out = export(tmp_path / "tuned", out=tmp_path / "hub")
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(out).eval()(ids).logits, again(ids).logits)
    assert AutoTokenizer.from_pretrained(out)("fork")["input_ids"] == theirs("fork")["input_ids"]
