"""Draw bubbles.svg: the streams that a trained model gives each token of a text, from the numbers in bubbles.json.

python docs/figures/bubbles.py --checkpoint DIR   run the model in DIR on TEXT, write bubbles.json, draw
python docs/figures/bubbles.py                    draw from bubbles.json
python docs/figures/bubbles.py --check            exit 1 if bubbles.svg is not what would be drawn
"""

import argparse
import json
import sys
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NUMBERS, FIGURE = HERE / "bubbles.json", HERE / "bubbles.svg"
TEXT = """\
The capital of France is Paris, and the capital of Japan is Tokyo. \
Anna had seven apples; she gave two of them to Tom and ate one, so she had four left. \
In 1859 Charles Darwin published On the Origin of Species, in which he argued that populations evolve over \
generations through natural selection."""

TRAINED_BY = (
    "python benchmarks/effect.py --data DIR --steps 2880 --variants causal plain gate --runs RUNS"  # RUNS/causal-0
)

WIDTH, LEFT, TOP = 900, 30, 62
SIZE, LETTER = 15, 9.0  # of the font, and from one letter to the next
DOT, PITCH, LINE = 3.1, 7.6, 34  # radius, from one dot to the next, and a line's height without dots
ORIGINAL, FORK, INK, SOFT, CARD = "#2F6DB5", "#C2502E", "#23272F", "#565D69", "#FCFBF8"
SHADES = ("none", "#F6E3DA", "#F0C9B8", "#E8AD94", "#DF8F70")  # behind tokens with 1, 2, 3, 4, and more streams


def measure(checkpoint: Path) -> dict[str, Any]:
    """Bubble sizes after every fork layer, in one parallel forward."""
    import torch

    from thoughtbubbles import load
    from thoughtbubbles.checkpoint import find_model, load_folder_tokenizer
    from thoughtbubbles.model.cost import parameter_count
    from thoughtbubbles.provenance import commit

    model, tokenizer = load(checkpoint).eval(), load_folder_tokenizer(find_model(checkpoint))
    ids = [tokenizer.end_of_text, *tokenizer.encode(TEXT)]
    with torch.no_grad():
        out = model(torch.tensor([ids]), trace=True)
    return {
        "checkpoint": {
            "parameters": parameter_count(model.config),
            "budget": float(model.config.budget),
            "selection": model.config.selection,
        },
        "trained_by": TRAINED_BY,
        "commit": commit(),
        "tokens": [tokenizer.token_bytes(token).decode() for token in ids[1:]],
        "fork_layers": [fork.layer for fork in out.forks],
        "streams": [fork.bubble_size[0, 1:].tolist() for fork in out.forks],
    }


def lines(tokens: list[str]) -> list[list[int]]:
    """Tokens of each line of the picture; a line breaks before a space."""
    wrapped: list[list[int]] = [[]]
    used = 0
    for at, token in enumerate(tokens):
        word = len(token)
        for more in tokens[at + 1 :]:  # pieces of one word stay together
            if more.startswith(" "):
                break
            word += len(more)
        if token.startswith(" ") and (used + word) * LETTER > WIDTH - 2 * LEFT:
            wrapped.append([])
            used = 0
        wrapped[-1].append(at)
        used += len(token)
    return wrapped


def draw(found: dict[str, Any]) -> str:
    tokens, streams, about = found["tokens"], found["streams"][-1], found["checkpoint"]
    title = "Streams of each token after the last fork layer"
    mean = sum(streams) / len(streams)
    subtitle = (
        f"{about['parameters'] / 1e6:.0f}M parameters, {about['selection']} selection, budget {about['budget']:g} "
        f"streams per token; here {mean:.2f} on average, at most {max(streams)}"
    )
    parts, y = [], float(TOP)
    for line in lines(tokens):
        y += LINE + PITCH * max(streams[at] for at in line)
        x = float(LEFT)
        for at in line:
            token = tokens[at] if at > line[0] else tokens[at].lstrip()
            word, indent = token.lstrip(), len(token) - len(token.lstrip())
            start, width = x + indent * LETTER, len(word) * LETTER
            middle, count = start + width / 2, streams[at]
            if count > 1:
                shade = SHADES[min(count, len(SHADES)) - 1]
                box = f'x="{start - 1:.1f}" y="{y - 15:.1f}" width="{width + 2:.1f}" height="20" rx="3"'
                parts.append(f'<rect {box} fill="{shade}"/>')
            parts.append(f'<text x="{start:.1f}" y="{y:.1f}" textLength="{width:.1f}" class="t">{escape(word)}</text>')
            for place in range(count):  # the original below, its forks above
                fill = FORK if place else ORIGINAL
                parts.append(f'<circle cx="{middle:.1f}" cy="{y - 22 - PITCH * place:.1f}" r="{DOT}" fill="{fill}"/>')
            x += len(token) * LETTER
    height = y + 24
    size = f'width="{WIDTH}" height="{height:.0f}"'
    font = f"{SIZE}px ui-monospace,Menlo,Consolas,monospace"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {height:.0f}" role="img">',
        f"<title>{title}</title>",
        f"<style>text{{font-family:system-ui,sans-serif;fill:{INK}}} .t{{font:{font}}}</style>",
        f'<rect {size} rx="8" fill="{CARD}"/>',
        f'<text x="{LEFT}" y="32" font-size="17" font-weight="700">{title}</text>',
        f'<text x="{LEFT}" y="52" font-size="13" style="fill:{SOFT}">{subtitle}</text>',
        *(
            f'<circle cx="{x}" cy="27" r="4" fill="{fill}"/><text x="{x + 10}" y="32" font-size="13">{name}</text>'
            for x, fill, name in ((700, ORIGINAL, "original"), (790, FORK, "its forks"))
        ),
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="a model, checkpoint or run to run on the text")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    if arguments.checkpoint:
        NUMBERS.write_text(json.dumps(measure(arguments.checkpoint), indent=1, ensure_ascii=False) + "\n")
    drawn = draw(json.loads(NUMBERS.read_text()))
    if arguments.check:
        sys.exit(FIGURE.read_text() != drawn and f"{FIGURE.name} is not drawn from {NUMBERS.name}")
    FIGURE.write_text(drawn)


if __name__ == "__main__":
    main()
