"""Keys that people bring along are answered with what they are here."""

import dataclasses
import re

import pytest
import transformers
import yaml

from headrace.errors import UserError
from headrace.run.file import all_keys, read_run_file, validate
from headrace.run.foreign import HERE, SENTENCES, answer

SMALL = {"model": {"path": "m"}, "data": {"train": "d"}}
OWN = dict(all_keys())


def words(text):
    return text.split()


AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
datasets:
  - {path: teknium/GPT4-LLM-Cleaned, type: alpaca}
val_set_size: 0.1
output_dir: ./outputs/out
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
pad_to_sequence_len: true
wandb_project:
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 2e-5
train_on_inputs: false
group_by_length: false
bf16: auto
tf32: false
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
early_stopping_patience:
resume_from_checkpoint:
logging_steps: 1
flash_attention: true
warmup_steps: 10
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
fsdp:
deepspeed: configs/zero3.json
special_tokens: {pad_token: "<|end_of_text|>"}
load_in_8bit: false
adapter: lora
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [q_proj]
"""
DEEPSPEED = """
train_batch_size: 16
train_micro_batch_size_per_gpu: 2
gradient_accumulation_steps: 8
gradient_clipping: 1.0
steps_per_print: 10
wall_clock_breakdown: false
optimizer: {type: AdamW, params: {lr: 1e-5, betas: [0.9, 0.95]}}
scheduler: {type: WarmupDecayLR, params: {warmup_num_steps: 100}}
bf16: {enabled: true}
fp16: {enabled: false}
zero_optimization: {stage: 3, offload_optimizer: {device: nvme, nvme_path: /nvme}, overlap_comm: true}
activation_checkpointing: {partition_activations: true}
aio: {block_size: 1048576}
zero_allow_untested_optimizer: true
communication_data_type: fp32
flops_profiler: {enabled: false}
tensorboard: {enabled: true}
wandb: {enabled: true}
"""
TORCHTUNE = """
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 512}
dataset: {_component_: torchtune.datasets.alpaca_dataset, packed: false}
shuffle: true
checkpointer: {checkpoint_dir: base}
resume_from_checkpoint: false
batch_size: 2
optimizer: {_component_: torch.optim.AdamW, lr: 2e-5}
optimizer_in_bwd: true
lr_scheduler: {num_warmup_steps: 100}
loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}
max_steps_per_epoch:
gradient_accumulation_steps: 1
clip_grad_norm: 1.0
compile: false
device: cuda
enable_activation_checkpointing: true
enable_activation_offloading: false
metric_logger: {log_dir: x}
output_dir: out
log_every_n_steps: 1
log_peak_memory_stats: true
profiler: {enabled: false}
"""
TRL = words("""
chat_template_path assistant_only_loss completion_only_loss dataset_text_field dataset_num_proc eos_token
max_length truncation_mode shuffle_dataset packing_strategy padding_free pad_to_multiple_of eval_packing
loss_type activation_offloading model_init_kwargs model_name_or_path dataset_name attn_implementation
torch_dtype trust_remote_code use_peft lora_r lora_alpha lora_target_modules load_in_4bit dataset_kwargs
""")
LLAMA_FACTORY = words("""
model_name_or_path template cutoff_len dataset dataset_dir finetuning_type lora_rank lora_target stage
do_train
preprocessing_num_workers overwrite_cache plot_loss overwrite_output_dir val_size per_device_train_batch_size
quantization_bit neat_packing mask_history train_on_prompt flash_attn enable_liger_kernel pref_beta
""")


def refusal(tree):
    with pytest.raises(UserError) as caught:
        validate(tree, "run.yaml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def is_answered(name):
    """By the table, or as a key of the same name in a section."""
    return answer(name, OWN) is not None or name in {key.rpartition(".")[2] for key in OWN}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("learning_rate", "here: optim.lr (peak learning rate)"),
        ("gradient_accumulation_steps", "it follows from train.batch and train.micro_batch"),
        ("per_device_train_batch_size", "here: train.micro_batch ("),
        (
            "warmup_ratio",
            "here: optim.warmup (warm-up: a share of all steps below 1, else a number of steps)",
        ),
        ("lora_r", "here: model.lora.rank ("),
        ("fp16", "model.dtype can be bf16 or fp32"),
        ("push_to_hub", "nothing is uploaded"),
    ],
)
@pytest.mark.parametrize("section", ["", "train.", "optim."])
def test_the_answer_is_the_same_wherever_the_key_stands(key, said, section):
    tree = {**SMALL, key: 1} if not section else {**SMALL, section[:-1]: {key: 1}}
    assert refusal(tree).startswith(f"{section}{key} in run.yaml is not a key; {said}")


def test_it_is_found_in_sections_that_are_foreign_themselves():
    said = refusal({**SMALL, "trainer": {"args": [1], "hparams": {"x": 1, "learning_rate": 1e-5}}})
    assert said.startswith("trainer.hparams.learning_rate in run.yaml is not a key; here: optim.lr")


@pytest.mark.parametrize("override", ["learning_rate=1", "optim.learning_rate=1"])
def test_overrides_are_answered_too(tmp_path, override):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(SMALL), encoding="utf-8")
    with pytest.raises(UserError, match=r"learning_rate on the command line is not a key; here: optim\.lr"):
        read_run_file(path, [override])


def test_a_whole_foreign_file_is_answered_by_its_first_key_not_by_what_it_lacks():
    said = refusal(yaml.safe_load(AXOLOTL))
    assert said.startswith("base_model in run.yaml is not a key; here: model.path (")
    assert said.endswith("more to correct)")


def test_misspelt_own_keys_are_still_guessed():
    assert "did you mean optim.lr?" in refusal({**SMALL, "optim": {"lrr": 1}})
    assert "did you mean optim.weight_decay?" in refusal({**SMALL, "weight_decay": 1})


@pytest.mark.parametrize("text", [AXOLOTL, DEEPSPEED, TORCHTUNE], ids=["axolotl", "deepspeed", "torchtune"])
def test_every_key_of_a_usual_file_is_answered(text):
    assert not [name for name in yaml.safe_load(text) if not is_answered(name)]


def test_every_training_argument_of_transformers_is_answered():
    names = [field.name for field in dataclasses.fields(transformers.TrainingArguments)]
    assert not [name for name in names if not is_answered(name)]


@pytest.mark.parametrize("names", [TRL, LLAMA_FACTORY], ids=["trl", "llama-factory"])
def test_every_usual_key_is_answered(names):
    assert not [name for name in names if not is_answered(name)]


def test_no_name_has_two_answers_and_no_own_key_is_taken_for_a_foreign_one():
    named = [name for names in HERE.values() for name in names.split()]
    assert len(named) == len(set(named))
    said = [name for names in SENTENCES.values() if names not in HERE.values() for name in names.split()]
    assert len(said) == len(set(said))
    assert not set(said) & set(named)
    assert not set(named) & {key for key in OWN if "." not in key}


def test_keys_that_answers_name_exist():
    sections = {key.rpartition(".")[0] for key in OWN}
    for sentence in SENTENCES:
        for named in re.findall(r"\b(?:model|data|train|optim|memory|checkpoint|threads)\.\w+", sentence):
            assert named in OWN or named in sections, sentence
