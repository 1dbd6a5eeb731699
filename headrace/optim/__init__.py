"""The offloaded AdamW: layout, one-pass kernel, update policies, and the torch Optimizer."""
