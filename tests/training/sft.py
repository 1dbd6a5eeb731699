"""A tiny chat model in TRL's SFTTrainer; also run in processes that are killed."""

import os
import random
import signal

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from headrace import OffloadedAdamW, TrainerCallback

STEPS, CLIP, ACCUMULATION = 6, 0.5, 2
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
WORDS = ["water", "mill", "wheel", "channel", "river", "pond", "sluice", "stone", "grain", "flour", "gate"]
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


def make_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>", chat_template=TEMPLATE
    )


def make_model(dtype):
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True)).to(dtype)


def chats():
    choice = random.Random(0)
    rows = []
    for _ in range(30):
        picked = choice.sample(WORDS, choice.randint(2, 8))
        question, answer = " ".join(picked), " ".join(reversed(picked))
        rows.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    return Dataset.from_dict({"messages": rows})


def offloaded(model, release=True):
    """Clips by itself where it releases gradients; else Trainer has to."""
    own = {"release_gradients": True, "max_grad_norm": CLIP, "micro_batches": ACCUMULATION} if release else {}
    return OffloadedAdamW(model.parameters(), **SETTINGS, **own, workers=2)


def make_trainer(out, model, optimizer, callbacks, **options):
    """With an optimizer, or with the class and the settings of one that Trainer builds."""
    arguments = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_grad_norm": 0,
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "max_length": 64,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    built = isinstance(optimizer, torch.optim.Optimizer)
    given = {"optimizers": (optimizer, None)} if built else {"optimizer_cls_and_kwargs": optimizer}
    return SFTTrainer(
        model,
        SFTConfig(str(out), **arguments),
        train_dataset=chats(),
        processing_class=make_tokenizer(),
        **given,
        callbacks=callbacks,
    )


def run(out, release=True, killed_in=None, resume=False):
    """Train in bf16 with a checkpoint every two steps, and save what came out; or die in a backward."""
    torch.set_num_threads(1)
    model = make_model(torch.bfloat16)
    optimizer = offloaded(model, release)
    settings = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    settings["max_grad_norm"] = 0 if release else CLIP
    trainer = make_trainer(out, model, optimizer, [TrainerCallback(optimizer)], **settings)
    if killed_in is not None:
        last, backwards = model.model.embed_tokens.weight, []

        def kill(_):
            backwards.append(None)
            if len(backwards) > killed_in * ACCUMULATION:
                os.kill(os.getpid(), signal.SIGKILL)

        last.register_hook(kill)
    trainer.train(resume_from_checkpoint=resume)
    masters = {f"master.{name}": torch.cat(optimizer.pieces("master", name)) for name in optimizer.names}
    torch.save({**model.state_dict(), **masters}, out / "result.pt")
    optimizer.close()
