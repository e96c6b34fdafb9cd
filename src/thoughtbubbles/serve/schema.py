"""The requests of /v1: their fields, and what they ask of the engine.

Fields are OpenAI's, and some that they do not have: budget (streams per token), top_k, min_p and repetition_penalty. A
field that is null counts as left out, also in stream_options. What the engine cannot do is accepted only where it asks
for nothing.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import BaseModel, Field, field_validator, model_validator

from thoughtbubbles.data.encode import encode_parts
from thoughtbubbles.data.records import chat_parts
from thoughtbubbles.generate.jobs import Request
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.model.budget import brief
from thoughtbubbles.serve.errors import ApiError
from thoughtbubbles.serve.served import Served

MOST_PROMPTS, MOST_SAMPLES, MOST_STOPS = 64, 16, 4
MOST_TOP, MOST_CHAT_TOP = 5, 20
COLDEST = 0.001  # temperature; below it, sampling is greedy
USUAL_NEW = 16  # tokens of /v1/completions without max_tokens
LONGEST_NAME = 400
Finite = Annotated[float, Field(allow_inf_nan=False)]
Prompt = str | list[int]


class StreamOptions(BaseModel, extra="forbid", strict=True):
    include_usage: bool = False
    include_obfuscation: bool = False  # ignored: nothing is obfuscated

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return _without_nulls(given) if isinstance(given, Mapping) else given


class BaseRequest(BaseModel, extra="forbid", strict=True):
    """What both kinds of requests have."""

    # Fields that ask for something that we do not have, and the values at which they ask for nothing.
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "presence_penalty": (0,),
    }
    ignored: ClassVar[tuple[str, ...]] = ("user",)

    model: Annotated[str, Field(max_length=LONGEST_NAME)]
    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Finite = 1.0
    top_k: int | None = None
    min_p: Finite = 0.0
    repetition_penalty: Finite = 1.0
    budget: int | float | str | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_what_says_nothing(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        for name, values in cls.neutral.items():
            if given.get(name) is not None and given[name] not in values:
                raise ApiError(400, f"{name} = {brief(given[name])} is not supported: leave it out", param=name)
        dropped = {*cls.neutral, *cls.ignored}
        return {name: value for name, value in _without_nulls(given).items() if name not in dropped}

    @field_validator("stop", mode="plain")
    @classmethod
    def _check_stop(cls, given: Any) -> tuple[str, ...]:
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise ValueError("give a text or a list of texts, none of them empty")
        if len(texts) > MOST_STOPS:
            raise ValueError(f"{len(texts)} texts: give at most {MOST_STOPS}")
        return tuple(texts)

    @field_validator("budget", mode="plain")
    @classmethod
    def _check_budget(cls, given: Any) -> int | float | str:
        if isinstance(given, bool) or not isinstance(given, int | float | str):
            raise ValueError('give streams per token: a number such as 1.5, or a fraction such as "4/3"')
        return given

    @model_validator(mode="after")
    def _check_stream_options(self) -> "BaseRequest":
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options are for stream: true only", param="stream_options")
        return self

    @property
    def has_usage(self) -> bool:
        """Whether the stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, seed: int) -> Sampling:
        return Sampling(
            temperature=self.temperature if self.temperature >= COLDEST else 0,
            top_p=self.top_p,
            top_k=None if self.top_k == -1 else self.top_k,  # −1: all tokens, as in vLLM
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=(seed + 2**63) % 2**64 - 2**63,  # wraps around
        )


class CompletionRequest(BaseRequest):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {**BaseRequest.neutral, "suffix": ("",)}

    prompt: list[Prompt] = [""]
    max_tokens: Annotated[int | None, Field(ge=0)] = None
    logprobs: Annotated[int | None, Field(ge=0, le=MOST_TOP)] = None
    echo: bool = False
    best_of: int | None = None

    @field_validator("prompt", mode="plain")
    @classmethod
    def _check_prompt(cls, given: Any) -> list[Prompt]:
        """A text, the ids of one, or a list of texts or of ids."""
        prompts = [given] if isinstance(given, str) or _is_ids(given) else given
        if not isinstance(prompts, list) or not all(isinstance(each, str) or _is_ids(each) for each in prompts):
            raise ValueError("give a text, a list of token ids, or a list of texts or of lists of ids")
        if len(prompts) > MOST_PROMPTS:
            raise ValueError(f"{len(prompts)} prompts: give at most {MOST_PROMPTS} in one request")
        return prompts

    @model_validator(mode="after")
    def _check_together(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n):
            raise ApiError(
                400, f"best_of = {brief(self.best_of)}: only n = {self.n} is supported; leave it out", param="best_of"
            )
        if self.max_tokens == 0 and not self.is_scored:
            raise ApiError(400, "max_tokens = 0 needs echo and logprobs, to score the prompt", param="max_tokens")
        return self

    @property
    def is_scored(self) -> bool:
        """Whether the log-probabilities of the prompt's own tokens are asked for."""
        return self.echo and self.logprobs is not None

    @property
    def top(self) -> int | None:
        return self.logprobs

    def prompts(self, served: Served) -> list[list[int]]:
        """As ids; an empty prompt has none."""
        return [_ids_of(served, each) for each in self.prompt]


class ChatRequest(BaseRequest):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **BaseRequest.neutral,
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "response_format": ({"type": "text"},),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
    ignored: ClassVar[tuple[str, ...]] = (
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    )

    messages: list[dict[str, str]]
    max_tokens: Annotated[int | None, Field(ge=1)] = None  # the older name of the next one
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MOST_CHAT_TOP)] = None

    @field_validator("messages", mode="plain")
    @classmethod
    def _check_messages(cls, given: Any) -> list[dict[str, str]]:
        if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
            raise ValueError("give a list of {role, content}, at least one")
        if given[-1].get("role") == "assistant":
            raise ValueError("the last message is the assistant's: end with what it is to answer")
        found = [_message(each) for each in given]
        chat_parts(found)  # checks the roles
        return found

    @model_validator(mode="after")
    def _check_together(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return self

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompt(self, served: Served) -> list[int]:
        """The chat as in training: each part tokenized separately, the answer's beginning last."""
        ids, _ = encode_parts(served.tokenizer, chat_parts(self.messages))
        found: list[int] = ids.tolist()
        return found


class Prepared(NamedTuple):
    """What a request asks of the engine. Sample i of prompt p is choice c = p × n + i. Its seed is `seed` + c, so equal
    prompts get different samples; after 2^63 − 1 comes −2^63.
    """

    requests: list[Request]
    seed: int
    prompts: list[list[int]]  # as they were given: an empty one has no ids


def prepare(asked: CompletionRequest | ChatRequest, served: Served) -> Prepared:
    """Raises ApiError or ValueError."""
    if isinstance(asked, CompletionRequest):
        prompts, field, most, scored = asked.prompts(served), "prompt", asked.max_tokens, asked.is_scored
    else:
        prompts, field, scored = [asked.prompt(served)], "messages", False
        most = asked.max_completion_tokens or asked.max_tokens
    usual = USUAL_NEW if isinstance(asked, CompletionRequest) else served.model.config.block_size
    seed = secrets.randbits(53) if asked.seed is None else asked.seed
    started = [ids or [served.tokenizer.end_of_text] for ids in prompts]  # what an empty text begins with
    requests = [
        Request(
            prompt=ids,
            max_new=_max_new(ids, served, field, most, usual=usual),
            budget=asked.budget,
            sampling=asked.sampling(seed + p * asked.n + i),
            stop=asked.stop,
            top=min(asked.top or 0, served.tokenizer.size),
            score_prompt=scored,
        )
        for p, ids in enumerate(started)
        for i in range(asked.n)
    ]
    return Prepared(requests, seed, prompts)


def _max_new(ids: Sequence[int], served: Served, field: str, asked: int | None, *, usual: int) -> int:
    """As many as asked for; the usual number is cut to what fits."""
    length = served.model.config.block_size
    new = max(1, min(usual, length - len(ids))) if asked is None else asked
    if len(ids) + new > length:
        raise ApiError(
            400,
            f"the model's context length is {length} tokens, but {field} has {len(ids)} and {brief(new)} more are "
            "asked for: shorten one of them",
            param=field,
            code="context_length_exceeded",
        )
    return new


def _is_ids(given: Any) -> bool:
    return isinstance(given, list) and all(type(each) is int for each in given)


def _ids_of(served: Served, prompt: Prompt) -> list[int]:
    ids = served.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if wrong := [i for i in ids if not 0 <= i < served.tokenizer.size]:
        most = served.tokenizer.size - 1
        raise ApiError(400, f"prompt has the id {brief(wrong[0])}: ids are from 0 to {most}", param="prompt")
    return ids


def _without_nulls(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _message(given: Mapping[str, Any]) -> dict[str, str]:
    """OpenAI's newer name for system is developer. An assistant that called tools may have no content."""
    role, content = given.get("role"), given.get("content")
    if role == "assistant" and content is None:
        content = ""
    return {"role": "system" if role == "developer" else str(role), "content": _text_of(content)}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _text_of(content: Any) -> str:
    """A message's content: a text, or a list of parts of type text."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part["text"] for part in parts if _is_text(part)]
    if len(texts) != len(parts):
        raise ValueError("the content of a message is not text: only text is supported")
    return "".join(texts)
