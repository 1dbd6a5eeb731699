"""Crash-safe checkpoints: manifest, save, restore, export."""
