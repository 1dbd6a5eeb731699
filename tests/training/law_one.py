"""The norm and the clipping that the optimizer promises, written with torch's own operations."""

import math

import torch


def one_norm(parameters):
    """Law 1's norm: fp64 sums over blocks of 64 Ki elements, each by one thread, in parameter order."""
    threads, total = torch.get_num_threads(), 0.0
    torch.set_num_threads(1)
    for p in parameters:
        for block in p.grad.float().reshape(-1).split(2**16):
            values = block.double()
            total += float(torch.dot(values, values))
    torch.set_num_threads(threads)
    return math.sqrt(total)


def clip(parameters, limit):
    """Scale the gradients down to ``limit`` by that norm."""
    coefficient = min(1.0, limit / (one_norm(parameters) + 1e-6))
    for p in parameters:
        if coefficient != 1.0:
            p.grad.mul_(coefficient)


def clipping_adamw(parameters, limit, **settings):
    """torch's fused AdamW that clips before every step, for loops that would clip by another norm."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, **settings, fused=True)
    optimizer.register_step_pre_hook(lambda *_: clip(parameters, limit))
    return optimizer
