"""Adapters in a model: drawn as PEFT draws them, saved as PEFT saves them, merged as PEFT merges them."""

import subprocess
import sys

import pytest
import tiny_models
import torch
from tiny_models import tiny_tokenizer
from transformers import AutoModelForCausalLM

from headrace.data.batch import MicroBatch
from headrace.errors import UserError
from headrace.memory.tensorfile import TensorFile
from headrace.models.adapter import adapter_entries, load_adapter, save_adapter
from headrace.models.attention import attach
from headrace.models.config import LoraConfig
from headrace.models.lora import add_adapters, fingerprint, linear_layers, merge
from headrace.models.recompute import recompute_layers
from headrace.models.save import model_entries, save_model
from headrace.models.source import find_source
from headrace.training.forward import check_head, forward_loss

peft = pytest.importorskip("peft")

FAMILIES = ["llama", "qwen3", "gemma2", "phi3", "gpt2", "mixtral"]
LORA = LoraConfig(rank=4, alpha=8)
IDS = torch.randint(0, 40, (2, 24), generator=torch.Generator().manual_seed(3))


def build(family, dtype=torch.float32, **overrides):
    return tiny_models.build(family, dtype, **{"pad_token_id": 0, **overrides})


def adapted(family="llama", dtype=torch.float32, lora=LORA, seed=0, trained=False):
    """A model with adapters, on request with a B that is not zero."""
    model = build(family, dtype)
    attach(model)
    add_adapters(model, lora, "base", seed)
    if trained:
        torch.manual_seed(9)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape) * 0.1)
    return model


def adapters(model):
    return {name: p.detach() for name, p in model.named_parameters() if ".default." in name}


def logits(model):
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits.float()


def gradients(model):
    documents = [(row, start, stop) for row in range(2) for start, stop in ((0, 10), (10, 24))]
    positions = torch.cat([torch.arange(10), torch.arange(14)]).repeat(2, 1)
    batch = MicroBatch(IDS, IDS.roll(-1, 1), positions, tuple(documents), IDS.numel())
    forward_loss(model.train(), batch, 1 / IDS.numel(), chunk=16).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_new_adapters_change_nothing_and_alone_are_trained(family, dtype):
    model = adapted(family, dtype)
    assert torch.equal(logits(model), logits(build(family, dtype)))
    check_head(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == len(adapters(model)) > 0
    assert {p.dtype for p in model.parameters()} == {dtype}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "layers.1.mlp.up_proj"]])
def test_adapters_are_drawn_as_peft_draws_them(targets, dtype):
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    base = build("llama", dtype)
    torch.manual_seed(7)
    theirs = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    ours, other = (
        adapters(adapted("llama", dtype, LoraConfig(rank=4, alpha=8, targets=targets), seed))
        for seed in (7, 8)
    )
    assert_same(ours, adapters(theirs.base_model.model))
    assert all(torch.equal(a, other[name]) == ("lora_B" in name) for name, a in ours.items())


def test_drawing_leaves_the_random_state_alone():
    model = build("llama")
    state = torch.get_rng_state()
    add_adapters(model, LORA, "base", seed=5)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_layers_give_the_same_gradients_though_embeddings_are_frozen(family):
    kept = gradients(adapted(family, trained=True))
    model = adapted(family, trained=True).train()
    recompute_layers(model)
    again = gradients(model)
    assert kept.keys() == adapters(model).keys()
    assert all(gradient.abs().sum() > 0 for gradient in kept.values())
    assert_same(again, kept)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_adapter_is_what_peft_loads(family, tmp_path):
    base, model = build(family), adapted(family, trained=True)
    count = save_adapter(tmp_path / "adapter", model, tiny_tokenizer())
    assert count == len(adapters(model))
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert_same(adapters(theirs.base_model.model), adapters(model))
    assert torch.equal(logits(theirs.base_model.model), logits(model))
    config = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
    assert (config.r, config.lora_alpha, config.base_model_name_or_path) == (4, 8, "base")


def test_equal_adapters_are_equal_files(tmp_path):
    for name in ("one", "two"):
        save_adapter(tmp_path / name, adapted(), None)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    with pytest.raises(UserError, match="one exists already"):
        save_adapter(tmp_path / "one", adapted())


def test_what_differs_on_reading_back_is_an_error(tmp_path, monkeypatch):
    """A file system that gives back other bytes than it was given: the target stays away."""
    from headrace.models import adapter

    def torn(path, entries, metadata=None):
        record = write(path, entries, metadata)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return record

    write = adapter.write_tensors
    monkeypatch.setattr(adapter, "write_tensors", torn)
    with pytest.raises(OSError, match="was read back other than it was written"):
        save_adapter(tmp_path / "adapter", adapted())
    assert not list(tmp_path.iterdir())


def save_base(directory, family="llama"):
    model = build(family)
    save_model(directory, model_entries(model), model.config, tiny_tokenizer())
    return directory


def test_an_adapter_is_loaded_with_its_base(tmp_path):
    save_base(tmp_path / "base")
    model = build("llama")
    add_adapters(model, LORA, str(tmp_path / "base"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.01) if "lora_B" in name else None
    save_adapter(tmp_path / "adapter", model)
    loaded = load_adapter(tmp_path / "adapter", torch.float32)
    assert torch.equal(logits(loaded.model), logits(model))
    assert loaded.tokenizer.convert_tokens_to_ids("a") == 1


def test_an_adapter_without_its_base_is_a_sentence(tmp_path):
    save_adapter(tmp_path / "adapter", adapted())
    with pytest.raises(UserError, match=r"adapter is an adapter, and its base cannot be loaded: .*path=base"):
        load_adapter(tmp_path / "adapter")
    save_base(tmp_path / "other", "qwen3")
    config = (tmp_path / "adapter" / "adapter_config.json").read_text("utf-8")
    text = config.replace(
        '"base_model_name_or_path": "base"', f'"base_model_name_or_path": "{tmp_path}/small"'
    )
    (tmp_path / "adapter" / "adapter_config.json").write_text(text, "utf-8")
    model = build("llama", hidden_size=16)
    save_model(tmp_path / "small", model_entries(model), model.config)
    with pytest.raises(UserError, match=r"adapter does not fit its base .*small"):
        load_adapter(tmp_path / "adapter")


def test_an_adapter_is_no_model_to_train(tmp_path):
    save_adapter(tmp_path / "adapter", adapted())
    with pytest.raises(
        UserError, match=r"adapter holds an adapter, not a whole model: give model\.path=base"
    ):
        find_source(tmp_path / "adapter")


def merged(family, dtype):
    """The base in ``dtype`` with the fp32 adapters of the model, and these by name."""
    values = adapters(adapted(family, trained=True))
    model = build(family, dtype)
    merge(model, LORA, lambda name, shape: values[name].view(shape))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merge_has_the_bits_of_pefts(family, tmp_path):
    with_adapters, found = adapted(family, trained=True), merged(family, torch.float32)
    save_adapter(tmp_path / "adapter", with_adapters)
    expected = peft.PeftModel.from_pretrained(build(family), tmp_path / "adapter").merge_and_unload()
    assert_same(found.state_dict(), expected.state_dict())
    # Two orders of sums of some 50 products: within 64 fp32 roundings of the largest logit.
    ours, apart = logits(found), logits(with_adapters)
    assert (ours - apart).abs().max() <= 64 * torch.finfo(torch.float32).eps * apart.abs().max()
    assert (ours - logits(build(family))).abs().max() > 0.01 * apart.abs().max()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_merge_in_bf16_is_rounded_once(family):
    narrow = merged(family, torch.bfloat16)
    wide = build(family, torch.bfloat16).float()  # the rounded base
    values = adapters(adapted(family, trained=True))
    merge(wide, LORA, lambda name, shape: values[name].view(shape))
    assert_same(narrow.state_dict(), {n: t.bfloat16() for n, t in wide.state_dict().items()})


def test_a_fingerprint_is_of_the_base_alone():
    plain = fingerprint(build("llama"))
    assert plain == fingerprint(adapted()) == fingerprint(adapted(trained=True))
    assert fingerprint(build("llama", torch.bfloat16)) == plain
    changed = build("llama")
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[3, 5] += 1
    assert fingerprint(changed) != plain


def test_the_linear_layers_are_those_that_peft_means_by_all_linear():
    for family in ("llama", "gpt2", "phi3"):
        model = build(family)
        config = peft.LoraConfig(
            target_modules="all-linear", task_type="CAUSAL_LM", fan_in_fan_out=family == "gpt2"
        )
        peft.inject_adapter_in_model(config, model)
        found = {name.partition(".lora_")[0] for name in adapters(model)}
        assert set(linear_layers(build(family))) == found


def test_entries_have_pefts_names(tmp_path):
    model = adapted(lora=LoraConfig(rank=2, alpha=1.5, targets=["q_proj"]))
    expected = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    names = {f"base_model.model.{name}" for name in expected}
    assert {entry.name for entry in adapter_entries(model)} == names
    save_adapter(tmp_path / "adapter", model)
    with TensorFile(tmp_path / "adapter" / "adapter_model.safetensors") as file:
        assert file.entries.keys() == names
    assert peft.PeftConfig.from_pretrained(tmp_path / "adapter").lora_alpha == 1.5


def test_without_peft_the_sentence_says_what_to_install():
    code = (
        "import sys; sys.modules['peft'] = None\n"
        "from headrace.errors import UserError\n"
        "from headrace.models.lora import require_peft\n"
        "try:\n    require_peft()\nexcept UserError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "model.lora needs the peft package: pip install headrace[lora]\n", done.stderr


def test_adapted_models_load_in_transformers(tmp_path):
    """AutoModelForCausalLM takes an adapter's directory and finds the base by itself."""
    save_base(tmp_path / "base")
    model = build("llama")
    add_adapters(model, LORA, str(tmp_path / "base"))
    save_adapter(tmp_path / "adapter", model)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    assert torch.equal(logits(theirs), logits(model))
