"""A session of training with weights and layer inputs in any tier, to compare with one in memory."""

import time
from contextlib import ExitStack

import torch
from tiny_models import SMALL
from transformers import AutoConfig

from headrace.ledger import Ledger
from headrace.memory.disk import DiskPath
from headrace.memory.tiers import Tiers
from headrace.models.boundaries import Boundaries
from headrace.models.homes import streamed_units, weight_store
from headrace.models.load import load_model
from headrace.models.recompute import recompute_layers
from headrace.models.save import model_entries, save_model
from headrace.models.streaming import Streamed
from headrace.optim.groups import decay_groups
from headrace.optim.offloaded import OffloadedAdamW
from headrace.training.forward import output_head
from headrace.training.loss import chunked_cross_entropy
from headrace.training.row_loss import row_cross_entropy

FAMILIES = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": 5},
    "gemma2": {"model_type": "gemma2", "sliding_window": 4, "attn_logit_softcapping": 2.0},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 4},
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "olmo2": {"model_type": "olmo2"},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 128},
    "gpt-neox": {"model_type": "gpt_neox"},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
}
"""Their embeddings are cut over two buckets."""

CPU = torch.device("cpu")
BUCKET = 2**16
ROWS, LENGTH = 2, 24


def tiny_config(family, **overrides):
    """The configuration of a tiny model."""
    return AutoConfig.for_model(**{**SMALL, "vocab_size": 2300, **FAMILIES[family], **overrides})


def saved(config, directory):
    """A directory with random weights of a configuration."""
    torch.manual_seed(7)
    config.save_pretrained(directory / "config")
    model = load_model(directory / "config" / "config.json", torch.bfloat16, seed=3).model
    save_model(directory / "model", model_entries(model), model.config)
    return directory / "model"


class Session:
    """A model and its optimizer; ``where`` its weights live is "device", "host" or "disk"."""

    def __init__(
        self,
        source,
        where,
        tmp,
        *,
        activations="recompute",
        paths=1,
        micro_batches=1,
        ahead=1,
        by_rows=False,
        dtype=torch.bfloat16,
        device=CPU,
        gradients="host",
        **tiers,
    ):
        self.resources = ExitStack()
        self.ledger = Ledger()
        disk = (
            [DiskPath(tmp / f"p{i}", speed=1.0 + i) for i in range(paths)]
            if "disk" in (where, activations, gradients)
            else ()
        )
        self.tiers = Tiers(device, self.ledger, disk=disk, workers=1, **tiers)
        self.resources.callback(self.tiers.close)
        home = None if where == "device" else lambda model: weight_store(model, self.tiers, where, BUCKET)
        loaded = load_model(source, dtype, device, seed=3, home=home)
        self.model, self.store = loaded.model, loaded.store
        self.streamed = None
        if self.store is not None:
            self.resources.callback(self.store.close)
            self.streamed = Streamed(self.model, self.store, self.tiers, ahead=ahead, by_rows=by_rows)
            self.resources.callback(self.streamed.close)
        self.rows = self.streamed.head_rows if self.streamed else None
        self.model.train()
        instead = None
        if activations != "recompute":
            layers = [modules[0] for unit, modules in streamed_units(self.model).items() if unit.kind == "l"]
            numel = ROWS * LENGTH * self.model.config.hidden_size
            self.boundary_bytes = numel * dtype.itemsize
            boundaries = Boundaries(layers, numel, dtype, self.tiers, activations)
            self.resources.callback(boundaries.close)
            instead = boundaries.instead
        contexts = self.streamed.contexts if self.streamed else None
        recompute_layers(self.model, None, contexts, instead)
        self.optimizer = OffloadedAdamW(
            decay_groups(self.model, 0.1),
            lr=1e-2,
            max_grad_norm=1.0,
            release_gradients=True,
            micro_batches=micro_batches,
            bucket=BUCKET,
            tiers=self.tiers,
            states="disk" if where == "disk" else "host",
            weights=self.store,
            gradients=gradients,
        )
        self.resources.callback(self.optimizer.close)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.resources.close()

    def loss(self, ids):
        hidden = self.model.get_decoder()(input_ids=ids[:, :-1], use_cache=False)[0]
        head, rows = output_head(self.model), self.rows
        if rows is None:
            return chunked_cross_entropy(hidden, head, ids[:, 1:], scale=1 / ids.numel(), chunk=16)
        return row_cross_entropy(hidden, head, rows, ids[:, 1:], scale=1 / ids.numel(), chunk=16)

    def train(self, steps, micro_batches=1):
        generator = torch.Generator().manual_seed(5)
        losses = []
        for _ in range(steps):
            for _ in range(micro_batches):
                vocabulary = self.model.config.get_text_config().vocab_size
                ids = torch.randint(vocabulary, (ROWS, LENGTH + 1), generator=generator)
                torch.manual_seed(11)  # of dropout
                loss = self.loss(ids.to(self.tiers.lanes.device))
                loss.backward()
                losses.append(loss.item())
            self.optimizer.step()
        return losses

    def settle(self):
        """Wait until nothing is on its way down."""
        lane = self.tiers.lanes._lanes["d2h"]
        while not lane._inbox.empty():
            time.sleep(0.01)
        time.sleep(0.05)

    def weights(self):
        found = {}
        for name, parameter in self.model.named_parameters():
            pieces = self.streamed and self.streamed.pieces(name, 0, parameter.numel())
            parts = [p.clone() for p in pieces] if pieces is not None else [parameter.detach().view(-1)]
            found[name] = torch.cat(parts).view(parameter.shape).clone()
        return found

    def moved(self, *kinds):
        """Bytes of fetches and of weights written, by unit."""
        return {
            str(action): account.nbytes
            for action, account in self.ledger.actions.items()
            if action.kind in kinds and action.unit is not None and action.unit.kind in "lew"
        }


def assert_equal(a, b):
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]
