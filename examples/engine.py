"""A model in a program of your own, without a server.

    python examples/engine.py MODEL

MODEL is what `teneral serve` takes: a path, org/name on the Hub, s3://…, https://…
"""

from __future__ import annotations

import sys

import teneral


def main(model: str) -> None:
    with teneral.Engine(model) as engine:
        # The weights are still arriving: this waits for the layers that it needs, and for nothing else.
        for text in engine.stream("Once upon a time", max_tokens=30):
            print(text, end="", flush=True)
        print()
        # One call, one batch.
        for completion in engine.generate(["The sky is", "Grass is"], max_tokens=5, temperature=0):
            print(completion.text.strip(), completion.usage.completion_tokens, "tokens")
        try:
            engine.generate("Too long. " * 100_000)
        except teneral.RequestError as error:
            print(f"refused: {error.message}")


if __name__ == "__main__":
    main(sys.argv[1])
