"""All that a card must show, in one command of at most six minutes: `make gpu-check`.

    python -m benchmarks.gpu_check --json

The tests of tests/cuda; a run whose device peak is held against its plan; the share of the gradients' way
down that lies inside backward; tokens a second and peaks beside PyTorch by hand and Trainer.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from benchmarks.report import Check, finish
from benchmarks.train_step import CLIP, LR, Setting, in_a_process
from headrace.ledger import Ledger
from headrace.optim.offloaded import OffloadedAdamW
from headrace.schedule.action import Kind

PEERS = ("plain PyTorch", "Trainer", "headrace")
TESTS_S, RUN_S = 150, 90


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked")
        sys.exit(2)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    checks, figures = [cuda_tests()], {}
    for part in (device_peak, overlap, beside_peers):
        begin = time.monotonic()
        found, held = part()
        figures |= found
        checks += held
        print(f"{part.__name__}: {json.dumps(found)} in {time.monotonic() - begin:.0f} s", flush=True)
    finish(figures, checks, given.json)


def cuda_tests() -> Check:
    """Whether tests/cuda passes."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/cuda"]
    done = subprocess.run(command, check=False, timeout=TESTS_S)
    return Check("tests/cuda: exit code", done.returncode, 0, done.returncode == 0)


def device_peak() -> tuple[dict[str, float], list[Check]]:
    """A run of a model from scratch: peaks and links, planned and measured."""
    with tempfile.TemporaryDirectory() as home:
        run = write_run(Path(home))
        subprocess.run([sys.executable, "-m", "headrace", "train", str(run)], check=True, timeout=RUN_S)
        both = json.loads((Path(home) / "run" / "ledger.json").read_text(encoding="utf-8"))
    predicted, measured = Ledger.from_json(both["predicted"]), Ledger.from_json(both["measured"])
    off = {
        "device peak, measured over planned": measured.total("device") / predicted.total("device") - 1,
        "host peak, measured over planned": measured.total("host") / predicted.total("host") - 1,
    }
    for lane in ("d2h", "h2d"):
        apart = measured.lane_bytes(lane) / measured.steps / predicted.lane_bytes(lane) - 1
        off[f"{lane} bytes, measured over planned"] = apart
    bounds = (0.10, 0.10, 0.0, 0.0)
    held = [Check(n, abs(v), b, abs(v) <= b) for (n, v), b in zip(off.items(), bounds, strict=True)]
    return off, held


def write_run(home: Path) -> Path:
    """A Llama of 400 million parameters on lines of text, bytes as tokens."""
    alphabet = {symbol: i for i, symbol in enumerate(["<s>", *pre_tokenizers.ByteLevel.alphabet()])}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>")
    fast.save_pretrained(home / "model")
    LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=20,
        num_attention_heads=16,
        num_key_value_heads=8,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(home / "model")
    lines = "".join(f"Line {number}: the wheel turns in the water.\n" for number in range(20_000))
    (home / "lines.txt").write_text(lines, encoding="utf-8")
    run = {
        "model": {"path": str(home / "model" / "config.json"), "dtype": "bf16"},
        "data": {"train": str(home / "lines.txt"), "context": 1024},
        "train": {"steps": 6, "batch": 16, "micro_batch": 4},
        "memory": {"host": "24GiB"},
        "checkpoint": {"every": 0},
        "out": str(home / "run"),
    }
    (home / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    return home / "run.yaml"


def overlap() -> tuple[dict[str, float], list[Check]]:
    """The share of the gradients' seconds on the link that lie before the end of backward on the device."""
    setting = Setting(layers=30, rows=4, length=1024, micro_batches=1, steps=4)
    model = setting.model(torch.bfloat16)
    optimizer = OffloadedAdamW(
        model.parameters(), lr=LR, max_grad_norm=CLIP, release_gradients=True, bucket=2**22
    )
    inside = total = 0.0
    for index in range(setting.steps):
        (ids_BL,) = setting.step(index)
        loss = model(input_ids=ids_BL, labels=ids_BL).loss
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss.backward()
        torch.cuda.current_stream().synchronize()  # compute's own stream: the links go on
        end = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        if index:  # the first step pays for page faults and pinning
            for record in optimizer.lanes.trace.records():
                if record.step == index and record.action.kind is Kind.DOWN:
                    inside += max(0.0, min(record.end, end) - max(record.start, begin))
                    total += record.end - record.start
    optimizer.close()
    share = inside / total
    name = "share of the gradients' way down inside backward"
    return {name: share}, [Check(name, share, 0.5, share >= 0.5)]


def beside_peers() -> tuple[dict[str, float], list[Check]]:
    """Tokens a second and bytes on the device beside the peers, a process each."""
    found = {peer: in_a_process(peer) for peer in PEERS}
    ran = {peer: result for peer, result in found.items() if result}
    figures = {f"{peer}: tokens/s": Setting().tokens / result["seconds"] for peer, result in ran.items()}
    figures |= {f"{peer}: device bytes": result["device"] for peer, result in ran.items()}
    return figures, [Check("peers that ran", len(ran), len(PEERS), len(ran) == len(PEERS))]


if __name__ == "__main__":
    main()
