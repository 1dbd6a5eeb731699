"""Models into memory: read with pread, tensor by tensor, straight into parameters of the wanted dtype."""

import warnings
from collections.abc import Callable, Iterator, Mapping
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
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from headrace.errors import UserError, reason
from headrace.memory.tensorfile import TensorFile
from headrace.memory.weights import WeightStore
from headrace.models.attention import attach
from headrace.models.drawn import draw_parameters
from headrace.models.homes import Filling, Rest
from headrace.models.matching import Match, check_tied, match_tensors, persistent_buffers, refuse_quantised
from headrace.models.quiet import quiet
from headrace.models.source import Source, find_source, read_config, require_weights
from headrace.models.tokenizer import check_vocabulary, load_tokenizer, tokenizer_in

__all__ = ["LoadedModel", "load_model", "load_tokenizer", "tokenizer_in"]


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for training, with what a saved directory also holds.

    Attributes:
        model: in evaluation mode, with tied weights tied and attention ``headrace``; ``model.config`` and
            ``model.generation_config`` are the checkpoint's own.
        tokenizer: None when there is none beside the weights.
        store: the home of the weights that are not on the device, if there are any.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    store: WeightStore | None = None


def load_model(
    path: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    seed: int = 0,
    home: Callable[[PreTrainedModel], WeightStore] | None = None,
) -> LoadedModel:
    """Load a causal language model from a directory, a GGUF file, or a configuration alone.

    From a directory, memory beyond the model's own is one small scratch; a GGUF file goes through
    transformers' reader. A configuration alone gives transformers' random initialisation under ``seed``,
    drawn in fp32 and cast. Raises UserError for what :func:`read_config` refuses, for architectures that
    transformers or the attention hook does not know, for tensors that are missing, unexpected, quantised or
    of another shape, and for a tokenizer with tokens that the model has not.

    Args:
        path: see above.
        dtype: of the parameters.
        device: of the parameters.
        seed: of random weights.
        home: gives the store of weights that will be streamed, for a model whose parameters have no memory
            yet. They go straight there, a bucket at a time; see :mod:`headrace.models.streaming`.
    """
    source = find_source(path)
    require_weights(source)
    config = _config(source)
    store = None
    if home is not None:
        model, store = _outside(source, config, dtype, torch.device(device), seed, home)
    elif source.kind == "gguf":
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
    return LoadedModel(model.eval(), tokenizer, store)


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
    with _opened(source, model) as (match, stored):
        if match.is_whole:
            return _read(model, match, stored, device)
    return _take_parameters(model, _convert(source, dtype, match), device)


def _outside(
    source: Source,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    home: Callable[[PreTrainedModel], WeightStore],
) -> tuple[PreTrainedModel, WeightStore]:
    """A model whose streamed parameters never had memory of their own, and their store."""
    model = _skeleton(source, config, dtype)
    if source.kind == "config":
        store = home(model)
        draw_parameters(model, store, lambda: _build(config, torch.float32), seed, device)
        return _finish(model), store
    if source.kind == "gguf":
        raise _read_whole(source, "a GGUF file")
    with _opened(source, model) as (match, stored):
        if not match.is_whole:
            raise _read_whole(source, "a checkpoint with other names or shapes than transformers'")
        store = home(model)
        with Filling(store, device) as filling:
            return _read(model, match, stored, device, filling), store


def _read_whole(source: Source, what: str) -> UserError:
    return UserError(
        f"{source.path} is {what}, which is read into memory as a whole: load and save it once as a Hugging "
        "Face directory, or set memory.weights=device"
    )


@contextmanager
def _opened(source: Source, model: PreTrainedModel) -> Iterator[tuple[Match, dict[str, TensorFile]]]:
    """The files of a directory, and how their tensors correspond to the model's."""
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(path)) for path in source.weights]
        stored = {name: file for file in files for name in file.entries}
        refuse_quantised(source.path, model, stored)
        match = match_tensors(model, stored)
        if match.is_whole:
            check_tied(source.path, match.copies, stored)
        yield match, stored


def _read(
    model: PreTrainedModel,
    match: Match,
    stored: Mapping[str, TensorFile],
    device: str | torch.device,
    filling: Filling | None = None,
) -> PreTrainedModel:
    buffers = persistent_buffers(model)
    parameters = dict(model.named_parameters())
    streamed = filling.order if filling else []
    for name in [*streamed, *(name for name in parameters if name not in streamed)]:
        value, views = _target(name, parameters[name], device, filling if name in streamed else None)
        rest = Rest(views)
        for part in match.names[name]:
            stored[part].read_into(part, rest.take(stored[part].entries[part].numel))
        _set_parameter(model, name, value)
    for name, buffer in buffers.items():
        (part,) = match.names[name]
        buffer.copy_(stored[part].read(part))
    return _finish(model)


def _target(
    name: str, parameter: torch.Tensor, device: str | torch.device, filling: Filling | None
) -> tuple[torch.Tensor, Iterator[torch.Tensor]]:
    """What becomes of a parameter, and where its elements go."""
    if filling is not None:
        return filling.placeholder(parameter), filling.views(name)
    value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    return value, iter([value.view(-1)])


def _convert(source: Source, dtype: torch.dtype, match: Match) -> PreTrainedModel:
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
