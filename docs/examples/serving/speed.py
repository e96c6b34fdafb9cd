"""How fast a running server answers one client, and many: python docs/examples/serving/speed.py --budgets 1 2 4"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import openai


def ask(client: openai.OpenAI, model: str, budget: float, tokens: int, seed: int) -> tuple[int, float]:
    """The number of new tokens, and streams per token."""
    found = client.completions.create(
        model=model, prompt="The history of", max_tokens=tokens, seed=seed, extra_body={"budget": budget}
    )
    return found.usage.completion_tokens, found.choices[0].streams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--budgets", type=float, nargs="+", default=[1, 2, 4])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=64, help="per completion")
    options = parser.parse_args()
    client = openai.OpenAI(base_url=options.address, api_key="none", max_retries=10)
    model = client.models.list().data[0].id
    for clients in options.clients:
        for budget in options.budgets:
            ask(client, model, budget, 4, 0)  # warms up
            with ThreadPoolExecutor(clients) as pool:
                begin = time.monotonic()
                seeds = range(max(4, 2 * clients))
                found = list(pool.map(partial(ask, client, model, budget, options.tokens), seeds))
                elapsed = time.monotonic() - begin
            new = sum(tokens for tokens, _ in found)
            streams = sum(tokens * streams for tokens, streams in found) / new
            print(
                f"{clients} clients, budget {budget:g}: {new / elapsed:.0f} tokens/s, {streams:.2f} streams per token"
            )


if __name__ == "__main__":
    main()
