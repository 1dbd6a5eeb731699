"""AdamW as a torch Optimizer whose master weights and moments live in the host tier."""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from headrace.config import parse_size
from headrace.errors import UserError
from headrace.lanes.lanes import Lanes
from headrace.ledger import Ledger
from headrace.machine.cores import available_cores
from headrace.memory.budget import Budget
from headrace.memory.pool import HostPool
from headrace.optim.checks import check_groups, check_numbers, check_parameter, dense, device_of
from headrace.optim.engine import Engine
from headrace.optim.kernel import Hyper
from headrace.optim.layout import Parameter, cut
from headrace.optim.norm import NO_NORM, Norm
from headrace.optim.policies.base import Policy
from headrace.optim.policies.sync import Sync
from headrace.optim.store import NAMES, HostStore

BUCKET = 2**24
"""Default elements of a bucket: 32 MiB of bf16 gradients on a link."""


class SkippedStep(UserWarning):
    """A step was not taken because a gradient was not finite."""


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
        bucket: elements of a bucket, a multiple of 65,536.
        workers: threads of the update; all cores of this process by default.
        ledger: account to book in; a new one by default.

    Raises:
        UserError: a budget too small, a parameter that is not a contiguous bf16, fp16 or fp32 tensor,
            parameters on several devices.
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
        bucket: int = BUCKET,
        workers: int | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        check_numbers(lr, betas, eps, weight_decay, max_grad_norm, micro_batches, bucket)
        self._closed_to_groups = False
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._closed_to_groups = True
        self.max_grad_norm = max_grad_norm
        self.release_gradients = release_gradients
        self.micro_batches = micro_batches
        self.ledger = Ledger() if ledger is None else ledger
        self.norm: Norm = NO_NORM
        self.skipped = 0
        self._named = dict(self._trainable())
        self._index = {name: index for index, name in enumerate(self._named)}
        self._frozen = [(n, p) for n, p, _ in self._all_parameters() if not p.requires_grad]
        self._engine = self._build(policy or Sync(), host, bucket, workers or available_cores())
        self._started = False
        self._backwards = [0] * len(self._named)
        self._hooks = self._install_hooks() if release_gradients else []

    # -- what torch expects ---------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights with the gradients since the last step.

        A gradient that is not finite skips the step: ``norm`` and ``skipped`` say so, a warning names the
        parameter.

        Args:
            closure: reevaluates the model and returns the loss, as in torch.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_unfrozen()
        self._start()
        if not self.release_gradients:
            self._collect()
        self.norm = self._engine.step(self._hypers(), self.max_grad_norm)
        self._backwards = [0] * len(self._named)
        self.ledger.steps += 1
        if not self.norm.finite:
            self.skipped += 1
            text = f"step skipped: gradient not finite in {self.norm.offender}"
            warnings.warn(text, SkippedStep, stacklevel=4)  # the caller's line is behind two of torch's
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, those that have already left the device too."""
        super().zero_grad(set_to_none)
        if not self._engine.collector.empty:
            self._engine.discard()
            self._backwards = [0] * len(self._named)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the optimizer is built: the buckets are cut once."""
        if getattr(self, "_closed_to_groups", False):
            raise UserError("OffloadedAdamW cuts its buckets once: pass every param group to its constructor")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As torch's: ``step``, ``exp_avg``, ``exp_avg_sq`` by parameter, and the fp32 ``master`` weights.

        Tensors are in the parameters' shapes, whatever the buckets. Before the first step there are none.
        """
        packed = super().state_dict()
        packed["state"] = {
            position: self._state_of(name)
            for position, (name, _, _) in enumerate(self._all_parameters())
            if name in self._named and self._started and self.counts[name]
        }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, or a plain torch AdamW's, on any device.

        State goes to the host buckets by layout. Without master weights (a plain AdamW's state), they come
        from the current working weights.

        Raises:
            UserError: when groups or shapes differ from this optimizer's.
        """
        check_groups(self.param_groups, state_dict["param_groups"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in saved.items() if k not in ("params", "param_names")})
        if not state_dict["state"]:
            return
        self._engine.adopt_weights()
        counts = dict.fromkeys(self._named, 0)
        for position, (name, parameter, _) in enumerate(self._all_parameters()):
            if position in state_dict["state"] and name in self._named:
                counts[name] = self._load_state(name, parameter, state_dict["state"][position])
        self.restore(counts)

    # -- what checkpoints and callers read --------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Names of the parameters with state, in order; ``0``, ``1``... if none were given."""
        return list(self._named)

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the state tables; all are fp32, one number an element."""
        return tuple(self._engine.store.tables)

    @property
    def counts(self) -> dict[str, int]:
        """How often each parameter was updated."""
        return dict(zip(self._named, self._engine.counts, strict=True))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter."""
        return tuple(self._named[name].shape)

    def pieces(self, table: str, name: str) -> list[Tensor]:
        """1-D views of a parameter's state in element order; together they are the whole parameter."""
        self._start()
        return self._engine.store.pieces(table, self._index[name])

    def restore(self, counts: Mapping[str, int]) -> None:
        """Go on from states that were written into :meth:`pieces`: set the counts, round the weights."""
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
        return self._host

    @property
    def device(self) -> Budget:
        """The budget of the tier that holds the working weights; the same as ``host`` without accelerator."""
        return self._engine.device

    def close(self) -> None:
        """End the threads, remove the hooks, give the memory back."""
        for hook in self._hooks:
            hook.remove()
        self._end_lanes()
        self._engine.store.close()

    # -- how it works -------------------------------------------------------------------------------------

    def _all_parameters(self) -> Iterator[tuple[str, Tensor, int]]:
        """(name, parameter, group) of every parameter, in the order of the param groups."""
        position = 0
        for index, group in enumerate(self.param_groups):
            names = group.get("param_names") or [str(position + i) for i in range(len(group["params"]))]
            for name, parameter in zip(names, group["params"], strict=True):
                yield name, parameter, index
            position += len(group["params"])

    def _trainable(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter, _ in self._all_parameters():
            if parameter.requires_grad:
                check_parameter(name, parameter)
                yield name, parameter

    def _build(self, policy: Policy, host: int | str | None, bucket: int, workers: int) -> Engine:
        groups = {name: group for name, _, group in self._all_parameters()}
        layout = cut(
            [Parameter(n, p.numel(), groups[n], NAMES[p.dtype]) for n, p in self._named.items()],
            capacity=bucket,
        )
        device = device_of(self._named)
        on_cpu = device.type == "cpu"
        limit = None if host is None else parse_size(host)
        self._host = Budget("ram" if on_cpu else "host", limit, self.ledger, "memory.host")
        on_device = self._host if on_cpu else Budget("device", None, self.ledger, "memory.device")
        store = HostStore(
            layout,
            policy.tables,
            HostPool(self._host, pin=device.type == "cuda"),
            capacity=bucket,
            summed=self.release_gradients and self.micro_batches > 1,
            landing=not on_cpu,
            workers=workers,
        )
        lanes = Lanes(device, self.ledger, workers)
        # A thread inside torch when Python ends would abort the process: end them first, whoever forgets to.
        self._end_lanes = weakref.finalize(self, lanes.close)
        return Engine(list(self._named.values()), store, policy, lanes, on_device, self.micro_batches)

    def _install_hooks(self) -> list[Any]:
        return [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, index, name))
            for index, (name, parameter) in enumerate(self._named.items())
        ]

    def _arrived(self, index: int, name: str, parameter: Tensor) -> None:
        """A gradient is complete: hand it on, and free it once it has left the device."""
        self._backwards[index] += 1
        if self._backwards[index] > self.micro_batches:
            raise UserError(
                f"backward ran {self._backwards[index]} times before step() for {name}, but micro_batches is "
                f"{self.micro_batches}: pass OffloadedAdamW(micro_batches={self._backwards[index]}) or more"
            )
        self._start()
        gradient = dense(name, parameter)
        parameter.grad = None
        self._engine.arrive(index, gradient)

    def _collect(self) -> None:
        for index, (name, parameter) in enumerate(self._named.items()):
            if parameter.grad is not None:
                self._engine.arrive(index, dense(name, parameter))

    def _start(self) -> None:
        """The master weights come from the working weights as late as possible: models load after us."""
        if not self._started:
            self._engine.adopt_weights()
            self._started = True

    def _hypers(self) -> list[Hyper]:
        return [
            Hyper(float(g["lr"]), g["betas"][0], g["betas"][1], g["eps"], g["weight_decay"])
            for g in self.param_groups
        ]

    def _refuse_unfrozen(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UserError(
                    f"{name} was frozen when OffloadedAdamW was built and is not now: "
                    "unfreeze parameters before building the optimizer"
                )

    def _state_of(self, name: str) -> dict[str, Tensor]:
        tables = {table: _joined(self.pieces(table, name), self.shape(name)) for table in self.tables}
        return {"step": torch.tensor(float(self.counts[name])), **tables}

    def _load_state(self, name: str, parameter: Tensor, state: Mapping[str, Tensor]) -> int:
        for table in self.tables:
            if table == "master" and table not in state:
                continue
            if tuple(state[table].shape) != tuple(parameter.shape):
                raise UserError(
                    f"the saved {table} of {name} has shape {tuple(state[table].shape)}, the parameter "
                    f"{tuple(parameter.shape)}: load the state of the same model"
                )
            start = 0
            flat = state[table].reshape(-1)
            for piece in self._engine.store.pieces(table, self._index[name]):
                piece.copy_(flat[start : start + piece.numel()])
                start += piece.numel()
        return int(state["step"])


def _joined(pieces: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces or [torch.empty(0)])
    return flat.view(shape)
