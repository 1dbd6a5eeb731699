"""DeepSpeed ZeRO-3 with parameters and optimizer on NVMe, in a process of its own: see larger_than_ram."""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

LR = 1e-4


def main(home: Path, context: int, steps: int) -> None:
    """Train on the text and the model's config beside ``home``; prints a line a step."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(one, MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
    import deepspeed as library
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    library.init_distributed(dist_backend="gloo")
    settings = leanest(home)
    config = AutoConfig.for_model(**json.loads((home.parent / "model" / "config.json").read_text()))
    torch.manual_seed(0)
    # Its zero.Init, which would build the model in parts, fails with torch 2.13 (a signature mismatch).
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=settings)
    tokenizer = AutoTokenizer.from_pretrained(home.parent / "model")
    ids = torch.tensor(tokenizer((home.parent / "text.txt").read_text())["input_ids"])
    for index in range(steps):
        row = ids[index * context :][:context][None]
        start = time.perf_counter()
        loss = engine(input_ids=row, labels=row, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        seconds = time.perf_counter() - start
        with open("/proc/self/io", encoding="ascii") as io:
            written = next(int(line.split()[1]) for line in io if line.startswith("write_bytes:"))
        print("STEP", json.dumps({"seconds": seconds, "loss": loss.item(), "written": written}), flush=True)


def leanest(home: Path) -> dict[str, Any]:
    """The leanest that runs: everything on NVMe, small sub-groups, few buffers."""
    path = str(home / "nvme")
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "torch_adam": False}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 16_000_000,
            "stage3_prefetch_bucket_size": 10_000_000,
            "stage3_max_live_parameters": 30_000_000,
            "stage3_max_reuse_distance": 30_000_000,
            "reduce_bucket_size": 10_000_000,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": path,
                "pin_memory": False,
                "buffer_count": 4,
                "pipeline_read": False,
                "pipeline_write": False,
            },
            "offload_param": {
                "device": "nvme",
                "nvme_path": path,
                "pin_memory": False,
                "buffer_count": 5,
                "buffer_size": 26_000_000,
                "max_in_cpu": 0,
            },
        },
        "aio": {"block_size": 1048576, "queue_depth": 16, "intra_op_parallelism": 2, "overlap_events": True},
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
