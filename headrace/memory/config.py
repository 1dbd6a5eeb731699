"""Budgets of the memory tiers, and what lives in which."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from headrace.config import Config, Size


class DiskConfig(Config):
    """A directory that serves as memory, for one run at a time; faster ones take more."""

    path: str = Field(description="a directory, created if missing, on a local disk")
    size: Size | Literal["auto"] = Field("auto", description="budget of it; auto: what is free there")


class MemoryConfig(Config):
    """Budgets are refused before they would break. `auto` is what the machine has free at the start."""

    device: Size | Literal["auto"] = Field(
        "auto",
        description="budget of the accelerator's memory; without one, RAM is the only tier: use memory.host",
    )
    host: Size | Literal["auto"] = Field("auto", description="budget of RAM")
    weights: Literal["device", "host", "disk", "auto"] = Field(
        "device",
        description="where the working weights live; off the device, layers are fetched while they are used; "
        "auto: the fastest tier that fits",
    )
    embeddings: Literal["whole", "rows", "auto"] = Field(
        "auto",
        description="memory.weights=host or disk only: input and output embedding come whole, or by rows; "
        "auto: whole if they fit",
    )
    disk: list[DiskConfig] = Field(
        default_factory=list,
        description="directories for what lives on the disk, each {path, size}; faster ones take more, and "
        "size: auto is what is free there",
    )
    states: Literal["host", "disk"] = Field("host", description="where master weights and moments live")
    gradients: Literal["host", "disk", "auto"] = Field(
        "auto",
        description="where gradients wait for the update; auto: in RAM if they fit, else on the disk where "
        "the states are there",
    )
    activations: Literal["keep", "recompute", "host", "disk"] = Field(
        "recompute",
        description="keep what backward needs, or recompute each layer; host, disk: recompute, and keep the "
        "layers' inputs there",
    )

    @model_validator(mode="after")
    def _disk_for_what_lives_there(self) -> "MemoryConfig":
        names = ("states", "weights", "gradients", "activations")
        living = [name for name in names if getattr(self, name) == "disk"]
        if living and not self.disk:
            raise ValueError(
                f"memory.{living[0]}=disk needs a place: set memory.disk=[{{path: a directory}}]"
            )
        if self.disk and not living and self.weights != "auto":
            raise ValueError("memory.disk has no effect, since nothing lives there: set memory.states=disk")
        if self.weights in ("host", "disk") and self.activations == "keep":
            raise ValueError(
                f"memory.weights={self.weights} needs layers that are recomputed, for they leave the device: "
                "set memory.activations=recompute"
            )
        if self.weights == "device" and self.embeddings == "rows":
            raise ValueError(
                "memory.embeddings=rows has no effect with memory.weights=device, where they are whole: "
                "set memory.weights=disk, or leave it out"
            )
        places = [Path(disk.path).expanduser().absolute() for disk in self.disk]
        if twice := next((place for place in places if places.count(place) > 1), None):
            raise ValueError(f"memory.disk names {twice} twice: name it once")
        return self
