"""Settings that must stand before torch is imported."""

from headrace.memory.process import prepare_process

prepare_process()
