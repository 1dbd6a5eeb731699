"""One training step against what people use today: tokens a second and peak RSS, a process each, interleaved.

    pip install setuptools wheel ninja && pip install --no-build-isolation deepspeed==0.19.8   # needs g++
    pip install accelerate
    python -m benchmarks.train_step --json

All train the same random Llama on the same tokens: bf16 arithmetic, fp32 master weights and AdamW moments,
two micro-batches a step, clipping at 1.0. Trainer keeps fp32 weights and casts in every layer (autocast).
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from headrace.memory.process import peak_resident_bytes, prepare_process

prepare_process()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.report import Check, finish  # noqa: E402

LR, CLIP = 1e-4, 1.0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Setting:
    """What all train: a model's layers, rows of a micro-batch, tokens of a row, micro-batches, steps."""

    layers: int = 8
    rows: int = 2
    length: int = 512
    micro_batches: int = 2
    steps: int = 6

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.length * self.micro_batches

    def step(self, index: int) -> list[Tensor]:
        """The micro-batches' token ids, [rows, length] each."""
        generator = torch.Generator().manual_seed(index)
        shape = (self.micro_batches, self.rows, self.length)
        return list(torch.randint(0, 49152, shape, generator=generator).to(DEVICE))

    def model(self, dtype: torch.dtype) -> nn.Module:
        """SmolLM2-135M's shape with fewer layers, weights drawn at random."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=self.layers,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
        return LlamaForCausalLM(config).to(DEVICE, dtype).train()


def plain(setting: Setting, stepped: Callable[[], None]) -> None:
    """PyTorch by hand: bf16 weights, fp32 masters that hold the summed gradients, torch's fused AdamW."""
    model = setting.model(torch.bfloat16)
    weights = list(model.parameters())
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=True)
    for index in range(setting.steps):
        for ids_BL in setting.step(index):
            (model(input_ids=ids_BL, labels=ids_BL).loss / setting.micro_batches).backward()
            for master, weight in zip(masters, weights, strict=True):
                gradient = weight.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                weight.grad = None
        nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        stepped()


def trainer(setting: Setting, stepped: Callable[[], None]) -> None:
    """transformers' Trainer with bf16 autocast."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            stepped()

    ids = torch.cat([torch.cat(setting.step(index)) for index in range(setting.steps)]).cpu()
    with tempfile.TemporaryDirectory() as home:
        arguments = TrainingArguments(
            home,
            per_device_train_batch_size=setting.rows,
            gradient_accumulation_steps=setting.micro_batches,
            max_steps=setting.steps,
            learning_rate=LR,
            max_grad_norm=CLIP,
            bf16=True,
            use_cpu=DEVICE == "cpu",
            optim="adamw_torch_fused",
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        )
        rows = [{"input_ids": row, "labels": row} for row in ids]
        Trainer(setting.model(torch.float32), arguments, train_dataset=rows, callbacks=[Clock()]).train()


def deepspeed(setting: Setting, stepped: Callable[[], None]) -> None:
    """DeepSpeed ZeRO stage 2 with the optimizer offloaded to the host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(one, MASTER_PORT=str(port), DS_ACCELERATOR=DEVICE)
    import deepspeed as library

    library.init_distributed(dist_backend="gloo" if DEVICE == "cpu" else "nccl")
    model = setting.model(torch.bfloat16)
    config = {
        "train_micro_batch_size_per_gpu": setting.rows,
        "gradient_accumulation_steps": setting.micro_batches,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "torch_adam": False}},
    }
    engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=config)
    for index in range(setting.steps):
        for ids_BL in setting.step(index):
            engine.backward(engine(input_ids=ids_BL, labels=ids_BL).loss)
            engine.step()
        stepped()


def headrace(setting: Setting, stepped: Callable[[], None]) -> None:
    """Our own loop."""
    from headrace.data.batch import MicroBatch
    from headrace.models.attention import attach
    from headrace.optim.config import OptimConfig
    from headrace.optim.offloaded import OffloadedAdamW
    from headrace.training.config import TrainConfig
    from headrace.training.loop import Loop
    from headrace.training.meters import Meters

    class Steps:
        def step(self, index: int) -> list[MicroBatch]:
            return [micro_batch(ids_BL) for ids_BL in setting.step(index)]

    def micro_batch(ids_BL: Tensor) -> MicroBatch:
        labels_BL = ids_BL.roll(-1, 1)
        labels_BL[:, -1] = -100
        positions_BL = torch.arange(setting.length, device=DEVICE).repeat(setting.rows, 1)
        documents = tuple((row, 0, setting.length) for row in range(setting.rows))
        return MicroBatch(ids_BL, labels_BL, positions_BL, documents, labels_BL.ne(-100).sum().item())

    model = setting.model(torch.bfloat16)
    attach(model)
    optimizer = OffloadedAdamW(
        model.parameters(),
        lr=LR,
        max_grad_norm=CLIP,
        release_gradients=True,
        micro_batches=setting.micro_batches,
    )
    batch = setting.rows * setting.micro_batches
    train = TrainConfig(steps=setting.steps, batch=batch, micro_batch=setting.rows)
    optim = OptimConfig(lr=LR, schedule="constant", warmup=0)
    loop = Loop(
        model,
        optimizer,
        Steps(),
        None,
        steps=setting.steps,
        train=train,
        optim=optim,
        meters=Meters(model),
    )
    for _ in loop.run(0):
        stepped()
    optimizer.close()


PEERS = {
    "plain PyTorch": plain,
    "Trainer": trainer,
    "DeepSpeed ZeRO-2 offload": deepspeed,
    "headrace": headrace,
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--peer", choices=PEERS, help="run this one alone and print its steps")
    given = arguments.parse_args()
    setting = Setting()
    if given.peer:
        print(json.dumps(run(given.peer, setting)))
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in PEERS}
    for number in range(given.rounds):
        for name in PEERS:
            print(f"round {number + 1}/{given.rounds}: {name}", flush=True)
            if result := in_a_process(name):
                found[name].append(result)
    report(found, setting, given.json)


def run(peer: str, setting: Setting) -> dict[str, float]:
    """Seconds of a step (the median, without the first two), and this process's peaks: RSS, device bytes."""
    ends: list[float] = []

    def stepped() -> None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())

    PEERS[peer](setting, stepped)
    assert len(ends) == setting.steps, (peer, len(ends))
    steps = [b - a for a, b in pairwise(ends[1:])]
    device = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    return {"seconds": median(steps), "peak": peak_resident_bytes(), "device": device}


def in_a_process(peer: str) -> dict[str, float] | None:
    """The result of one peer; None, and its last words, if it cannot run here."""
    command = [sys.executable, "-m", "benchmarks.train_step", "--peer", peer]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        print(f"  does not run: {(done.stderr.strip() or done.stdout).splitlines()[-1]}")
        return None
    return json.loads(done.stdout.splitlines()[-1])


def report(found: dict[str, list[dict[str, float]]], setting: Setting, as_json: bool) -> None:
    """The table, and the two bounds that Headrace must keep."""
    ran = {name: results for name, results in found.items() if results}
    speed = {n: setting.tokens / median(r["seconds"] for r in results) for n, results in ran.items()}
    peak = {n: median(r["peak"] for r in results) for n, results in ran.items()}
    print(f"{setting.layers} layers, {setting.tokens} tokens a step")
    for name in ran:
        device = median(result["device"] for result in ran[name]) / 2**20
        on_device = f"  {device:8.0f} MiB on the device" if device else ""
        print(f"  {name:26} {speed[name]:8.1f} tokens/s  {peak[name] / 2**20:8.0f} MiB peak RSS{on_device}")
    peers = [name for name in PEERS if name in ran and name != "headrace"]
    fastest = speed["headrace"] / max(speed[name] for name in peers)
    least = peak["headrace"] / min(peak[name] for name in peers)
    checks = [
        Check("headrace: share of the fastest peer's tokens/s", fastest, 0.97, fastest >= 0.97),
        Check("headrace: peak RSS over the least of the peers", least, 1.0, least <= 1.0),
        Check("peers that ran", len(peers), len(PEERS) - 1, len(peers) == len(PEERS) - 1),
    ]
    figures = {f"{name}: tokens/s": value for name, value in speed.items()}
    figures |= {f"{name}: peak RSS bytes": value for name, value in peak.items()}
    finish(figures, checks, as_json)


if __name__ == "__main__":
    main()
