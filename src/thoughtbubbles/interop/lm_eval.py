"""Our models in EleutherAI's lm-evaluation-harness: `lm_eval --model thoughtbubbles --model_args checkpoint=DIR`.

The harness requests log-likelihoods and generated text. Rows of different lengths share a batch, and the model is given
their lengths, so padding does not change their results. Without lengths, padding would compete for the budget of block
selection: the `hf` model of the harness pads on the right and does not pass a mask.

The harness knows the models of its own list; others must be imported first. The definitions that `harness_tasks` writes
refer to `LocalTask` in this file: reading one imports the file, which registers the name `thoughtbubbles` for the stock
command.
"""

import inspect
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

import lm_eval.models  # noqa: F401 (its list of models; the registry fills itself only while it is empty)
import torch
from datasets import Dataset, DatasetDict
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from thoughtbubbles.checkpoint import find_model, load, load_tokenizer
from thoughtbubbles.distributed import find_device
from thoughtbubbles.evals.documents import records
from thoughtbubbles.evals.likelihood import BATCH_TOKENS, Query, log_likelihoods
from thoughtbubbles.files import short_name
from thoughtbubbles.generate.command import DEVICES
from thoughtbubbles.generate.requests import Method, Request, budget_problem, generate
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.model.config import is_whole

MAX_NEW = 256  # the harness's own default
MOST_TOKENS = 2**40
ASKED_BY_NOBODY = "cuda:0"  # the default of --device in its command, on every machine
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
logger = logging.getLogger(__name__)


@register_model("thoughtbubbles")
class ThoughtbubblesLM(TemplateLM):
    def __init__(
        self,
        checkpoint: str | Path,
        *,
        budget: int | float | str | None = None,
        dtype: str = "float32",
        device: str = "auto",
        batch_tokens: int | None = None,
        method: Method | None = None,
        compile: bool = False,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ):
        """
        checkpoint    a model folder, a checkpoint of a run, a run (its newest checkpoint), or bubbles-7m
        budget        streams per token, overrides the model's own, such as 2, 1.5 or 4/3
        dtype         float32, float64 or bfloat16 (matrix products only, as in training on a GPU; for generation, the
                      weights too)
        device        auto: cuda if available, else cpu
        batch_tokens  tokens per batch, including padding; None: depends on the device
        method        how text is generated, "cached" or "uncached"; None: whichever is exact for the model
        compile       on cuda: generate with CUDA graphs of compiled kernels
        batch_size, max_batch_size
                      options of the harness; not used, since rows differ too much in length for one number
        """
        super().__init__()
        check_options(checkpoint, dtype=dtype, batch_tokens=batch_tokens, method=method, compile=compile)
        self.folder = find_model(checkpoint)
        tokenizer = load_tokenizer(self.folder)
        if tokenizer is None:
            raise ValueError(
                f"{self.folder} has no tokenizer: the harness works with text; save the model with its tokenizer"
            )
        self.tokenizer = tokenizer
        if device == ASKED_BY_NOBODY and not torch.cuda.is_available():
            device = "auto"
        self._device = _device(device)
        self.dtype = dtype
        kept = torch.float64 if dtype == "float64" else torch.float32
        self.model = load(self.folder, device=self._device, dtype=kept).eval()
        if budget is not None and (wrong := budget_problem(self.model.config, budget)):
            raise ValueError(wrong)
        self.budget = budget
        self.batch_tokens = batch_tokens or BATCH_TOKENS[self._device.type]
        self.method, self.compile = method, compile
        self.n_truncated = 0

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "ThoughtbubblesLM":
        """From --model_args, else from options such as --device, which always has a value."""
        options = {name: value for name, value in (additional_config or {}).items() if value is not None}
        known = inspect.signature(cls.__init__).parameters
        if unknown := sorted(name for name in arg_dict if name not in known or name == "self"):
            raise ValueError(f"--model_args has {unknown[0]}: what can be set is {', '.join(list(known)[1:-2])}")
        if "checkpoint" not in arg_dict:
            raise ValueError("--model_args has no checkpoint: give checkpoint=DIR, the model's folder")
        return cls(**{name: value for name, value in {**options, **arg_dict}.items() if name in known})

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.end_of_text

    @property
    def max_length(self) -> int:
        return self.model.config.block_size

    @property
    def max_gen_toks(self) -> int:
        return min(MAX_NEW, self.max_length // 2)

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """There are no special tokens to add."""
        return self.tokenizer.encode(string)

    def get_model_info(self) -> dict[str, Any]:
        """For the harness's results, under `config`."""
        config = self.model.config
        forks = bool(config.fork_layers)
        return {
            "model_num_parameters": sum(p.numel() for p in self.model.parameters()),
            "model_dtype": self.dtype,
            "checkpoint": str(self.folder),
            "selection": config.selection if forks else None,
            "budget": (config.budget if self.budget is None else self.budget) if forks else None,
            "budget_mode": "proportional" if forks else None,
            "block_size": config.block_size,
            "requests_truncated": self.n_truncated,
        }

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        queries = [Query(tuple(context) or (self.eot_token_id,), tuple(scored)) for _, context, scored in requests]
        with tqdm(total=len(queries), desc="log-likelihoods", disable=disable_tqdm) as bar, self._precision():
            found = log_likelihoods(
                self.model,
                queries,
                vocab_size=self.tokenizer.size,
                budget=self.budget,
                batch_tokens=self.batch_tokens,
                report=lambda share: bar.update(round(share * len(queries)) - bar.n),
            )
        self._report_truncated(sum(one.truncated > 0 for one in found), len(found))
        answers = [(one.log_prob, one.greedy) for one in found]
        for (asked, *_), answer in zip(requests, answers, strict=True):
            if asked is not None:
                self.cache_hook.add_partial("loglikelihood", asked, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Full documents: every token is scored once, given as many tokens before it as fit into its window."""
        windows = [self._windows(*request.args) for request in requests]
        flat = [(None, context, scored) for of_one in windows for context, scored in of_one]
        answers = iter(self._loglikelihood_tokens(flat, disable_tqdm=disable_tqdm))
        sums = [sum(next(answers)[0] for _ in of_one) for of_one in windows]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return [float(total) for total in sums]

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        rolling = get_rolling_token_windows(
            self.tok_encode(text), prefix_token=self.eot_token_id, max_seq_len=self.max_length, context_len=1
        )
        return [make_disjoint_window(window) for window in rolling]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """With the KV cache where that is exact; models with block selection read the full row again for each token."""
        asked = self._generation_requests([request.args for request in requests])
        # As in `thoughtbubbles eval`: generation reads all weights at every step.
        model = deepcopy(self.model).to(torch.bfloat16) if self.dtype == "bfloat16" else self.model
        with tqdm(total=len(asked), desc="texts", disable=disable_tqdm) as bar:
            done = generate(
                model,
                asked,
                tokenizer=self.tokenizer,
                method=self.method,
                budget_mode="proportional",
                batch_size=max(1, self.batch_tokens // self.max_length),
                compiled=self.compile,
                finished=lambda number, completion: bar.update(),
            )
        texts = [completion.text or "" for completion in done]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _generation_requests(self, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[Request]:
        repeats: Counter[str] = Counter()
        requests, n_cut = [], 0
        for text, settings in asked:
            wanted = _normalized(settings, self.max_gen_toks)
            until, max_new, do_sample = wanted.pop("until"), wanted.pop("max_gen_toks"), wanted.pop("do_sample")
            if unknown := sorted(wanted.keys() - set(SAMPLING)):
                raise ValueError(f"generation_kwargs has {unknown[0]}: what can be set is {', '.join(SAMPLING)}")
            if not (is_whole(max_new) and 1 <= max_new < self.max_length):
                raise ValueError(
                    f"max_gen_toks = {max_new}: the model reads at most block_size = {self.max_length} tokens, "
                    f"including the prompt; pass --gen_kwargs max_gen_toks={self.max_gen_toks}"
                )
            if not do_sample:
                wanted = {"temperature": 0}
            repeat = f"{text} {settings}"
            wanted["seed"] = Sampling(**wanted).seed + repeats[repeat]  # a repeated request draws a new sample
            repeats[repeat] += 1
            whole = self.tok_encode(text) or [self.eot_token_id]
            prompt = whole[-(self.max_length - max_new) :]
            n_cut += len(prompt) < len(whole)
            stop = tuple(dict.fromkeys(end for end in until if end))
            sampling = Sampling(**wanted)
            requests.append(Request(prompt=prompt, max_new=max_new, budget=self.budget, sampling=sampling, stop=stop))
        self._report_truncated(n_cut, len(requests))
        return requests

    def _report_truncated(self, n_cut: int, n_asked: int) -> None:
        self.n_truncated += n_cut
        if n_cut:
            logger.warning(
                "%d of %d prompts were truncated on the left: the model reads at most %d tokens",
                n_cut,
                n_asked,
                self.max_length,
            )

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self._device.type, torch.bfloat16) if self.dtype == "bfloat16" else nullcontext()


def check_options(checkpoint: Any, *, dtype: Any, batch_tokens: Any, method: Any, compile: Any) -> None:
    """Validates what --model_args or a caller has given."""
    methods = (None, *get_args(Method))
    for name, value, is_right, remedy in (
        ("checkpoint", checkpoint, isinstance(checkpoint, (str, Path)), "give the model's folder"),
        ("dtype", dtype, dtype in ("float32", "float64", "bfloat16"), "choose float32, float64 or bfloat16"),
        (
            "batch_tokens",
            batch_tokens,
            batch_tokens is None or (is_whole(batch_tokens) and 1 <= batch_tokens <= MOST_TOKENS),
            "give a whole number of 1 or more",
        ),
        ("method", method, method in methods, f"choose one of {', '.join(get_args(Method))}, or leave it out"),
        ("compile", compile, isinstance(compile, bool), "give True or False"),
    ):
        if not is_right:
            raise ValueError(f"{name} = {short_name(repr(value))}: {remedy}")


def _device(wanted: Any) -> torch.device:
    try:
        return torch.device(find_device(wanted, among=DEVICES) if wanted in ("auto", *DEVICES) else wanted)
    except (RuntimeError, TypeError):
        raise ValueError(f"device = {short_name(repr(wanted))}: give auto, cpu or cuda") from None


def _normalized(settings: Any, max_new: int) -> dict[str, Any]:
    try:
        return dict(normalize_gen_kwargs(settings, max_new))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"generation_kwargs = {short_name(repr(settings))} ({error}): see the harness's guide"
        ) from None


class LocalTask(ConfigurableTask):
    """An upstream task whose documents are in local JSON Lines files."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config={name: value for name, value in config.items() if name != "class"})

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        files = (dataset_kwargs or {})["data_files"]
        self.dataset = DatasetDict(
            {split: Dataset.from_list([record for _, record in records(Path(path))]) for split, path in files.items()}
        )
