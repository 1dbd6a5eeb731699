"""Full fine-tuning of a model that is larger than the memory it may use: speed against the hardware's floor.

    python -m benchmarks.larger_than_ram --json            # ours, and DeepSpeed's where it is installed
    pip install deepspeed==0.19.8                          # needs g++ and libaio

First a Llama of 1.1 billion parameters (16 GB of weights and states) under 3 GiB of host memory. Its floor is
the longer of two times: computing alone, and moving the bytes that must move at the disk's best. Then a
Llama of 125 million beside DeepSpeed ZeRO-3 with everything on NVMe, on the same tokens.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from headrace.memory.process import prepare_process

prepare_process()

import torch  # noqa: E402
import yaml  # noqa: E402

from benchmarks.report import Check, finish  # noqa: E402
from benchmarks.watched import Watched, watch  # noqa: E402

GIB = 2**30
PROCESS = GIB // 2
"""What Python, torch and the allocator may take beside the budget. They are part of the prediction, so the
peak should keep the budget itself; this is the bound of the check."""


@dataclass(frozen=True)
class Case:
    """A model and a step of one micro-batch."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    rows: int
    host: str
    activations: str
    steps: int
    bucket: int = 2**24
    loss_chunk: int = 512

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.context

    def config(self, layers: int | None = None) -> dict[str, Any]:
        """The model's config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": layers or self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
        }


LARGE = Case(22, 2048, 5632, 32, 4, 32000, 2048, 3, "3GiB", "disk", 4)
SMALL = Case(12, 768, 2048, 12, 4, 32000, 1024, 1, "1400MiB", "recompute", 8, 2**22, 128)


# -- ours ------------------------------------------------------------------------------------------------


def write_run(case: Case, home: Path) -> Path:
    """A model directory without weights, a text, and the run file."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    text = "\n".join(topics.values())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    (home / "model").mkdir(parents=True)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(home / "model")
    (home / "model" / "config.json").write_text(json.dumps(case.config()))
    (home / "text.txt").write_text(text)
    run = {
        "model": {"path": str(home / "model" / "config.json"), "dtype": "bf16"},
        "data": {"train": str(home / "text.txt"), "context": case.context},
        "train": {
            "steps": case.steps,
            "batch": case.rows,
            "micro_batch": case.rows,
            "loss_chunk": case.loss_chunk,
        },
        "optim": {"lr": 1e-4, "schedule": "constant", "warmup": 0},
        "memory": {
            "host": case.host,
            "states": "disk",
            "weights": "disk",
            "activations": case.activations,
            "disk": [{"path": str(home / "disk")}],
        },
        "update": {"bucket": case.bucket},
        "checkpoint": {"every": 0, "keep": 1, "states": False},
        "out": str(home / "out"),
    }
    path = home / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


@dataclass(frozen=True)
class Result:
    """Seconds of a step (median, without the first), losses, peak resident bytes, bytes written a step."""

    seconds: float
    losses: list[float]
    peak: int
    written: float


def ours(case: Case, home: Path) -> tuple[Result, dict[str, Any]]:
    """Train with Headrace; returns what was seen, and its ledger."""
    run = write_run(case, home)
    seen = watch([sys.executable, "-m", "headrace", "train", str(run)], show=True)
    _check_ended(seen, "headrace")
    records = [json.loads(line) for line in (home / "out" / "metrics.jsonl").read_text().splitlines()]
    ledger = json.loads((home / "out" / "ledger.json").read_text())["measured"]
    moved = _moved(ledger, "WRITE") / ledger["steps"]
    seconds = median(record["seconds"] for record in records[1:])
    return Result(seconds, [record["loss"] for record in records], seen.peak, moved), ledger


def _moved(ledger: dict[str, Any], kind: str) -> int:
    return sum(account[1] for action, account in ledger["actions"].items() if kind in action)


def _check_ended(seen: Watched, name: str) -> None:
    if seen.code:
        words = (seen.errors.strip() or "\n".join(line for _, line in seen.lines[-5:])).splitlines()
        sys.exit(f"{name} ended with {seen.code}: {words[-1] if words else ''}")


# -- the floor -------------------------------------------------------------------------------------------


def compute_alone(case: Case) -> float:
    """Seconds of forward and backward with recomputation, of all layers: from models of 2 and 4 in memory."""
    times = {layers: _step_seconds(case, layers) for layers in (2, 4)}
    layer = (times[4] - times[2]) / 2
    return times[2] + (case.layers - 2) * layer


def _step_seconds(case: Case, layers: int) -> float:
    from transformers import AutoConfig, AutoModelForCausalLM

    from headrace.data.batch import MicroBatch
    from headrace.models.attention import attach
    from headrace.models.recompute import recompute_layers
    from headrace.training.forward import forward_loss

    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**case.config(layers)), dtype=torch.bfloat16
    ).train()
    attach(model)
    recompute_layers(model)
    ids_BL = torch.randint(0, 2000, (case.rows, case.context))
    positions_BL = torch.arange(case.context).repeat(case.rows, 1)
    documents = tuple((row, 0, case.context) for row in range(case.rows))
    batch = MicroBatch(ids_BL, ids_BL.clone(), positions_BL, documents, case.tokens)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        forward_loss(model, batch, 1 / case.tokens, 512).backward()
        seconds.append(time.perf_counter() - start)
        for parameter in model.parameters():
            parameter.grad = None
    return median(seconds[1:])


def disk_floor(home: Path, read: int, written: int) -> tuple[float, dict[str, float]]:
    """Least seconds in which a disk moves these bytes: one direction after the other, or both at once."""
    alone = {"write": _speed(home, "write"), "read": _speed(home, "read")}
    found: dict[str, float] = {}

    def at_once(direction: str) -> None:
        found[direction] = _speed(home, direction)

    threads = [threading.Thread(target=at_once, args=(direction,)) for direction in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    in_turn = read / alone["read"] + written / alone["write"]
    together = max(read / found["read"], written / found["write"])
    speeds = {f"{direction} bytes/s alone": speed for direction, speed in alone.items()}
    speeds |= {f"{direction} bytes/s both at once": speed for direction, speed in found.items()}
    return min(in_turn, together), speeds


def _speed(home: Path, direction: str) -> float:
    """Bytes a second of a bare loop of threads over 4 GiB in blocks of 4 MiB, past the system's caches."""
    from headrace.memory.blocks import open_direct
    from headrace.memory.pool import map_bytes

    path, block, count, threads = home / f"floor-{direction}", 4 * 2**20, 1024, 4
    if direction == "read" and not path.exists():
        (home / "floor-write").rename(path)
    flags = os.O_RDWR | os.O_CREAT if direction == "write" else os.O_RDONLY
    descriptor, _ = open_direct(path, flags)
    buffers = [memoryview(map_bytes(block)) for _ in range(threads)]
    for buffer in buffers:
        buffer[:] = os.urandom(1) * block

    def share(number: int) -> None:
        for index in range(number, count, threads):
            if direction == "write":
                os.pwritev(descriptor, [buffers[number]], index * block)
            else:
                os.preadv(descriptor, [buffers[number]], index * block)

    start = time.perf_counter()
    workers = [threading.Thread(target=share, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - start
    os.close(descriptor)
    return count * block / seconds


# -- the peer --------------------------------------------------------------------------------------------


def deepspeed(case: Case, home: Path) -> Result | None:
    """Train with DeepSpeed ZeRO-3, parameters and optimizer on NVMe; None where it cannot run."""
    home.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.nvme_peer", str(home), str(case.context), str(case.steps)]
    seen = watch(command, {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(torch.get_num_threads())})
    steps = [json.loads(line.removeprefix("STEP ")) for _, line in seen.lines if line.startswith("STEP ")]
    if seen.code or len(steps) != case.steps:
        words = (seen.errors.strip() or "no word").splitlines()[-1]
        print(f"  DeepSpeed does not run here: {words}")
        return None
    written = (steps[-1]["written"] - steps[0]["written"]) / (len(steps) - 1)
    seconds = median(step["seconds"] for step in steps[1:])
    return Result(seconds, [step["loss"] for step in steps], seen.peak, written)


# -- all of it -------------------------------------------------------------------------------------------


def large(home: Path) -> tuple[dict[str, float], list[Check]]:
    """The model of 1.1 billion parameters."""
    case = LARGE
    print("computing alone", flush=True)
    alone = compute_alone(case)
    print(f"  {alone:.1f} s; training 1.1 B parameters under {case.host}", flush=True)
    result, ledger = ours(case, home / "large")
    steps = ledger["steps"]
    read, written = _moved(ledger, "READ") / steps, _moved(ledger, "WRITE") / steps
    print("the disk's best", flush=True)
    moving, speeds = disk_floor(home, int(read), int(written))
    floor = max(alone, moving)
    share, limit = floor / result.seconds, 3 * GIB + PROCESS
    print(
        f"1.1 B parameters, {case.tokens:,} tokens a step: {result.seconds:.1f} s, floor {floor:.1f} s "
        f"(compute {alone:.1f}, disk {moving:.1f}), peak RSS {result.peak / GIB:.2f} GiB, "
        f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}"
    )
    checks = [
        Check("1.1 B: floor over seconds a step", share, 0.75, share >= 0.75),
        Check("1.1 B: peak RSS bytes", result.peak, limit, result.peak <= limit),
        Check("1.1 B: steps", steps, 3, steps >= 3),
    ]
    figures = {
        "1.1 B: seconds a step": result.seconds,
        "1.1 B: seconds of compute alone (2 and 4 layers, extrapolated)": alone,
        "1.1 B: seconds of the bytes alone": moving,
        "1.1 B: bytes read a step": read,
        "1.1 B: bytes written a step": written,
        "1.1 B: peak RSS bytes": result.peak,
        "1.1 B: peak RSS over 3 GiB": result.peak / (3 * GIB),
    }
    return figures | speeds, checks


def beside(home: Path, rounds: int) -> tuple[dict[str, float], list[Check]]:
    """Ours and DeepSpeed in turn."""
    found: dict[str, list[Result]] = {"headrace": [], "DeepSpeed ZeRO-3 + NVMe": []}
    for number in range(rounds):
        place = home / f"round{number}"
        print(f"round {number + 1}/{rounds}: headrace, 125 M parameters", flush=True)
        found["headrace"].append(ours(SMALL, place)[0])
        print(f"round {number + 1}/{rounds}: DeepSpeed, 125 M parameters", flush=True)
        if peer := deepspeed(SMALL, place / "peer"):
            found["DeepSpeed ZeRO-3 + NVMe"].append(peer)
        shutil.rmtree(place)
    figures: dict[str, float] = {}
    for name, results in found.items():
        if results:
            speed = SMALL.tokens / median(result.seconds for result in results)
            peak, written = (median(getattr(r, key) for r in results) for key in ("peak", "written"))
            figures |= {f"{name}: tokens/s": speed, f"{name}: peak RSS bytes": peak}
            figures[f"{name}: bytes written a step"] = written
            print(
                f"  {name:24} {speed:8.1f} tokens/s  {peak / 2**20:8.0f} MiB peak RSS  "
                f"{written / 1e9:6.2f} GB written a step  "
                f"loss {results[-1].losses[0]:.3f} -> {results[-1].losses[-1]:.3f}"
            )
    if not all(found.values()):
        return figures, [Check("peers that ran", 0, 1, holds=False)]
    ours_, theirs = found
    faster = figures[f"{ours_}: tokens/s"] / figures[f"{theirs}: tokens/s"]
    leaner = figures[f"{theirs}: peak RSS bytes"] / figures[f"{ours_}: peak RSS bytes"]
    less = figures[f"{theirs}: bytes written a step"] / figures[f"{ours_}: bytes written a step"]
    figures["DeepSpeed's bytes written over ours"] = less
    return figures, [
        Check("tokens/s over DeepSpeed's", faster, 1.5, faster >= 1.5),
        Check("DeepSpeed's peak RSS over ours", leaner, 1.5, leaner >= 1.5),
    ]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--rounds", type=int, default=2, help="of the small model beside DeepSpeed")
    arguments.add_argument("--only", choices=["large", "beside"], help="one half alone")
    arguments.add_argument(
        "--home", type=Path, help="a directory on the disk to measure; temporary by default"
    )
    given = arguments.parse_args()
    figures: dict[str, float] = {}
    checks: list[Check] = []
    with tempfile.TemporaryDirectory(dir=given.home) as directory:
        home = Path(directory)
        if given.only != "beside":
            figures, checks = large(home)
        if given.only != "large":
            more, further = beside(home, given.rounds)
            figures, checks = figures | more, checks + further
    finish(figures, checks, given.json)


if __name__ == "__main__":
    main()
