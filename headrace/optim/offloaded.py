"""AdamW as a torch Optimizer whose master weights and moments live in the host tier."""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, SupportsIndex

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from headrace.errors import UserError
from headrace.lanes.lanes import Lanes
from headrace.ledger import Ledger
from headrace.machine.cores import available_cores
from headrace.memory.budget import Budget
from headrace.memory.disk import DiskPath, disk_paths
from headrace.memory.tiers import Tiers
from headrace.memory.weights import WeightStore
from headrace.optim.arrivals import Arrivals
from headrace.optim.build import build_engine
from headrace.optim.checks import (
    check_gradients,
    check_group,
    check_groups,
    check_names,
    check_options,
    check_parameters,
    check_ranks,
    check_still_frozen,
    device_of,
    hypers_of,
)
from headrace.optim.groups import parameters_of
from headrace.optim.lifetime import Lifetime
from headrace.optim.norm import NO_NORM, Norm
from headrace.optim.policies.base import Policy
from headrace.optim.policies.sync import Sync
from headrace.optim.saved import MASTER, HostStates, check_entry, check_saved, entries, fill, joined
from headrace.optim.states import DiskStates, Files, Fill
from headrace.schedule.window import WINDOW

BUCKET = 2**24
"""Default elements of a bucket: 32 MiB of bf16 gradients on a link."""


class SkippedStep(UserWarning):
    """A step changed nothing, because a gradient was not finite or because there was none at all."""


class OffloadedAdamW(Optimizer):
    """AdamW with fp32 master weights and moments in host memory, and working weights on the device.

    Given the same gradients, bit for bit what ``torch.optim.AdamW(fused=True)`` gives on fp32 master
    weights. Gradients leave the device bucket by bucket while backward runs; the method is ZeRO-Offload's
    (Ren et al. 2021, sections 4 and 5).

    Args:
        params: parameters, named parameters or param groups, each group with its own ``lr``, ``betas``,
            ``eps`` and ``weight_decay``.
        lr: learning rate.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay.
        max_grad_norm: gradients are scaled down to this global norm inside ``step()``; 0 for never.
        release_gradients: True frees each gradient as soon as it has left the device, so ``.grad`` is None
            after backward; clip with ``max_grad_norm`` then. False leaves ``.grad`` in place, so that
            other code may clip or scale it before ``step()``.
        micro_batches: backward passes before a ``step()``. With more than one, released gradients are
            summed in fp32 on the host, 4 bytes a parameter.
        policy: when and where buckets are updated.
        host: budget of host memory, like ``"48GiB"``; None for no limit.
        disk: directory -> budget of it (``{"/nvme/headrace": "120GiB"}``, None for what is free), or paths
            with their speeds: states live there, divided by speed, and in host memory only for their update.
        window: buckets of such states that are in host memory at once.
        gradients: where they wait for the update: ``"host"``, or ``"disk"``, where only a few buckets of them
            are in host memory.
        bucket: elements of a bucket, a multiple of 65,536.
        workers: threads of the update; all cores of this process by default.
        ledger: account to book in; a new one by default.
        kept: checkpoints of states on the disk that will stand at once, for which space is claimed too.
        tiers: budgets, disk and lanes to share with a model whose weights are streamed; ``host``, ``disk``,
            ``workers`` and ``ledger`` are theirs then.
        states: with ``tiers``: where states live, ``"host"`` or ``"disk"``.
        weights: with ``tiers``: the home of those of the parameters that are off the device.
        group: ranks with the same weights, given the same gradients, that share states and updates: all of
            them make each call that steps, saves or restores. None for one alone.

    Threads and host memory belong to the object: they go with it, or with :meth:`close`. It works in the
    process that built it alone, and cannot be copied or pickled; its ``state_dict()`` can.

    Raises:
        UserError: a budget too small, a parameter that is not a contiguous bf16, fp16 or fp32 tensor,
            parameters on several devices or with the same memory, numbers with which nothing can train.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float = 0.0,
        release_gradients: bool = False,
        micro_batches: int = 1,
        policy: Policy | None = None,
        host: int | str | None = None,
        disk: Mapping[str, int | str | None] | Sequence[DiskPath] = (),
        window: int = WINDOW,
        gradients: Literal["host", "disk"] = "host",
        bucket: int = BUCKET,
        workers: int | None = None,
        ledger: Ledger | None = None,
        kept: int = 0,
        tiers: Tiers | None = None,
        states: Literal["host", "disk"] = "host",
        weights: WeightStore | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        check_options(
            max_grad_norm=max_grad_norm,
            release_gradients=release_gradients,
            micro_batches=micro_batches,
            policy=policy,
            bucket=bucket,
            workers=workers,
            ledger=ledger,
        )
        check_ranks(group, weights)
        check_gradients(gradients, on_disk=bool(disk) or (tiers is not None and tiers.disk is not None))
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_group(defaults)
        self._closed_to_groups = False
        super().__init__(params, defaults)
        self._closed_to_groups = True
        check_groups(self.param_groups)
        check_names([name for name, _, _ in parameters_of(self.param_groups)])
        self.max_grad_norm = max_grad_norm
        self.release_gradients = release_gradients
        self.micro_batches = micro_batches
        self.norm: Norm = NO_NORM
        self.skipped = 0
        groups = {name: group for name, _, group in parameters_of(self.param_groups)}
        self._named = {name: p for name, p, _ in parameters_of(self.param_groups) if p.requires_grad}
        self._frozen = [(name, p) for name, p, _ in parameters_of(self.param_groups) if not p.requires_grad]
        streamed = {parameter.name for parameter in weights.layout.parameters} if weights else set()
        check_parameters({name: p for name, p in self._named.items() if name not in streamed})
        self._index = {name: index for index, name in enumerate(self._named)}
        self._policy = policy or Sync()
        self._started = False
        with ExitStack() as resources:
            if tiers is None:
                tiers = Tiers(
                    device_of(self._named),
                    Ledger() if ledger is None else ledger,
                    host=host,
                    disk=disk_paths(disk),
                    workers=available_cores() if workers is None else workers,
                    rank=0 if group is None else group.rank(),
                    ranks=1 if group is None else group.size(),
                )
                resources.callback(tiers.close)
            self.ledger = tiers.lanes.ledger
            self._engine = build_engine(
                self._named,
                groups,
                self._policy,
                tiers,
                resources,
                off=weights,
                on_disk=bool(disk) or states == "disk",
                gradients_on_disk=gradients == "disk",
                window=window,
                kept=kept,
                bucket=bucket,
                micro_batches=micro_batches,
                summed=release_gradients and micro_batches > 1,
                group=group,
            )
            self._arrivals = Arrivals(self._named, self._engine, micro_batches, released=release_gradients)
            if release_gradients:
                self._install_hooks(resources)
            self._lifetime = Lifetime(self, resources.pop_all(), self._engine.lanes)

    # -- what torch expects ---------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights with the gradients since the last step.

        A gradient that is not finite skips the step: ``norm`` and ``skipped`` say so, a warning names the
        parameter. Weights that were written to since the last step (``load_state_dict`` of the model,
        ``clamp_``) are followed; writes through ``.data`` are not seen.

        Args:
            closure: reevaluates the model and returns the loss, as in torch.

        Raises:
            UserError: a parameter was moved, replaced or unfrozen; the optimizer was closed or is in a fork
                of its process; a number of a param group is not one that can train.
        """
        self._lifetime.check_usable("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_still_frozen(self._frozen)
        hypers = hypers_of(self.param_groups)
        self._engine.weights.check_places()
        self._follow_weights()
        self._arrivals.collect()
        nothing = self._arrivals.none
        self.norm = self._engine.step(hypers, self.max_grad_norm)
        self._arrivals.clear()
        self.ledger.steps += 1
        if not self.norm.finite:
            self.skipped += 1
            text = f"step skipped: gradient not finite in {self.norm.offender}"
            warnings.warn(text, SkippedStep, stacklevel=4)  # the caller's line is behind two of torch's
        elif nothing:
            text = "step() found no gradient of any parameter: no backward ran, or the model has others now"
            warnings.warn(text, SkippedStep, stacklevel=4)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, those that have already left the device too."""
        super().zero_grad(set_to_none)
        if self._lifetime.usable:
            if not self._engine.collector.empty:
                self._engine.discard()
            self._arrivals.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the optimizer is built: the buckets are cut once."""
        if getattr(self, "_closed_to_groups", False):
            raise UserError("OffloadedAdamW cuts its buckets once: pass every param group to its constructor")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As torch's: ``step``, ``exp_avg``, ``exp_avg_sq`` by parameter, and the fp32 ``master`` weights.

        Tensors are in the parameters' shapes, whatever the buckets. Before the first step there are none.
        ``state`` is a mapping but no dict, so that ``accelerate.prepare`` leaves its tensors on the host.
        """
        self._lifetime.check_open("state_dict()")
        packed = super().state_dict()
        counts = self.counts
        updated = [name for name, count in counts.items() if count and self._started]
        positions = {name: position for position, (name, _, _) in enumerate(parameters_of(self.param_groups))}
        packed["state"] = HostStates(
            {positions[name]: self._state_of(name, counts[name]) for name in updated}
        )
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, or a plain torch AdamW's, on any device.

        State goes to the host buckets by layout. Without master weights (a plain AdamW's state), they come
        from the current working weights. A parameter without a saved state begins anew.

        Raises:
            UserError: when it is not an AdamW's state, or groups or shapes differ from this optimizer's;
                nothing was loaded then.
        """
        self._lifetime.check_usable("load_state_dict()")
        check_saved(state_dict, self.param_groups)
        found = entries(state_dict, [name for name, _, _ in parameters_of(self.param_groups)])
        found = {name: entry for name, entry in found.items() if name in self._named}
        for name, entry in found.items():
            check_entry(name, entry, self.shape(name), self.tables)
        self._engine.weights.check_places()
        for group, saved in zip(self.param_groups, copy.deepcopy(state_dict["param_groups"]), strict=True):
            group.update({k: v for k, v in saved.items() if k not in ("params", "param_names")})
        if found or self._started:
            without = [index for name, index in self._index.items() if MASTER not in found.get(name, {})]
            self._engine.adopt_weights(without)  # saved master weights may be views of our own, which stay
            fill(self._engine.store, self.names, found)
            self.restore({name: int(found[name]["step"]) if name in found else 0 for name in self._named})
            self._started = bool(found)

    # -- what checkpoints and callers read --------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Names of the parameters with state, in order; ``0``, ``1``... if none were given."""
        return list(self._named)

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the state tables; all are fp32, one number an element."""
        return tuple(self._policy.tables)

    @property
    def counts(self) -> dict[str, int]:
        """How often each parameter was updated."""
        return dict(zip(self._named, self._engine.counts, strict=True))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter."""
        return tuple(self._named[name].shape)

    def pieces(self, table: str, name: str) -> list[Tensor]:
        """A parameter's state in 1-D pieces in element order: views of host memory, or copies from disk."""
        self._lifetime.check_open("pieces()")
        self._follow_weights(self._index[name])
        return self._engine.pieces(table, self._index[name])

    def save_states(self, directory: Path) -> list[Path]:
        """Put states on the disk into a directory, durably: linked where possible."""
        self._lifetime.check_open("save_states()")
        self._follow_weights()
        return self.on_disk.save(directory) if self.on_disk else []

    @property
    def on_disk(self) -> DiskStates | None:
        """The states, where they live on the disk."""
        states = self._engine.store.states
        return states if isinstance(states, DiskStates) else None

    def restore(self, counts: Mapping[str, int], fill: Fill | None = None, files: Files = ()) -> None:
        """Go on from saved states: from ``files`` of :meth:`save_states` where they fit, else by ``fill``."""
        self._lifetime.check_usable("restore()")
        self._engine.weights.check_places()
        if not (self.on_disk and self.on_disk.adopt(files)) and fill is not None:
            names = self.names
            self._engine.fill(lambda table, index, *rest: fill(table, names[index], *rest))
        self._engine.counts = [counts[name] for name in self._named]
        self._engine.publish_weights()
        self._started = True

    @property
    def lanes(self) -> Lanes:
        """The lanes on which everything runs, for booking forward and backward beside it."""
        return self._engine.lanes

    @property
    def host(self) -> Budget:
        """The budget of the tier that holds the states."""
        return self._engine.store.budget

    @property
    def device(self) -> Budget:
        """The budget of the tier that holds the working weights; the same as ``host`` without accelerator."""
        return self._engine.device

    def close(self) -> None:
        """End the threads, remove the hooks, give the memory back. The model stays as it is.

        State that is wanted later must be read before.
        """
        self._lifetime.close()
        self._engine.forget()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse copy.copy, copy.deepcopy and pickle."""
        raise UserError(
            "OffloadedAdamW owns threads and host memory and cannot be copied or pickled: copy or save its "
            "state_dict() and load it into a new one"
        )

    # -- how it works -------------------------------------------------------------------------------------

    def _install_hooks(self, resources: ExitStack) -> None:
        weak = weakref.ref(self)  # a living model must not keep its optimizer
        for index, parameter in enumerate(self._named.values()):
            hook = partial(_on_gradient, weak, index)
            resources.callback(parameter.register_post_accumulate_grad_hook(hook).remove)

    def _arrived(self, index: int) -> None:
        self._lifetime.check_usable("backward()")
        self._start()
        self._arrivals.release(index)

    def _start(self) -> None:
        """The master weights come from the working weights as late as possible: models load after us."""
        if not self._started:
            self._engine.weights.check_places()
            self._engine.adopt_weights()
            self._started = True

    def _follow_weights(self, parameter: int | None = None) -> None:
        if self._started:
            self._engine.adopt_changes(parameter)
        self._start()

    def _state_of(self, name: str, count: int) -> dict[str, Tensor]:
        tables = {table: joined(self.pieces(table, name), self.shape(name)) for table in self.tables}
        return {"step": torch.tensor(float(count)), **tables}


def _on_gradient(weak: "weakref.ref[OffloadedAdamW]", index: int, parameter: Tensor) -> None:
    if (optimizer := weak()) is not None:
        optimizer._arrived(index)
