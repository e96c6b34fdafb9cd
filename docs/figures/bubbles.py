"""Draw bubbles.svg: the streams that the model in the package gives each token, from the numbers in bubbles.json.

python docs/figures/bubbles.py --measure          run the model on TEXT, write bubbles.json, draw
python docs/figures/bubbles.py                    draw from bubbles.json
python docs/figures/bubbles.py --check            exit 1 if bubbles.svg is not what would be drawn
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from thoughtbubbles.generate.picture import Panel, draw

HERE = Path(__file__).parent
NUMBERS, FIGURE = HERE / "bubbles.json", HERE / "bubbles.svg"
BUDGETS = (1.5, 4)
TEXT = """\
The capital of France is Paris, and the capital of Japan is Tokyo. \
Anna had seven apples; she gave two of them to Tom and ate one, so she had four left. \
In 1859 Charles Darwin published On the Origin of Species, in which he argued that populations evolve over \
generations through natural selection."""


def measure() -> dict[str, Any]:
    """Bubble sizes after the last fork layer, in one parallel forward."""
    import torch

    from thoughtbubbles import load
    from thoughtbubbles.checkpoint import load_tokenizer
    from thoughtbubbles.files import SHIPPED
    from thoughtbubbles.generate.show import streams_per_token
    from thoughtbubbles.model.cost import parameter_count

    model, tokenizer = load(dtype=torch.float32), load_tokenizer()
    ids = [tokenizer.end_of_text, *tokenizer.encode(TEXT)]
    return {
        "model": SHIPPED,
        "parameters": parameter_count(model.config),
        "tokens": [tokenizer.token_bytes(token).decode() for token in ids[1:]],
        "streams": {str(budget): streams_per_token(model, ids, budget=budget)[1:] for budget in BUDGETS},
    }


def picture(found: dict[str, Any]) -> str:
    about = f"{found['model']}, {found['parameters'] / 1e6:.1f}M parameters"
    panels = [
        Panel(
            f"{about}, budget {budget} streams per token: here {sum(streams) / len(streams):.2f} on average, at most "
            f"{max(streams)}",
            found["tokens"],
            streams,
        )
        for budget, streams in found["streams"].items()
    ]
    return draw(panels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.measure:
        NUMBERS.write_text(json.dumps(measure(), indent=1, ensure_ascii=False) + "\n")
    drawn = picture(json.loads(NUMBERS.read_text()))
    if args.check:
        sys.exit(FIGURE.read_text() != drawn and f"{FIGURE.name} is not drawn from {NUMBERS.name}")
    FIGURE.write_text(drawn)


if __name__ == "__main__":
    main()
