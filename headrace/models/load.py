"""Models into memory: read with pread, tensor by tensor, straight into parameters of the wanted dtype."""

import mmap
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from headrace.errors import UserError
from headrace.memory.tensorfile import TensorFile
from headrace.models.attention import attach
from headrace.models.source import Source, find_source, read_config

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_RECOMPUTED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.attn\.(bias|masked_bias)$")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for training, with what a saved directory also holds.

    Attributes:
        model: in evaluation mode, with tied weights tied and attention ``headrace``; ``model.config`` and
            ``model.generation_config`` are the checkpoint's own.
        tokenizer: None when there is none beside the weights.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None


def load_model(
    path: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> LoadedModel:
    """Load a causal language model from a directory, a GGUF file, or a configuration alone.

    From a directory, memory beyond the model's own is one small scratch; a GGUF file goes through
    transformers' reader. A configuration alone gives transformers' random initialisation under ``seed``,
    drawn in fp32 and cast. Raises UserError for what :func:`read_config` refuses, for architectures that
    transformers or the attention hook does not know, and for tensors that are missing, unexpected or of
    another shape.
    """
    source = find_source(path)
    config = _config(source)
    if source.kind == "gguf":
        model = _from_gguf(source, config, dtype, device)
    elif source.kind == "config":
        model = _from_scratch(config, dtype, device, seed)
    else:
        model = _from_directory(source, config, dtype, device)
    attach(model)
    model.to(device)  # the buffers; the parameters are there
    model.config.architectures = [type(model).__name__]
    if (source.directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source.directory, local_files_only=True)
    return LoadedModel(model.eval(), load_tokenizer(path))


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside a model's weights or inside its GGUF file; None when there is none."""
    source = find_source(path)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if source.kind == "gguf":
        if not _has_gguf_tokenizer(source.path):
            return None
        options["gguf_file"] = source.path.name
    elif not any((source.directory / name).is_file() for name in _TOKENIZER_FILES):
        return None
    with _quiet():
        return AutoTokenizer.from_pretrained(source.directory, **options)


def _has_gguf_tokenizer(file: Path) -> bool:
    """Whether the metadata, which stand before the tensors, have the key; parsing them takes seconds."""
    with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(b"tokenizer.ggml.tokens") >= 0


def _config(source: Source) -> PreTrainedConfig:
    raw = read_config(source.path)
    if raw["model_type"] not in CONFIG_MAPPING:
        raise UserError(
            f"{source.path}: transformers {transformers.__version__} does not know model_type "
            f"{raw['model_type']}; update transformers or choose another model"
        )
    try:
        return CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    except Exception as error:  # whatever the architecture's own checks raise
        raise UserError(
            f"{source.path}: its configuration is not valid: {error.__cause__ or error}"
        ) from error


def _build(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except ValueError as error:
        if "AutoModelForCausalLM" not in str(error):
            raise
        raise UserError(
            f"model_type {config.model_type} is not a causal language model; choose another one"
        ) from error


def _skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The modules with real buffers, computed as transformers does, and parameters that take no memory."""
    with init_empty_weights(include_buffers=False):
        model = _build(config, dtype)
    model.tie_weights()  # tied inside, parameters would be two again: each assignment makes a new one
    return model


def _from_scratch(
    config: PreTrainedConfig, dtype: torch.dtype, device: str | torch.device, seed: int
) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drawn = _build(config, torch.float32)
    return _take_parameters(_skeleton(config, dtype), drawn, device)


def _from_gguf(
    source: Source, config: PreTrainedConfig, dtype: torch.dtype, device: str | torch.device
) -> PreTrainedModel:
    options: dict[str, Any] = {"gguf_file": source.path.name, "config": config}
    if hasattr(transformers, "GgufConfig"):  # newer versions keep weights packed unless told otherwise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with redirect_stderr(StringIO()):  # the older reader's progress bar has no switch
        read = _read_by_transformers(source, dtype, **options)
    return _take_parameters(_skeleton(config, dtype), read, device)


def _take_parameters(
    model: PreTrainedModel, donor: PreTrainedModel, device: str | torch.device
) -> PreTrainedModel:
    """Fill a skeleton from another model, which is emptied on the way."""
    wanted = {name: parameter.dtype for name, parameter in model.named_parameters()}
    for name, parameter in list(donor.named_parameters()):
        _set_parameter(model, name, parameter.detach().to(device, wanted[name]))
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    return _finish(model)


def _set_parameter(model: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    module_name, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module_name), leaf, torch.nn.Parameter(value))


def _finish(model: PreTrainedModel) -> PreTrainedModel:
    model.tie_weights()
    unfilled = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not unfilled, f"{unfilled[0]} was not loaded"
    return model


def _from_directory(
    source: Source, config: PreTrainedConfig, dtype: torch.dtype, device: str | torch.device
) -> PreTrainedModel:
    model = _skeleton(config, dtype)
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(path)) for path in source.weights]
        stored = {name: file for file in files for name in file.entries}
        match = _match(model, stored)
        if not match.foreign and not match.absent and not match.misshapen:
            _check_tied(source.path, match.copies, stored)
            return _read(model, match, stored, device)
    return _take_parameters(model, _convert(source, dtype, match), device)


@dataclass(frozen=True)
class _Match:
    """How the tensors of a checkpoint and of a model correspond.

    Attributes:
        names: the model's tensor -> its name in the checkpoint.
        copies: pairs of names in the checkpoint whose tensors the model ties.
        absent: what the model needs and the checkpoint lacks.
        foreign: what the checkpoint holds and the model does not know.
        misshapen: what has another shape.
    """

    names: dict[str, str]
    copies: list[tuple[str, str]]
    absent: list[str]
    foreign: list[str]
    misshapen: list[str]


def _match(model: PreTrainedModel, stored: Mapping[str, TensorFile]) -> _Match:
    state = dict(model.named_parameters()) | _persistent_buffers(model)
    names, copies, absent, misshapen = {}, [], [], []
    known = set()
    for name, aliases in _aliases(model, state).items():
        known.update(aliases)
        present = [alias for alias in aliases if alias in stored]
        copies += [(present[0], alias) for alias in present[1:]]
        if not present:
            absent.append(name)
        elif stored[present[0]].entries[present[0]].shape != tuple(state[name].shape):
            misshapen.append(name)
        else:
            names[name] = present[0]
    foreign = [name for name in stored if name not in known and not _is_harmless(model, name)]
    return _Match(names, copies, absent, foreign, misshapen)


def _persistent_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
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


def _check_tied(path: Path, copies: Sequence[tuple[str, str]], stored: Mapping[str, TensorFile]) -> None:
    for name, copy in copies:
        if not torch.equal(stored[name].read(name), stored[copy].read(copy)):
            raise UserError(
                f"{path}: config.json ties {copy} to {name}, but the two differ in the weights; set "
                "tie_word_embeddings to false there"
            )


def _read(
    model: PreTrainedModel, match: _Match, stored: Mapping[str, TensorFile], device: str | torch.device
) -> PreTrainedModel:
    buffers = _persistent_buffers(model)
    for name, parameter in list(model.named_parameters()):
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        stored[match.names[name]].read_into(match.names[name], [value.view(-1)])
        _set_parameter(model, name, value)
    for name, buffer in buffers.items():
        buffer.copy_(stored[match.names[name]].read(match.names[name]))
    return _finish(model)


def _convert(source: Source, dtype: torch.dtype, match: _Match) -> PreTrainedModel:
    """Let transformers rename and merge tensors; raise UserError for what it cannot place either."""
    model = _read_by_transformers(source, dtype)
    odd = (match.foreign or match.absent or match.misshapen)[0]
    warnings.warn(
        f"{source.path} holds tensors under other names or shapes than {type(model).__name__} has (first "
        f"{odd}); transformers converted them, which takes up to the model's size in memory beside the model",
        stacklevel=2,
    )
    return model


def _read_by_transformers(source: Source, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    with _quiet():
        model, report = AutoModelForCausalLM.from_pretrained(
            source.directory,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            trust_remote_code=False,
            **options,
        )
    for problem, keys in (
        ("lacks {}", report["missing_keys"]),
        ("holds {} that the model does not have", report["unexpected_keys"]),
        ("holds {} of another shape than config.json says", {key[0] for key in report["mismatched_keys"]}),
    ):
        if keys:
            tensors = f"{len(keys)} tensor{'s' if len(keys) > 1 else ''}"
            raise UserError(f"{source.path} {problem.format(tensors)}, first {min(keys)}; fetch it again")
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and remarks: what matters of them is checked by the caller."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
