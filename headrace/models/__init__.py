"""Hugging Face model directories in and out, the attention hook, recomputation."""
