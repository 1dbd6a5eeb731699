"""Builds what a plan describes: data, model, optimizer and loop."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from headrace.data.prepare import Prepared, prepare
from headrace.ledger import Ledger
from headrace.memory.config import DiskConfig
from headrace.memory.disk import DiskPath, DiskStore
from headrace.memory.links import device_of
from headrace.memory.tensorfile import Entry
from headrace.memory.tiers import Tiers
from headrace.memory.weights import DTYPES
from headrace.models.attention import check_packable
from headrace.models.boundaries import Boundaries
from headrace.models.compiled import compile_layers
from headrace.models.homes import streamed_layers, weight_store
from headrace.models.load import LoadedModel, load_model
from headrace.models.lora import add_adapters, check_trainable
from headrace.models.published import Pieces
from headrace.models.recompute import recompute_layers
from headrace.models.streaming import Streamed
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
    """A run that is ready for its first step.

    Attributes:
        loaded: the model that is trained, and its tokenizer.
        data: prepared.
        optimizer: of what is trained.
        loop: takes the steps.
        steps: of the whole run.
        streamed: brings weights that live off the device, if any do.
        disk: the disk tier, if there is one.
        resources: ends everything, the optimizer first.
    """

    loaded: LoadedModel
    data: Prepared
    optimizer: OffloadedAdamW
    loop: Loop
    steps: int
    streamed: Streamed | None
    disk: DiskStore | None
    resources: ExitStack

    @property
    def model(self) -> PreTrainedModel:
        """The model that is trained."""
        return self.loaded.model

    @property
    def elsewhere(self) -> Pieces | None:
        """Gives the weights that the model does not hold itself."""
        return self.streamed.pieces if self.streamed else None


def build(plan: Plan, directory: RunDirectory, on_tokenised: Callable[[int, int], None] | None = None) -> Job:
    """Load the model, prepare the data, and put the optimizer and the loop on them.

    Raises:
        UserError: whatever the model, the data or the budget refuse.
    """
    run = plan.run
    torch.set_num_threads(_number(run.threads.compute))
    with ExitStack() as resources:
        tiers = _tiers(plan)
        resources.callback(tiers.close)
        loaded, streamed = _model(run, tiers, resources)
        if run.data.packing:
            check_packable(loaded.model.config, run.data.context)
        with tiers.lanes.unbooked(), streamed.whole_head() if streamed else nullcontext():
            check_head(loaded.model)
        if streamed is not None:
            streamed.withdraw()
        data = _data(run, loaded, directory, on_tokenised)
        torch.manual_seed(run.train.seed)
        work = plan.work_on(data.train.rows)
        optimizer = _optimizer(run, loaded, work.micro_batches, directory, tiers)
        resources.callback(optimizer.close)
        meters = _arrange(run, loaded.model, work.tokens, tiers, streamed, resources)
        _hold_weights(loaded, optimizer)
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
            elsewhere=streamed.pieces if streamed else None,
            rows=streamed.head_rows if streamed else None,
        )
        return Job(loaded, data, optimizer, loop, steps, streamed, tiers.disk, resources.pop_all())


def _tiers(plan: Plan) -> Tiers:
    memory = plan.run.memory
    return Tiers(
        device_of_plan(plan),
        Ledger(),
        host=_number(memory.host),
        accelerator=None if plan.machine.unified else _number(memory.device),
        disk=[disk_path(disk) for disk in memory.disk],
        workers=_number(plan.run.threads.update),
    )


def _arrange(
    run: RunFile,
    model: PreTrainedModel,
    tokens: int,
    tiers: Tiers,
    streamed: Streamed | None,
    resources: ExitStack,
) -> Meters:
    """Let layers recompute, compile, stream; returns what measures them."""
    model.train()
    boundaries, where = None, run.memory.activations
    if where in ("host", "disk"):
        numel = tokens * model.config.get_text_config().hidden_size
        boundaries = Boundaries(streamed_layers(model), numel, model.dtype, tiers, where)
        resources.callback(boundaries.close)
    meters = Meters(
        model, [storage for part in (streamed, boundaries) if part for storage in part.storages()]
    )
    if where != "keep":
        recompute_layers(
            model,
            # Watching a recomputation would change what is compiled.
            None if run.train.compile else meters.activations.contexts,
            streamed.contexts if streamed else None,
            boundaries.instead if boundaries else None,
        )
    if run.train.compile:
        compile_layers(model)
    return meters


def _model(run: RunFile, tiers: Tiers, resources: ExitStack) -> tuple[LoadedModel, Streamed | None]:
    path, lora, seed, where = run.model.path, run.model.lora, run.train.seed, run.memory.weights
    if lora is not None:
        check_trainable(path)
    home = None
    if where in ("host", "disk"):
        home = partial(weight_store, tiers=tiers, where=where, bucket=run.update.bucket)
    loaded = load_model(path, DTYPES[run.model.dtype], device=tiers.lanes.device, seed=seed, home=home)
    streamed = None
    if loaded.store is not None:
        resources.callback(loaded.store.close)
        by_rows = run.memory.embeddings == "rows"
        streamed = Streamed(loaded.model, loaded.store, tiers, by_rows=by_rows)
        resources.callback(streamed.close)
    if lora is not None:
        add_adapters(loaded.model, lora, path, seed)
    return loaded, streamed


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
    run: RunFile, loaded: LoadedModel, micro_batches: int, directory: RunDirectory, tiers: Tiers
) -> OffloadedAdamW:
    optim, gradients = run.optim, run.memory.gradients
    assert gradients != "auto", "the plan fills it in"
    return OffloadedAdamW(
        decay_groups(loaded.model, optim.weight_decay),
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        max_grad_norm=optim.max_grad_norm,
        release_gradients=True,
        micro_batches=micro_batches,
        window=_number(run.update.window),
        gradients=gradients,
        kept=_kept_on_disk(run, directory),
        bucket=run.update.bucket,
        tiers=tiers,
        states=run.memory.states,
        weights=None if run.model.lora else loaded.store,
    )


def disk_path(disk: DiskConfig) -> DiskPath:
    """What the run file says of a directory, as the store takes it."""
    return DiskPath(Path(disk.path), None if disk.size == "auto" else disk.size)


def _kept_on_disk(run: RunFile, directory: RunDirectory) -> int:
    """Checkpoints that will hold states in the space of the paths: links, on the same file system."""
    if run.memory.states != "disk" or not run.checkpoint.states:
        return 0
    return run.checkpoint.keep if links_work(directory.path, run.memory.disk) else 0


def links_work(directory: Path, disks: Sequence[DiskConfig]) -> bool:
    """Whether files in all of the paths can be linked to from a directory."""
    return {device_of(directory)} == {device_of(Path(disk.path).expanduser()) for disk in disks}


def _hold_weights(loaded: LoadedModel, optimizer: OffloadedAdamW) -> None:
    """Book what the model itself holds, beside what a budget has handed out for weights."""
    streamed = {parameter.name for parameter in loaded.store.layout.parameters} if loaded.store else set()
    own = [p for name, p in loaded.model.named_parameters() if _plain(name) not in streamed]
    storages = {t.data_ptr(): t for t in (u.untyped_storage() for u in (*own, *loaded.model.buffers()))}
    optimizer.device.note("weights", sum(storage.nbytes() for storage in storages.values()))


def _plain(name: str) -> str:
    """A parameter's name before it had an adapter beside it."""
    return name.replace(".base_layer.", ".")


def device_of_plan(plan: Plan) -> torch.device:
    """Where the run computes."""
    return torch.device("cpu" if plan.machine.unified else "cuda")


def _number(value: int | str) -> int:
    assert isinstance(value, int), f"{value!r} was not filled in by the plan"
    return value
