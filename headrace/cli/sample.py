"""`headrace sample`: text from a model directory."""

from typing import Annotated

import typer


def sample(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="a model or adapter directory, or a .gguf file")
    ],
    prompt: Annotated[str, typer.Argument(help="what the model answers or goes on with")],
    tokens: Annotated[int, typer.Option(min=1, max=2**20, help="most tokens to write")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token")] = 0.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="of the random choice when temperature is above 0")
    ] = 0,
) -> None:
    """Let a model answer (with its chat template, if it has one) or continue a text."""
    from headrace.models.sample import answer

    print(answer(model, prompt, tokens=tokens, temperature=temperature, seed=seed))
