"""The replies of /v1: completions as OpenAI's objects, whole or as the pieces of a stream.

Two fields are ours: `seed`, with which the same request gives the same texts (choice i uses `seed` + i), and in each
choice `streams`, the mean number of streams per generated token.

Log-probabilities are the model's own, before temperature and truncation. Where conventions differ: `text_offset` counts
characters of the choice's own `text`, from 0, as in vLLM (OpenAI counts the prompt without echo too); the first token
of an echoed prompt has null, since nothing predicts it; top_logprobs include the token itself; all generated tokens are
listed, also end-of-text and those of a stop string, which are not in `text`. A token that is not text by itself, such
as a part of a character, is called "bytes:\\xe2\\x82", as in OpenAI's completions, so no two tokens have the same name.
"""

import codecs
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.generate.handle import Handle
from thoughtbubbles.generate.jobs import Finish
from thoughtbubbles.serve.worker import NewToken

LEAST = -9999.0  # instead of −∞, which JSON does not have
Top = Sequence[tuple[int, float]]
REASONS: dict[Finish, str] = {"end": "stop", "stop": "stop", "length": "length"}


class Reply:
    """A reply to one request. `handles`: its completions; `top`: how many likely tokens to list, None for no list."""

    kind: str  # of the whole object
    piece: str  # of a piece
    prefix: str  # of ids

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        handles: Sequence[Handle],
        *,
        seed: int,
        n: int,
        top: int | None,
        has_usage: bool = False,
    ):
        self.tokenizer, self.handles, self.n, self.top, self.has_usage = tokenizer, handles, n, top, has_usage
        self.head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self.seed = seed

    def whole(self) -> dict[str, Any]:
        """When all completions are finished."""
        choices = [
            {
                "index": index,
                **self.content(index),
                "finish_reason": REASONS[handle.completion.finish or "stop"],
                "streams": _mean(handle.completion.streams),
            }
            for index, handle in enumerate(self.handles)
        ]
        return {**self.head, "object": self.kind, "choices": choices, "usage": self.usage(), "seed": self.seed}

    def pieces(self, new: NewToken) -> Iterator[dict[str, Any]]:
        """What a new token brings, if anything can be shown."""
        reason = None if new.finish is None else REASONS[new.finish]
        last = {} if reason is None else {"streams": _mean(self.handles[new.choice].completion.streams)}
        for content in self.contents(new):
            yield self._piece([{"index": new.choice, **content, "finish_reason": None}])
        if reason is not None:
            yield self._piece([{"index": new.choice, **self.nothing(), "finish_reason": reason, **last}])

    def last_piece(self) -> dict[str, Any]:
        return {**self._piece([]), "usage": self.usage()}

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self.has_usage else {}
        return {**self.head, "object": self.piece, "choices": choices, **usage, "seed": self.seed}

    def usage(self) -> dict[str, Any]:
        """A prompt counts once, however many samples it has."""
        prompts = sum(len(handle.prompt) for handle in self.handles[:: self.n])
        new = sum(len(handle.completion.ids) for handle in self.handles)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": new,
            "total_tokens": prompts + new,
            "prompt_tokens_details": {"cached_tokens": sum(handle.n_shared for handle in self.handles[:: self.n])},
        }

    def content(self, index: int) -> dict[str, Any]:
        """All of a choice."""
        raise NotImplementedError

    def contents(self, new: NewToken) -> Iterator[dict[str, Any]]:
        """The parts of a choice that a new token completes."""
        raise NotImplementedError

    def nothing(self) -> dict[str, Any]:
        """A choice's part without content."""
        raise NotImplementedError

    def name(self, token: int) -> str:
        raw = self.tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class TextReply(Reply):
    """Of /v1/completions. `echo`: the prompts as they were given, if the texts begin with them."""

    kind = piece = "text_completion"
    prefix = "cmpl"

    def __init__(self, *args: Any, echo: Sequence[Sequence[int]] | None = None, **options: Any):
        super().__init__(*args, **options)
        self.echo = echo
        self._offsets: dict[int, Offsets] = {}  # of each choice

    def content(self, index: int) -> dict[str, Any]:
        done = self.handles[index].completion
        prompt = self.nothing() if self.echo is None else self._prompt(index, self.echo[index // self.n])
        logprobs = prompt["logprobs"]
        if self.top is not None:
            mine = self._logprobs(index, done.ids, done.log_probs, done.top)
            logprobs = mine if logprobs is None else _joined(logprobs, mine)
        return {"text": prompt["text"] + (done.text or ""), "logprobs": logprobs}

    def contents(self, new: NewToken) -> Iterator[dict[str, Any]]:
        if self.echo is not None and new.choice not in self._offsets:
            yield self._prompt(new.choice, self.echo[new.choice // self.n])
        if (token := new.token) is None:
            return
        logprobs = None
        if self.top is not None:
            logprobs = self._logprobs(new.choice, [token.id], [token.log_prob], [token.top])
        if token.text or logprobs is not None:
            yield {"text": token.text, "logprobs": logprobs}

    def nothing(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def _prompt(self, index: int, ids: Sequence[int]) -> dict[str, Any]:
        """Of an empty prompt nothing, though the model reads end-of-text in its place."""
        text = self.tokenizer.decode(ids)
        logprobs = None
        if self.top is not None:
            found = self.handles[index].completion
            logprobs = self._logprobs(index, ids, found.prompt_log_probs[: len(ids)], found.prompt_top[: len(ids)])
        self._offsets[index] = Offsets(self.tokenizer, start=len(text))
        return {"text": text, "logprobs": logprobs}

    def _logprobs(
        self, index: int, ids: Sequence[int], log_probs: Sequence[float | None], tops: Sequence[Top]
    ) -> dict[str, Any]:
        places = self._offsets.setdefault(index, Offsets(self.tokenizer))
        listed = [
            None if own is None else {self.name(each): _finite(p) for each, p in _with(top, token, own)}
            for token, own, top in zip(ids, log_probs, tops, strict=True)
        ]
        return {
            "tokens": [self.name(token) for token in ids],
            "token_logprobs": [None if own is None else _finite(own) for own in log_probs],
            "top_logprobs": listed if self.top else None,
            "text_offset": [places.next(token) for token in ids],
        }


class ChatReply(Reply):
    """Of /v1/chat/completions. In training an answer begins with a space (data/records.py), which is not part of it."""

    kind, piece, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._begun: set[int] = set()  # choices whose role is sent
        self._written: set[int] = set()  # choices with text

    def content(self, index: int) -> dict[str, Any]:
        done = self.handles[index].completion
        text = (done.text or "").removeprefix(" ")
        return {
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(done.ids, done.log_probs, done.top),
        }

    def contents(self, new: NewToken) -> Iterator[dict[str, Any]]:
        if new.choice not in self._begun:
            self._begun.add(new.choice)
            yield {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        token = new.token
        assert token is not None
        text = token.text if new.choice in self._written else token.text.removeprefix(" ")
        if token.text:
            self._written.add(new.choice)
        logprobs = self._logprobs([token.id], [token.log_prob], [token.top])
        if text or logprobs is not None:
            yield {"delta": {"content": text}, "logprobs": logprobs}

    def nothing(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}

    def _logprobs(self, ids: Sequence[int], log_probs: Sequence[float], tops: Sequence[Top]) -> dict[str, Any] | None:
        if self.top is None:
            return None
        found = zip(ids, log_probs, tops, strict=True)
        content = [
            {**self._token(token, own), "top_logprobs": [self._token(*each) for each in top]}
            for token, own, top in found
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, log_prob: float) -> dict[str, Any]:
        raw = self.tokenizer.token_bytes(token)
        return {"token": self.name(token), "logprob": _finite(log_prob), "bytes": list(raw)}


class Offsets:
    """Where tokens begin in a text, in characters; a part of a character begins where the character does."""

    def __init__(self, tokenizer: Tokenizer, *, start: int = 0):
        self._tokenizer, self._place = tokenizer, start
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def next(self, token: int) -> int:
        place = self._place
        self._place += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return place


def _with(top: Top, token: int, log_prob: float) -> Top:
    return top if any(each == token for each, _ in top) else [*top, (token, log_prob)]


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {name: None if first[name] is None else first[name] + second[name] for name in first}


def _finite(log_prob: float) -> float:
    return max(log_prob, LEAST)


def _mean(streams: Sequence[int]) -> float | None:
    return sum(streams) / len(streams) if streams else None
