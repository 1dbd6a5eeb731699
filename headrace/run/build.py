"""Builds what a plan describes: data, model, optimizer and loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from headrace.data.prepare import Prepared, prepare
from headrace.memory.config import DiskConfig
from headrace.memory.disk import DiskPath, device_of
from headrace.memory.tensorfile import Entry
from headrace.memory.weights import DTYPES
from headrace.models.attention import check_packable
from headrace.models.compiled import compile_layers
from headrace.models.load import LoadedModel, load_model
from headrace.models.lora import add_adapters, check_trainable
from headrace.models.recompute import recompute_layers
from headrace.models.tokenizer import no_tokenizer
from headrace.optim.groups import decay_groups
from headrace.optim.offloaded import OffloadedAdamW
from headrace.run.directory import RunDirectory
from headrace.run.file import RunFile
from headrace.run.plan import Plan
from headrace.training.forward import check_head
from headrace.training.loop import Loop
from headrace.training.meters import Meters


@dataclass(frozen=True)
class Job:
    """A run that is ready for its first step."""

    loaded: LoadedModel
    data: Prepared
    optimizer: OffloadedAdamW
    loop: Loop
    steps: int

    @property
    def model(self) -> PreTrainedModel:
        """The model that is trained."""
        return self.loaded.model


def build(plan: Plan, directory: RunDirectory, on_tokenised: Callable[[int, int], None] | None = None) -> Job:
    """Load the model, prepare the data, and put the optimizer and the loop on them.

    Raises:
        UserError: whatever the model, the data or the budget refuse.
    """
    run = plan.run
    torch.set_num_threads(_number(run.threads.compute))
    loaded = _model(run, device_of_plan(plan))
    if run.data.packing:
        check_packable(loaded.model.config, run.data.context)
    check_head(loaded.model)
    data = _data(run, loaded, directory, on_tokenised)
    torch.manual_seed(run.train.seed)
    optimizer = _optimizer(run, loaded.model, plan.work_on(data.train.rows).micro_batches, directory)
    meters = Meters(loaded.model)
    loaded.model.train()
    if run.memory.activations == "recompute":
        # Watching a recomputation would change what is compiled.
        recompute_layers(loaded.model, None if run.train.compile else meters.activations.contexts)
    if run.train.compile:
        compile_layers(loaded.model)
    _hold_weights(loaded.model, optimizer)
    steps = run.train.total_steps(data.train.steps_per_epoch)
    loop = Loop(
        loaded.model,
        optimizer,
        data.train,
        data.eval,
        steps=steps,
        train=run.train,
        optim=run.optim,
        meters=meters,
    )
    return Job(loaded, data, optimizer, loop, steps)


def _model(run: RunFile, device: torch.device) -> LoadedModel:
    path, lora, seed = run.model.path, run.model.lora, run.train.seed
    if lora is not None:
        check_trainable(path)
    loaded = load_model(path, DTYPES[run.model.dtype], device=device, seed=seed)
    if lora is not None:
        add_adapters(loaded.model, lora, path, seed)
    return loaded


def state_entries(optimizer: OffloadedAdamW) -> dict[str, list[Entry]]:
    """The optimizer's tables as they are saved and restored: by parameter name, in element order."""
    return {table: [_entry(optimizer, table, name) for name in optimizer.names] for table in optimizer.tables}


def _entry(optimizer: OffloadedAdamW, table: str, name: str) -> Entry:
    return Entry(name, torch.float32, optimizer.shape(name), lambda: optimizer.pieces(table, name))


def _data(
    run: RunFile,
    loaded: LoadedModel,
    directory: RunDirectory,
    on_tokenised: Callable[[int, int], None] | None,
) -> Prepared:
    if loaded.tokenizer is None:
        raise no_tokenizer(run.model.path)
    return prepare(
        run.data,
        loaded.tokenizer,
        directory=directory.data,
        batch=run.train.batch,
        micro_batch=_number(run.train.micro_batch),
        seed=run.train.seed,
        on_progress=on_tokenised,
        vocabulary=loaded.model.get_input_embeddings().weight.shape[0],
    )


def _optimizer(
    run: RunFile, model: PreTrainedModel, micro_batches: int, directory: RunDirectory
) -> OffloadedAdamW:
    optim = run.optim
    return OffloadedAdamW(
        decay_groups(model, optim.weight_decay),
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        max_grad_norm=optim.max_grad_norm,
        release_gradients=True,
        micro_batches=micro_batches,
        host=_number(run.memory.host),
        disk=[disk_path(disk) for disk in run.memory.disk],
        window=_number(run.update.window),
        kept=_kept_on_disk(run, directory),
        bucket=run.update.bucket,
        workers=_number(run.threads.update),
    )


def disk_path(disk: DiskConfig) -> DiskPath:
    """What the run file says of a directory, as the store takes it."""
    return DiskPath(Path(disk.path), None if disk.size == "auto" else disk.size)


def _kept_on_disk(run: RunFile, directory: RunDirectory) -> int:
    """Checkpoints that will hold states in the space of the paths: links, on the same file system."""
    if not run.memory.disk or not run.checkpoint.states:
        return 0
    return run.checkpoint.keep if links_work(directory.path, run.memory.disk) else 0


def links_work(directory: Path, disks: Sequence[DiskConfig]) -> bool:
    """Whether files in all of the paths can be linked to from a directory."""
    return {device_of(directory)} == {device_of(Path(disk.path).expanduser()) for disk in disks}


def _hold_weights(model: PreTrainedModel, optimizer: OffloadedAdamW) -> None:
    tensors = (*model.parameters(), *model.buffers())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    optimizer.ledger.hold(optimizer.device.tier, "weights", sum(storages.values()))


def device_of_plan(plan: Plan) -> torch.device:
    """Where the run computes."""
    return torch.device("cpu" if plan.machine.unified else "cuda")


def _number(value: int | str) -> int:
    assert isinstance(value, int), f"{value!r} was not filled in by the plan"
    return value
