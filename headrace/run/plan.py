"""The plan: the run file with every `auto` filled in, and the ledger that it predicts."""

import importlib.metadata
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from headrace.checkpoint.config import WITHOUT_STATES
from headrace.config import format_size
from headrace.data.estimate import estimate
from headrace.errors import UserError
from headrace.hub import hub_name
from headrace.ledger import Ledger
from headrace.machine.cores import auto_threads
from headrace.machine.detect import detect, disk_bytes
from headrace.machine.machine import Machine
from headrace.machine.presets import preset
from headrace.models.source import find_source, pinned, read_config
from headrace.planner.disk import fitting_window, path_bytes, window_bytes
from headrace.planner.fit import KNOBS, Verdict, judge, lacking
from headrace.planner.memory import link_bytes, predict
from headrace.planner.report import memory_table
from headrace.planner.shape import ModelShape
from headrace.planner.waiting import waiting_moves
from headrace.planner.workload import Workload, divisors
from headrace.run.file import RunFile, dump, read_run_file, to_tree, validate
from headrace.schedule.action import Action
from headrace.schedule.window import WINDOW
from headrace.training.lr import learning_rate

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """What a run will do and hold.

    Attributes:
        run: the run file; no value in it is ``auto`` except the data's format, which the first record tells.
        shape: the model's sizes.
        work: what one step asks of memory.
        machine: what there is.
        budgets: tier -> bytes that the run may hold there; never more than there is.
        predicted: the ledger of one step.
        verdict: whether it fits, and what would make it fit.
    """

    run: RunFile
    shape: ModelShape
    work: Workload
    machine: Machine
    budgets: dict[str, int]
    predicted: Ledger
    verdict: Verdict

    def text(self) -> str:
        """The printed page: what the run is, where bytes live, whether it fits."""
        allowed = replace(self.machine, tiers={**self.machine.tiers, **self.budgets})
        table = memory_table(self.predicted, allowed, self.work)
        return "\n".join([self._title(), table, *self._notes(), str(self.verdict)])

    def yaml(self) -> str:
        """The run file with every default and the prediction: ``headrace train`` runs it."""
        return dump(self.run.model_copy(update={"predicted": self.predicted.to_json()}))

    def work_on(self, rows: int) -> Workload:
        """The largest step of data with so many rows, which may be fewer than the batch."""
        batch = min(rows, self.run.train.batch)
        micro_batch = min(batch, self.work.micro_batch)
        return replace(self.work, micro_batch=micro_batch, micro_batches=-(-batch // micro_batch))

    def predict_on(self, rows: int, steps: int, paths: tuple[float, ...] = ()) -> Ledger:
        """The mean step's ledger of a run over so many rows, now that they are known.

        The last step of an epoch holds what is left, so fewer micro-batches may send their gradients down.

        Args:
            rows: of the training data.
            steps: of the run.
            paths: measured speeds of the disk paths, if there are any.
        """
        work = replace(self.work_on(rows), paths=paths)
        ledger = predict(self.shape, work, self.machine)
        for action, nbytes in self._mean_links(work, rows, steps).items():
            ledger.actions[action].nbytes = nbytes
        return ledger

    def _mean_links(self, work: Workload, rows: int, steps: int) -> dict[Action, int]:
        """Bytes of a step, on average over steps of as many micro-batches as their rows make."""
        full, left = divmod(rows, min(rows, self.run.train.batch))
        epochs, more = divmod(steps, full + (left > 0))
        counts = Counter({work.micro_batches: epochs * full + more})
        if left:
            counts[-(-left // work.micro_batch)] += epochs
        total: Counter[Action] = Counter()
        for micro_batches, times in counts.items():
            # States move alike in every step; on average below, for their first and later steps differ.
            # Gradients are sums in a short step too.
            step = replace(work, micro_batches=micro_batches, states="host", gradients="host")
            for action, nbytes in link_bytes(self.shape, step, self.machine).items():
                total[action] += times * nbytes
        mean = {action: round(nbytes / steps) for action, nbytes in total.items()}
        for action, nbytes in (path_bytes(self.shape, work, steps) if work.states == "disk" else {}).items():
            mean[action] = mean.get(action, 0) + nbytes
        sent = sum(micro_batches * times for micro_batches, times in counts.items())
        for action, nbytes in waiting_moves(self.shape, work).items():
            mean[action] = mean.get(action, 0) + round(nbytes * sent / steps)
        return mean

    def _notes(self) -> Iterator[str]:
        for tier, asked in _asked(self.run, self.machine).items():
            if asked > self.budgets[tier]:
                yield f"! {KNOBS[tier]}={format_size(asked)} is more than {self.machine.name} has free"
        if self.run.model.lora is not None and not find_source(self.run.model.path).has_weights:
            yield f"! {self.run.model.path} has no weights, which model.lora needs: fetch them first"
        if self.run.train.compile:
            yield (
                "! train.compile=true: the memory of compiling is not predicted, and activations are those "
                "of uncompiled layers, which keep more"
            )
        if not self.run.checkpoint.states:
            yield f"! {WITHOUT_STATES}"
        elif self.run.memory.states == "disk":
            copies = 1 + self.run.checkpoint.keep
            held = self.predicted.peaks["disk"]
            needed = sum(held.values()) + self.run.checkpoint.keep * held["states"]
            if needed > self.machine.tiers["disk"]:
                yield (
                    f"! states and {copies - 1} checkpoints of them will take {needed / GIB:,.1f} GiB, more "
                    f"than the {self.machine.tiers['disk'] / GIB:,.1f} of memory.disk: raise it, or lower "
                    "checkpoint.keep"
                )

    def _title(self) -> str:
        run, count = self.run, self.shape.numel
        tokens = run.train.batch * run.data.context
        return (
            f"{_called(run.model.path)}, {_count(count)} parameters, {run.model.dtype}, {self._method()}, "
            f"up to {tokens:,} tokens a step ({run.train.accumulation} x {run.train.micro_batch} x "
            f"{run.data.context:,})"
        )

    def _method(self) -> str:
        lora, adapters = self.run.model.lora, self.shape.adapters
        if lora is None or adapters is None:
            return "full fine-tuning"
        trained = _count(self.shape.trained_numel)
        return f"LoRA of rank {lora.rank} on {len(adapters.modules)} linear layers ({trained} trained)"


def _called(path: str) -> str:
    """A model's name; a config.json has that of its directory before it, for all are called so."""
    name, at, commit = path.rpartition("@")
    if at and hub_name(path, "model"):
        return f"{name} at {commit[:7]}"
    place = Path(os.path.abspath(path))
    return f"{place.parent.name}/{place.name}" if place.name == "config.json" else place.name


def _count(numel: int) -> str:
    return f"{numel / 1e9:.2f} B" if numel >= 1e9 else f"{numel / 1e6:.1f} M"


def plan(source: str | Path | RunFile, overrides: Sequence[str] = (), machine: str | None = None) -> Plan:
    """Predict a run before anything is allocated.

    Args:
        source: a run file, by path or already read.
        overrides: ``section.key=value`` texts.
        machine: a preset's name; this machine by default.

    Raises:
        UserError: a mistake in the run file, a model or a machine that is not known.
    """
    run = source if isinstance(source, RunFile) else read_run_file(source, overrides)
    model = run.model.model_copy(update={"path": pinned(run.model.path)})
    run = run.model_copy(update={"model": model})
    config = read_config(run.model.path)
    shape = ModelShape.from_config(config)
    if run.model.lora is not None:
        shape = shape.with_adapters(run.model.lora.rank, run.model.lora.targets)
    _check_context(run, config)
    if run.train.steps is not None:
        learning_rate(0, run.train.steps, run.optim)  # a warm-up longer than the run
    there = detect(*_accelerator()) if machine is None else preset(machine)
    there = _with_disk(run, there)
    _check_tiers(run, there)
    _check_places(run, there)
    run = _fill(run, shape, there)
    budgets = {tier: min(size, there.tiers[tier]) for tier, size in _asked(run, there).items()}
    work = workload(run)
    verdict = judge(shape, work, there, budgets)
    return Plan(run, shape, work, there, budgets, verdict.ledger, verdict)


def workload(run: RunFile) -> Workload:
    """What one step of a filled-in run file asks of memory."""
    micro_batch, workers = run.train.micro_batch, run.threads.update
    assert micro_batch != "auto" and workers != "auto" and run.memory.weights != "auto"
    return Workload(
        context=run.data.context,
        micro_batch=micro_batch,
        micro_batches=run.train.accumulation,
        dtype=run.model.dtype,
        activations=run.memory.activations,
        weights=run.memory.weights,
        embeddings="rows" if run.memory.embeddings == "rows" else "whole",
        states=run.memory.states,
        gradients="host" if run.memory.gradients == "auto" else run.memory.gradients,
        loss_chunk=run.train.loss_chunk,
        bucket=run.update.bucket,
        workers=workers,
        paths=(1.0,) * len(run.memory.disk),
        window=WINDOW if run.update.window == "auto" else run.update.window,
    )


def _fill(run: RunFile, shape: ModelShape, machine: Machine) -> RunFile:
    """Replace every ``auto`` by what it stands for here."""
    tree = to_tree(run)
    memory, threads, train = tree["memory"], tree["threads"], tree["train"]
    for key, tier in _budget_keys(machine):
        if memory[key] == "auto":
            memory[key] = machine.tiers[tier] // MIB * MIB
    for lane, count in auto_threads().items():
        threads[lane] = count.count if threads[lane] == "auto" else threads[lane]
    if memory["weights"] == "auto":
        memory["weights"] = _weights(tree, shape, machine)
    memory["gradients"] = _gradients(validate(tree, "the plan"), shape, machine)
    memory["embeddings"] = _embeddings(validate(tree, "the plan"), shape, machine)
    if train["micro_batch"] == "auto":
        train["micro_batch"] = _largest_that_fits(validate(tree, "the plan"), shape, machine)
    if tree["update"]["window"] == "auto":
        tree["update"]["window"] = _window(validate(tree, "the plan"), shape, machine)
    return validate(tree, "the plan")


def _weights(tree: dict[str, Any], shape: ModelShape, machine: Machine) -> str:
    """The fastest tier for the weights with which some micro-batch fits; the last if none does."""
    tiers = ["device", *([] if machine.unified else ["host"]), *(["disk"] if tree["memory"]["disk"] else [])]
    for tier in tiers:
        memory = {**tree["memory"], "weights": tier}
        if tier != "device" and memory["activations"] == "keep":
            continue
        run = validate({**tree, "memory": memory}, "the plan")
        if not _least_lack(run, shape, machine, _gradients(run, shape, machine)):
            return tier
    return tiers[-1] if tree["memory"]["activations"] != "keep" else "device"


def _gradients(run: RunFile, shape: ModelShape, machine: Machine) -> Literal["host", "disk"]:
    """Host memory for gradients, unless less is lacking with them where the states are, on the disk."""
    if run.memory.gradients != "auto":
        return run.memory.gradients
    if run.memory.states == "disk" and (on_host := _least_lack(run, shape, machine, "host")):
        return "disk" if _least_lack(run, shape, machine, "disk") < on_host else "host"
    return "host"


def _embeddings(run: RunFile, shape: ModelShape, machine: Machine) -> Literal["whole", "rows"]:
    """Whole embeddings, unless less is lacking with those that come by rows."""
    memory = run.memory
    if memory.weights == "device":
        return "whole"
    if memory.embeddings != "auto":
        return memory.embeddings
    assert memory.gradients != "auto"
    lacks = []
    for embeddings in ("whole", "rows"):
        turned = run.model_copy(update={"memory": memory.model_copy(update={"embeddings": embeddings})})
        lacks.append(_least_lack(turned, shape, machine, memory.gradients))
    return "rows" if lacks[1] < lacks[0] else "whole"


def _least_lack(run: RunFile, shape: ModelShape, machine: Machine, gradients: Literal["host", "disk"]) -> int:
    """Bytes that the tiers lack with the best of the micro-batches that may be chosen; 0 where one fits."""
    batch, asked = run.train.batch, run.train.micro_batch
    budgets = {**machine.tiers, **_asked(run, machine)}
    lacks = []
    for rows in divisors(batch) if asked == "auto" else [asked]:
        train = run.train.model_copy(update={"micro_batch": rows})
        work = replace(workload(run.model_copy(update={"train": train})), gradients=gradients)
        lacks.append(sum(lacking(predict(shape, work, machine), budgets).values()))
    return min(lacks)


def _window(run: RunFile, shape: ModelShape, machine: Machine) -> int:
    """As many buckets of states in host memory as its budget leaves room for."""
    if run.memory.states != "disk":
        return WINDOW
    work = replace(workload(run), window=1)
    tier = machine.host_tier
    allowed = {**machine.tiers, **_asked(run, machine)}[tier]
    free = allowed - predict(shape, work, machine).total(tier) + window_bytes(shape, work)
    return fitting_window(shape, work, free)


def _largest_that_fits(run: RunFile, shape: ModelShape, machine: Machine) -> int:
    """The largest divisor of the batch whose prediction fits; 1 if none does."""
    batch, budgets = run.train.batch, {**machine.tiers, **_asked(run, machine)}
    for rows in reversed(divisors(batch)):
        train = run.train.model_copy(update={"micro_batch": rows})
        work = workload(run.model_copy(update={"train": train}))
        if not lacking(predict(shape, work, machine), budgets):
            return rows
    return 1


def _asked(run: RunFile, machine: Machine) -> dict[str, int]:
    """Tier -> the run file's budget, for a run file whose budgets are filled in."""
    values = {tier: getattr(run.memory, key) for key, tier in _budget_keys(machine)}
    return {tier: size for tier, size in values.items() if size != "auto"}


def _with_disk(run: RunFile, machine: Machine) -> Machine:
    """The machine with what its disk paths may hold: their budgets, and no more than is free."""
    if not run.memory.disk:
        return machine
    found = 0
    for disk in run.memory.disk:
        free = disk_bytes(Path(disk.path).expanduser())
        found += free if disk.size == "auto" else min(free, disk.size)
    return replace(machine, tiers={**machine.tiers, "disk": found})


def _budget_keys(machine: Machine) -> list[tuple[str, str]]:
    """Keys of the run file's ``memory`` and the tiers that they limit."""
    device = [] if machine.unified else [("device", machine.device_tier)]
    return [*device, ("host", machine.host_tier)]


def _check_tiers(run: RunFile, machine: Machine) -> None:
    if machine.unified and run.memory.device != "auto":
        raise UserError(
            f"memory.device={format_size(run.memory.device)} means nothing on {machine.name}, which has no "
            "accelerator: RAM is its only tier, set memory.host"
        )


def _check_places(run: RunFile, machine: Machine) -> None:
    for key in ("weights", "activations"):
        if machine.unified and getattr(run.memory, key) == "host":
            raise UserError(
                f"memory.{key}=host means nothing on {machine.name}, which has no accelerator: RAM is its "
                f"only memory; leave it out, or set memory.{key}=disk"
            )


def _accelerator() -> tuple[int | None, str]:
    """Free bytes and name of the accelerator; torch is asked only when its build can have one."""
    if importlib.metadata.version("torch").endswith("+cpu"):
        return None, ""
    import torch

    if not torch.cuda.is_available():
        return None, ""
    return torch.cuda.mem_get_info()[0], torch.cuda.get_device_name()


def _check_context(run: RunFile, config: Mapping[str, Any]) -> None:
    positions = config.get("max_position_embeddings") or config.get("n_positions")  # GPT-2
    if positions and not isinstance(positions, int):
        raise UserError(
            f"{run.model.path}: max_position_embeddings in config.json must be a whole number, "
            f"not {positions!r}"
        )
    if positions and run.data.context > positions:
        raise UserError(
            f"data.context={run.data.context} is more than the {positions} positions that "
            f"{run.model.path} was made for: lower data.context"
        )


def estimated_steps(run: RunFile) -> tuple[int, bool]:
    """Optimizer steps of the run, and whether that is an estimate from a sample of the data."""
    if run.train.steps is not None:
        return run.train.steps, False
    rows = estimate(run.data).rows
    return run.train.total_steps(-(-rows // run.train.batch)), True


def adopt(saved: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """The asked run file in which every ``auto`` is what the saved plan made of it."""
    return {
        key: adopt(saved[key], value)
        if isinstance(value, dict) and isinstance(saved.get(key), dict)
        else (saved.get(key, value) if value == "auto" else value)
        for key, value in asked.items()
    }
