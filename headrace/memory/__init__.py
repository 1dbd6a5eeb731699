"""Byte budgets, host buffers, tensor files and what the process occupies."""
