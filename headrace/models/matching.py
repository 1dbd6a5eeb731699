"""How the tensors of a checkpoint and of a model correspond."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from headrace.errors import UserError
from headrace.memory.tensorfile import TensorFile
from headrace.models.published import published_names

_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_RECOMPUTED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.attn\.(bias|masked_bias)$")


@dataclass(frozen=True)
class Match:
    """How the tensors of a checkpoint and of a model correspond.

    Attributes:
        names: the model's tensor -> the checkpoint's that hold it, one behind the other.
        copies: pairs of names in the checkpoint whose tensors the model ties.
        absent: what the model needs and the checkpoint lacks.
        foreign: what the checkpoint holds and the model does not know.
        misshapen: what has another shape.
    """

    names: dict[str, list[str]]
    copies: list[tuple[str, str]]
    absent: list[str]
    foreign: list[str]
    misshapen: list[str]

    @property
    def is_whole(self) -> bool:
        """Whether every tensor of the one has its place in the other."""
        return not (self.foreign or self.absent or self.misshapen)


def match_tensors(model: PreTrainedModel, stored: Mapping[str, TensorFile]) -> Match:
    """How the tensors of a model, by shape alone, correspond to those of files."""
    state = dict(model.named_parameters()) | persistent_buffers(model)
    aliases_of = _aliases(model, state)
    whole = all(any(alias in stored for alias in aliases) for aliases in aliases_of.values())
    published = {} if whole else _published(model)
    match = Match({}, [], [], [], [])
    known: set[str] = set()
    for name, aliases in aliases_of.items():
        present = [alias for alias in aliases if alias in stored]
        match.copies.extend((present[0], alias) for alias in present[1:])
        parts = {present[0]: tuple(state[name].shape)} if present else published.get(name, {})
        known.update(aliases, parts)
        if not parts or not stored.keys() >= parts.keys():
            match.absent.append(name)
        elif any(stored[part].entries[part].shape != shape for part, shape in parts.items()):
            match.misshapen.append(name)
        else:
            match.names[name] = list(parts)
    match.foreign.extend(name for name in stored if name not in known and not _is_harmless(model, name))
    return match


def _published(model: PreTrainedModel) -> dict[str, dict[str, tuple[int, ...]]]:
    """The model's tensor -> names and shapes under which its stretches are published, in order."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, stretch in sorted(published_names(model).items(), key=lambda item: item[1].start):
        found.setdefault(stretch.name, {})[name] = stretch.shape
    return found


def refuse_quantised(path: Path, model: PreTrainedModel, stored: Mapping[str, TensorFile]) -> None:
    """Raise UserError for a checkpoint that does not hold real weights."""
    buffers = persistent_buffers(model)
    for name, file in stored.items():
        dtype = file.entries[name].dtype
        if dtype not in _REAL and name not in buffers and not _is_harmless(model, name):
            raise UserError(
                f"{path}: {name} is stored as {str(dtype).removeprefix('torch.')}: the model is quantised, "
                "and training needs its real weights; give the unquantised model"
            )


def persistent_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Buffers that belong into a checkpoint."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _aliases(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Every tensor's names, its own first; tied weights have several."""
    names = {id(tensor): [name] for name, tensor in state.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in names[id(parameter)]:
            names[id(parameter)].append(name)
    return {aliases[0]: aliases for aliases in names.values()}


def _is_harmless(model: PreTrainedModel, name: str) -> bool:
    """Buffers that are recomputed, and what transformers ignores for this architecture."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return bool(_RECOMPUTED.search(name)) or any(re.search(pattern, name) for pattern in ignored)


def check_tied(path: Path, copies: Sequence[tuple[str, str]], stored: Mapping[str, TensorFile]) -> None:
    """Raise UserError where weights that the model ties differ in the checkpoint."""
    for name, copy in copies:
        if not torch.equal(stored[name].read(name), stored[copy].read(copy)):
            raise UserError(
                f"{path}: config.json ties {copy} to {name}, but the two differ in the weights; set "
                "tie_word_embeddings to false there"
            )
