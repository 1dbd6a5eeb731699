"""Ordered workers (threads, CUDA streams), their events and the trace."""
