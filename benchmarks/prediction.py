"""Is the plan true? Predicted against measured bytes of five real runs, each in a process of its own.

    make model
    python -m benchmarks.prediction --json

Pool and links must be equal, activations within 5 %, the peak RSS within 10 %, and a run whose budget is
one MiB below its prediction must be refused.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from benchmarks.report import Check, finish

SMOLLM2 = "runs/smollm2-135m.gguf"
CHATS = "examples/chats.jsonl"
MISTRAL = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 320,
    "intermediate_size": 896,
    "num_hidden_layers": 8,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
RUNS = {
    "SmolLM2-135M bf16 recompute, 4 x 1 x 256": (SMOLLM2, "bf16", "recompute", 4, 1, 256, True),
    "SmolLM2-135M fp32 keep, 1 x 2 x 192": (SMOLLM2, "fp32", "keep", 2, 2, 192, True),
    "Mistral 42M bf16 keep, 2 x 4 x 512": (MISTRAL, "bf16", "keep", 8, 4, 512, True),
    "Qwen3 25M fp32 recompute, 1 x 8 x 256": (QWEN3, "fp32", "recompute", 8, 8, 256, True),
    "Qwen3 25M bf16 keep, a chat a row, 2 x 8 x 128": (QWEN3, "bf16", "keep", 16, 8, 128, False),
}
# Run in a process of its own: what the pool hands out before the first gradient.
POOL = """
import json, sys
from pathlib import Path
from headrace.run.build import build
from headrace.run.directory import RunDirectory
from headrace.run.plan import plan
planned, home = plan(sys.argv[1]), Path(sys.argv[2])
optimizer = build(planned, RunDirectory(home / "build")).optimizer
(home / "pool.json").write_text(json.dumps(optimizer.ledger.peaks[optimizer.host.tier]))
optimizer.close()
"""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--steps", type=int, default=3)
    given = arguments.parse_args()
    figures: dict[str, float] = {}
    checks: list[Check] = []
    print(f"{'run':48} {'':12} {'predicted MiB':>14} {'measured':>10} {'':>8}")
    for name, settings in RUNS.items():
        with tempfile.TemporaryDirectory() as home:
            run = write_run(Path(home), settings, given.steps)
            refused = is_refused(run)
            rows = measure(Path(home), run)
        for what, (predicted, measured, bound) in rows.items():
            share = measured / predicted - 1 if predicted else float(measured != 0)
            print(f"{name:48} {what:12} {predicted / 2**20:14.2f} {measured / 2**20:10.2f} {share:+8.2%}")
            figures[f"{name}: {what}"] = share
            checks.append(Check(f"{name}: {what}", abs(share), bound, abs(share) <= bound))
        checks.append(Check(f"{name}: refused below its prediction", float(refused), 1, refused))
    finish(figures, checks, given.json)


def write_run(home: Path, settings: tuple, steps: int) -> Path:
    model, dtype, activations, batch, micro_batch, context, packing = settings
    run = {
        "model": {"path": model if isinstance(model, str) else str(save_config(home, model)), "dtype": dtype},
        "data": {"train": CHATS, "context": context, "packing": packing, "over_long": "cut"},
        "train": {"steps": steps, "batch": batch, "micro_batch": micro_batch},
        "optim": {"lr": 1e-4, "warmup": 0},
        "memory": {"host": "8GiB", "activations": activations},
        "checkpoint": {"every": 2},
        "out": str(home / "run"),
    }
    path = home / "run.yaml"
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    return path


def save_config(home: Path, config: dict) -> Path:
    """This configuration in a directory with SmolLM2's tokenizer; the weights are drawn at random."""
    from headrace.models.load import load_tokenizer

    directory = home / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = load_tokenizer(SMOLLM2)
    assert tokenizer is not None
    tokenizer.save_pretrained(directory)
    return directory / "config.json"


def is_refused(run: Path) -> bool:
    from headrace.run.plan import plan

    predicted = plan(run).predicted.total("ram")
    command = [sys.executable, "-m", "headrace", "train", str(run), f"memory.host={predicted - 2**20}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode == 2 and "memory.host" in done.stderr and "Traceback" not in done.stderr


def measure(home: Path, run: Path) -> dict[str, tuple[float, float, float]]:
    """What was predicted and measured, and how far apart they may be."""
    from headrace.ledger import Ledger
    from headrace.planner.memory import pool_bytes
    from headrace.run.plan import plan

    for command in (["-c", POOL, str(run), str(home)], ["-m", "headrace", "train", str(run)]):
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    held = json.loads((home / "pool.json").read_text(encoding="utf-8"))
    both = json.loads((home / "run" / "ledger.json").read_text(encoding="utf-8"))
    predicted, measured = Ledger.from_json(both["predicted"]), Ledger.from_json(both["measured"])
    planned = plan(run)
    pooled = pool_bytes(planned.shape, planned.work, planned.machine)
    rows = {f"pool {key}": (pooled[key], held[key], 0.0) for key in ("states", "gradients", "buffers")}
    for lane in ("d2h", "h2d"):
        rows[f"{lane} a step"] = (predicted.lane_bytes(lane), measured.lane_bytes(lane) / measured.steps, 0.0)
    activations = (ledger.peaks["ram"]["activations"] for ledger in (predicted, measured))
    rows["activations"] = (*activations, 0.05)
    rows["peak RSS"] = (predicted.process_peak, measured.process_peak, 0.10)
    return rows


if __name__ == "__main__":
    main()
