"""Models into memory: read with pread, tensor by tensor, straight into parameters of the wanted dtype."""

import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stderr
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
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from headrace.errors import UserError, reason
from headrace.memory.tensorfile import TensorFile
from headrace.models.attention import attach
from headrace.models.published import published_names
from headrace.models.quiet import quiet
from headrace.models.source import Source, find_source, read_config, require_weights
from headrace.models.tokenizer import check_vocabulary, load_tokenizer, tokenizer_in

__all__ = ["LoadedModel", "load_model", "load_tokenizer", "tokenizer_in"]

_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
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
    transformers or the attention hook does not know, for tensors that are missing, unexpected, quantised or
    of another shape, and for a tokenizer with tokens that the model has not.
    """
    source = find_source(path)
    require_weights(source)
    config = _config(source)
    if source.kind == "gguf":
        model = _from_gguf(source, config, dtype, device)
    elif source.kind == "config":
        model = _from_scratch(source, config, dtype, device, seed)
    else:
        model = _from_directory(source, config, dtype, device)
    attach(model)
    model.to(device)  # the buffers; the parameters are there
    model.config.architectures = [type(model).__name__]
    if (source.directory / "generation_config.json").is_file():
        model.generation_config = _generation_config(source.directory)
    tokenizer = load_tokenizer(path)
    if tokenizer is not None:
        check_vocabulary(tokenizer, model.get_input_embeddings().weight.shape[0], path)
    return LoadedModel(model.eval(), tokenizer)


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
        raise _not_valid(source.path, error) from error


def _not_valid(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path}: its configuration is not valid ({reason(error.__cause__ or error)}): correct config.json, "
        "or fetch it again"
    )


def _generation_config(directory: Path) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # broken JSON, and what its own checks refuse
        raise UserError(
            f"{directory / 'generation_config.json'} cannot be read ({reason(error)}): fetch it again, or "
            "delete it"
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


def _skeleton(source: Source, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The modules with real buffers, computed as transformers does, and parameters that take no memory."""
    try:
        with init_empty_weights(include_buffers=False):
            model = _build(config, dtype)
    except UserError:
        raise
    except Exception as error:  # sizes that do not fit one another, names that nobody knows
        raise _not_valid(source.path, error) from error
    model.tie_weights()  # tied inside, parameters would be two again: each assignment makes a new one
    return model


def _from_scratch(
    source: Source, config: PreTrainedConfig, dtype: torch.dtype, device: str | torch.device, seed: int
) -> PreTrainedModel:
    skeleton = _skeleton(source, config, dtype)  # before anything is drawn: it refuses what cannot be built
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drawn = _build(config, torch.float32)
    return _take_parameters(skeleton, drawn, device)


def _from_gguf(
    source: Source, config: PreTrainedConfig, dtype: torch.dtype, device: str | torch.device
) -> PreTrainedModel:
    options: dict[str, Any] = {"gguf_file": source.path.name, "config": config}
    if hasattr(transformers, "GgufConfig"):  # newer versions keep weights packed unless told otherwise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with redirect_stderr(StringIO()):  # the older reader's progress bar has no switch
        read = _read_by_transformers(source, dtype, **options)
    return _take_parameters(_skeleton(source, config, dtype), read, device)


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
    model = _skeleton(source, config, dtype)
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(path)) for path in source.weights]
        stored = {name: file for file in files for name in file.entries}
        _refuse_quantised(source.path, model, stored)
        match = _match(model, stored)
        if not match.foreign and not match.absent and not match.misshapen:
            _check_tied(source.path, match.copies, stored)
            return _read(model, match, stored, device)
    return _take_parameters(model, _convert(source, dtype, match), device)


@dataclass(frozen=True)
class _Match:
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


def _match(model: PreTrainedModel, stored: Mapping[str, TensorFile]) -> _Match:
    state = dict(model.named_parameters()) | _persistent_buffers(model)
    aliases_of = _aliases(model, state)
    whole = all(any(alias in stored for alias in aliases) for aliases in aliases_of.values())
    published = {} if whole else _published(model)
    match = _Match({}, [], [], [], [])
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


def _refuse_quantised(path: Path, model: PreTrainedModel, stored: Mapping[str, TensorFile]) -> None:
    buffers = _persistent_buffers(model)
    for name, file in stored.items():
        dtype = file.entries[name].dtype
        if dtype not in _REAL and name not in buffers and not _is_harmless(model, name):
            raise UserError(
                f"{path}: {name} is stored as {str(dtype).removeprefix('torch.')}: the model is quantised, "
                "and training needs its real weights; give the unquantised model"
            )


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
        rest = value.view(-1)
        for part in match.names[name]:
            count = stored[part].entries[part].numel
            stored[part].read_into(part, [rest[:count]])
            rest = rest[count:]
        _set_parameter(model, name, value)
    for name, buffer in buffers.items():
        (part,) = match.names[name]
        buffer.copy_(stored[part].read(part))
    return _finish(model)


def _convert(source: Source, dtype: torch.dtype, match: _Match) -> PreTrainedModel:
    """Let transformers rename and merge tensors; raise UserError for what it cannot place either."""
    odd = (match.foreign or match.absent or match.misshapen)[0]
    try:
        model = _read_by_transformers(source, dtype)
    except RuntimeError as error:
        raise UserError(
            f"{source.path} holds tensors under other names or shapes than transformers knows, or only a "
            f"part of them, first {odd}; fetch it again"
        ) from error
    warnings.warn(
        f"{source.path} holds tensors under other names or shapes than {type(model).__name__} has (first "
        f"{odd}); transformers converted them, which takes up to the model's size in memory beside the model",
        stacklevel=2,
    )
    return model


def _read_by_transformers(source: Source, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    options |= {"dtype": dtype, "local_files_only": True, "trust_remote_code": False}
    with quiet():
        model, report = AutoModelForCausalLM.from_pretrained(
            source.directory, output_loading_info=True, ignore_mismatched_sizes=True, **options
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
