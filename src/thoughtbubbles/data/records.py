"""Parses records: a record is a document, or an example with a prompt and answers to learn.

    {"text"}                                    a document
    {"question", "answer"}                      question⏎ | answer■                        (GSM8K)
    {"question", "steps", "answer"}             question⏎ | step⏎ step⏎ #### answer■       (GSM8K-aug)
    {"question", "choices", "answer"}           question⏎ A. …⏎ B. …⏎ Answer: | ␣B. …■     (MMLU)
    {"story", "query", "target"}                story second is first's | ␣relation■       (CLUTRR)
    {"messages": [{"role", "content"}, …]}      User: …⏎ Assistant: | ␣…■ User: …          (SmolTalk)

⏎ is a newline, ␣ a space, ■ end-of-text. The prompt is left of |, the answer that counts in the loss right of it. It
always ends in end-of-text, so that generation knows where to stop. The parts are tokenized separately, so a prompt has
the same ids in training and in generation. These formats are defined only here; evaluation uses the same functions.
CLUTRR's files have all splits in one: a story whose "split" is "test" is never trained on.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from thoughtbubbles.files import short_name

FIELDS = (
    *("text", "messages", "question", "choices", "steps", "answer", "train"),
    *("story", "query", "target", "split"),
)
FORMS = (
    "{text}, {question, answer}, {question, steps, answer}, {question, choices, answer}, {story, query, target} or "
    "{messages}"
)

SPEAKERS = {"system": "System", "user": "User", "tool": "Tool"}
ASSISTANT = "Assistant:"
# chat_parts as a Jinja template, for the field chat_template of Hugging Face's tokenizer_config.json: a model that has
# exactly this one there was trained on our format (checkpoint.has_chat_form).
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + message['content'] | trim + eos_token }}"
    "{% else %}"
    "{{ {'system': 'System', 'user': 'User', 'tool': 'Tool'}[message['role']] + ': ' }}"
    "{{ message['content'] | trim + '\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
CALCULATOR = re.compile(r"<<[^<>]*>>")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
QUOTED = r"""(?:'([^'\\]*)'|"([^"\\]*)")"""
PAIR = re.compile(rf"\s*\(\s*{QUOTED}\s*,\s*{QUOTED}\s*\)\s*")  # the repr of a tuple, parsed without eval


class Part(NamedTuple):
    """A piece of text. If `said`, it is the model's answer: it ends in end-of-text and counts in the loss."""

    text: str
    said: bool


class Document(NamedTuple):
    text: str


class Example(NamedTuple):
    parts: tuple[Part, ...]

    @property
    def key(self) -> str:
        """Decides the split of the example: two answers to the same question go to the same split."""
        return self.parts[0].text


def read_record(record: Mapping[str, Any]) -> Document | Example | None:
    """None for a record with nothing to learn: an empty text, a chat without an assistant message, a test story."""
    if isinstance(record.get("train"), Mapping):
        record = record["train"]  # the files of MMLU's auxiliary training set wrap each record
    if "text" in record:
        text = _string(record, "text")
        return Document(text) if text else None
    if "messages" in record:
        return _chat(record["messages"])
    if "question" in record and "answer" in record:
        prompt, answer = _question(record)
        return Example((Part(prompt, False), Part(answer, True)))
    if "story" in record and "query" in record and "target" in record:
        return _story(record)
    names = " ".join(", ".join(map(str, record)).split()) or "(none)"
    raise ValueError(f"the record has the fields {short_name(names)}: give {FORMS}")


def question_prompt(question: str) -> str:
    """The prompt for a question with a free-form answer, as in GSM8K."""
    return question.strip() + "\n"


def choices_prompt(question: str, choices: Sequence[str]) -> str:
    """The prompt for a question with lettered choices, as in MMLU."""
    lines = [question.strip(), *(f"{letter}. {choice}" for letter, choice in _lettered(choices)), "Answer:"]
    return "\n".join(lines)


def choice_answers(choices: Sequence[str]) -> list[str]:
    """The possible answers to `choices_prompt`; evaluation picks the one with the lowest loss."""
    return [f" {letter}. {choice}" for letter, choice in _lettered(choices)]


def relation_prompt(story: str, query: str) -> str:
    """The prompt for how two people of a story are related, as in CLUTRR; `query` is the repr of a pair of names.

    Names in the story are in brackets, which are removed. The relation follows after a space.
    """
    found = PAIR.fullmatch(query)
    if found is None:
        shown = repr(query) if len(repr(query)) <= 100 else f"{repr(query)[:100]}…"
        raise ValueError(f"query is {shown}: it must be a pair of names, such as ('Ann', 'Bob')")
    first, second = (name for name in found.groups() if name is not None)
    return f"{story.replace('[', '').replace(']', '').strip()} {second} is {first}'s"


def without_calculator(answer: str) -> str:
    """GSM8K's "48/2 = <<48/2=24>>24" becomes "48/2 = 24"."""
    return CALCULATOR.sub("", answer)


def chat_parts(messages: Sequence[Mapping[str, Any]]) -> list[Part]:
    """A chat as parts; if the last message is not the assistant's, a prompt for its next turn comes last."""
    parts: list[Part] = []
    prompt = ""
    for message in messages:
        if message.get("role") == "assistant":
            parts += [Part(prompt + ASSISTANT, False), Part(f" {_string(message, 'content').strip()}", True)]
            prompt = ""
        else:
            prompt += _turn(message)
    return [*parts, Part(prompt + ASSISTANT, False)] if prompt else parts


def _question(record: Mapping[str, Any]) -> tuple[str, str]:
    question = _string(record, "question")
    if record.get("choices") is not None:
        choices = [choice.strip() for choice in _strings(record, "choices")]
        return choices_prompt(question, choices), choice_answers(choices)[_choice(record["answer"], choices)]
    answer = _string(record, "answer").strip()
    if record.get("steps") is None:
        return question_prompt(question), without_calculator(answer)
    steps = record["steps"] if isinstance(record["steps"], str) else "\n".join(_strings(record, "steps"))
    lines = [line.strip() for line in re.sub(r">>\s*<<", "\n", steps).replace("<<", "").replace(">>", "").splitlines()]
    return question_prompt(question), "\n".join([*filter(None, lines), f"#### {answer}"])


def _story(record: Mapping[str, Any]) -> Example | None:
    if record.get("split") == "test":
        return None
    prompt = relation_prompt(_string(record, "story"), _string(record, "query"))
    return Example((Part(prompt, False), Part(f" {_string(record, 'target').strip()}", True)))


def _choice(answer: Any, choices: Sequence[str]) -> int:
    """The index of the right choice, given as a number from 0 or as a letter."""
    place = LETTERS.find(answer.strip().upper()) if isinstance(answer, str) and len(answer.strip()) == 1 else answer
    if type(place) is not int or not 0 <= place < len(choices):
        raise ValueError(
            f"answer = {short_name(repr(answer))}: give a number from 0 to {len(choices) - 1}, or a letter"
        )
    return place


def _lettered(choices: Sequence[str]) -> list[tuple[str, str]]:
    if not 2 <= len(choices) <= len(LETTERS):
        raise ValueError(f"choices has {len(choices)} entries: give from 2 to {len(LETTERS)}")
    return list(zip(LETTERS, choices, strict=False))


def _chat(messages: Any) -> Example | None:
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError("messages is not a list of {role, content}: give one")
    parts = chat_parts(messages)
    while parts and not parts[-1].said:
        parts.pop()  # there is nothing to learn after the assistant's last message
    return Example(tuple(parts)) if parts else None


def _turn(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    if not isinstance(role, str) or role not in SPEAKERS:
        raise ValueError(f"role = {short_name(repr(role))}: give one of {', '.join(SPEAKERS)}, assistant")
    return f"{SPEAKERS[role]}: {_string(message, 'content').strip()}\n"


def _string(record: Mapping[str, Any], field: str) -> str:
    return _text(record.get(field), field)


def _strings(record: Mapping[str, Any], field: str) -> list[str]:
    values = record[field]
    if not isinstance(values, list):
        raise ValueError(f"{field} is {type(values).__name__}, not a list: give a list")
    return [_text(value, f"an entry of {field}") for value in values]


def _text(value: Any, name: str) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)  # GSM8K-aug's answers are sometimes written as numbers
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}, not text: give text")
    return value
