"""What people get wrong in run files, models, data and commands, and what must stand in the answer."""

import torch
from data_mistakes import DATA
from desk import (
    config,
    export_without_checkpoint,
    foreign_out,
    model,
    other_chats,
    override,
    pickled,
    plan,
    pointer,
    torn,
    train,
    without,
)
from mistake import Mistake

RUN_FILES = [
    Mistake(
        "a misspelt key", "data.contxt", "run.yaml", "did you mean data.context?", train(data__contxt=1), True
    ),
    Mistake("a key of axolotl", "sequence_len", "run.yaml", "here: data.context", train(sequence_len=2048)),
    Mistake(
        "a key of Trainer",
        "train.gradient_accumulation_steps",
        "run.yaml",
        "it follows from train.batch and train.micro_batch",
        train(train__gradient_accumulation_steps=4),
    ),
    Mistake(
        "a section of DeepSpeed",
        "zero_optimization",
        "run.yaml",
        "here: memory.states and memory.weights",
        train(zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}}),
    ),
    Mistake("no model", "model is missing", "run.yaml", "add the section", plan("data: {train: d.jsonl}")),
    Mistake(
        "a path where a section is",
        "model=models/m",
        "run.yaml",
        "write its keys below it (path, ",
        plan("model: models/m\ndata: {train: d.jsonl}"),
    ),
    Mistake(
        "a word for a number", "=sixteen", "train.batch", "a whole number", train(train__batch="sixteen")
    ),
    Mistake("a slip in 1e-5", "=1e--5", "optim.lr", "a number", train(optim__lr="1e--5")),
    Mistake("a decimal comma", "=1,5e-5", "optim.lr", "a number", train(optim__lr="1,5e-5")),
    Mistake("a negative rate", "=-1e-05", "optim.lr", "above 0", train(optim__lr=-1e-5)),
    Mistake("true for a number", "=true", "train.steps", "a whole number", train(train__steps=True)),
    Mistake(
        "a batch that does not divide",
        "train.batch=6",
        "train.micro_batch=4",
        "choose for example train.micro_batch=3",
        train(train__batch=6, train__micro_batch=4),
    ),
    Mistake("steps and epochs", "train.steps=2", "train.epochs=1", "keep one", train(train__epochs=1)),
    Mistake(
        "torch's name of a dtype", "=bfloat16", "model.dtype", "bf16 or fp32", train(model__dtype="bfloat16")
    ),
    Mistake("a share in per cent", "=20", "data.eval", "a share between 0 and 1", train(data__eval=20)),
    Mistake(
        "true for a share", "true is neither", "data.eval", "a share between 0 and 1", train(data__eval=True)
    ),
    Mistake(
        "a size in words", "64 gigs", "memory.host", "write for example 48GiB", train(memory__host="64 gigs")
    ),
    Mistake("a misspelt value", "tensorbord", "report", "tensorboard or wandb", train(report=["tensorbord"])),
    Mistake(
        "a setting without effect",
        "optim.decay=0.1",
        "run.yaml",
        "optim.schedule=wsd",
        train(optim__decay=0.1),
    ),
    Mistake(
        "a loss that texts do not have",
        "data.loss_on=assistant",
        "data.format=text",
        "it can be all",
        train(data__format="text", data__loss_on="assistant"),
    ),
    Mistake(
        "a key twice",
        "'lr' stands twice",
        "run.yaml line 4",
        "correct that line",
        plan("model: {path: m}\noptim:\n  lr: 1e-5\n  lr: 2e-5\n"),
        True,
    ),
    Mistake("a tab", "a tab", "run.yaml line 2", "YAML takes spaces", plan("model:\n\tpath: m\n")),
    Mistake(
        "an indentation that fits nothing",
        "indented unlike its neighbours",
        "run.yaml line 3",
        "correct that line",
        plan("model:\n  path: m\n dtype: bf16\n"),
    ),
    Mistake(
        "a colon in a path",
        "a colon in a value without quotes",
        "run.yaml line 2",
        "correct that line",
        plan("model:\n  path: models: mine\n"),
    ),
    Mistake(
        "a PDF", "byte 10", "run.pdf", "give a YAML file", plan(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "run.pdf")
    ),
    Mistake(
        "a file as PowerShell writes it", "UTF-16", "run.yaml", "in UTF-8", plan("model: {}".encode("utf-16"))
    ),
    Mistake(
        "a text",
        "holds no sections",
        "README.md",
        "write at least model:",
        plan("# Mine\nnotes", "README.md"),
    ),
    Mistake(
        "no such run file",
        "there is no run file",
        "rum.yaml",
        "give the path",
        lambda _: ["plan", "rum.yaml"],
    ),
    Mistake(
        "an override of nothing",
        "optim.learnrate",
        "on the command line",
        "optim knows lr, ",
        override("optim.learnrate=1e-4"),
    ),
    Mistake(
        "a foreign override", "learning_rate", "on the command line", "optim.lr", override("learning_rate=1")
    ),
    Mistake(
        "an override without =",
        "'optim.lr:1e-4'",
        "an override",
        "section.key=value",
        override("optim.lr:1e-4"),
    ),
]
MACHINES = [
    Mistake(
        "a context beyond the model's",
        "data.context=4096",
        "the 128 positions",
        "lower data.context",
        train(data__context=4096),
    ),
    Mistake("too little RAM", "64 MiB", "memory.host", "set memory.host=", train(memory__host="64MiB"), True),
    Mistake(
        "more checkpoints than the disk holds",
        "=1000000",
        "checkpoint.keep",
        "set checkpoint.keep=",
        train(checkpoint__keep=10**6),
    ),
    Mistake(
        "an unknown machine",
        "rtx4090",
        "machine",
        "choose one of card-8gb",
        lambda desk: ["plan", desk.run(), "--machine", "rtx4090"],
    ),
]
NO_CARD = Mistake(
    "memory of a card where none is",
    "=11GiB",
    "memory.device",
    "set memory.host",
    train(memory__device="11GiB"),
)
MODELS = [
    Mistake(
        "no such model", "does not exist", "model.path=nowhere", "give a model", train(model__path="nowhere")
    ),
    Mistake(
        "a directory without a model",
        "no config.json",
        "model.path=",
        "give one that has it",
        model(without("config.json")),
    ),
    Mistake(
        "a model that was never fetched",
        "no model of this name",
        "model.path=mill/no-such-wheel",
        "hf download mill/no-such-wheel fetches it",
        train(model__path="mill/no-such-wheel"),
        True,
    ),
    Mistake(
        "a model without weights",
        "no weights",
        "/model has",
        "fetch model.safetensors",
        model(without("model.safetensors")),
    ),
    Mistake("weights of torch", "pytorch_model.bin", "/model has", "convert it with", model(pickled)),
    Mistake("half a download", "40000 bytes", "model.safetensors", "copy or write it again", model(torn)),
    Mistake(
        "weights that Git did not fetch", "a pointer", "model.safetensors", "git lfs pull", model(pointer)
    ),
    Mistake(
        "a web page instead of a GGUF file",
        "GGUF",
        "model.gguf",
        "fetch it again",
        lambda desk: ["train", desk.run(model__path=str(desk.file("model.gguf", "<html>404</html>")))],
    ),
    Mistake(
        "a quantised model",
        "(gptq)",
        "config.json",
        "give the unquantised model",
        config(quantization_config={"quant_method": "gptq", "bits": 4}),
    ),
    Mistake("an unknown family", "'t5'", "config.json", "these can: ", config(model_type="t5")),
    Mistake(
        "a negative epsilon",
        "-1e-06",
        "rms_norm_eps in config.json",
        "between 0 and 1",
        config(rms_norm_eps=-1e-6),
    ),
    Mistake(
        "no tokenizer",
        "no tokenizer",
        "/model has",
        "copy tokenizer.json",
        model(without("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")),
    ),
    Mistake(
        "adapters on layers that are not there",
        "=query",
        "model.lora.targets",
        "q_proj",
        model(lambda _: None, model__lora={"targets": ["query"]}),
    ),
    Mistake(
        "an adapter beside random weights",
        "config.json is a configuration",
        "model.path=",
        "leave model.lora out",
        train(model__lora={"rank": 8}),
    ),
]
RUNS = [
    Mistake(
        "another rate in a run that goes on",
        "0.001 -> 0.0001",
        "optim.lr",
        "with another out",
        lambda desk: ["train", desk.done(), "train.steps=4", "optim.lr=1e-4"],
    ),
    Mistake(
        "other data in a run that goes on",
        "the data is not what",
        "checkpoint-2",
        "bring the files back",
        other_chats,
    ),
    Mistake(
        "a step that was not saved",
        "checkpoint.resume=7",
        "/out",
        "there are: 2",
        lambda desk: ["train", desk.done(), "checkpoint.resume=7"],
    ),
    Mistake(
        "another program's directory",
        "not written by a run",
        "/out/metrics.jsonl",
        "choose a new",
        foreign_out,
    ),
    Mistake(
        "a directory in which a run goes on",
        "by process ",
        "a run in ",
        "wait for its end",
        lambda desk: ["train", desk.busy()],
    ),
    Mistake(
        "an export before any checkpoint",
        "no checkpoint yet",
        "/run has",
        "train first",
        export_without_checkpoint,
    ),
    Mistake(
        "an export over a model",
        "exists already",
        "/out/model",
        "choose another directory",
        lambda desk: ["export", desk.out(), desk.out() / "model"],
    ),
    Mistake(
        "an export in a dtype that is none",
        "int8",
        "--dtype",
        "choose bf16 or fp32",
        lambda desk: ["export", desk.out(), desk.new() / "model", "--dtype", "int8"],
    ),
    Mistake(
        "a merge without an adapter",
        "has no adapter",
        "--merge",
        "leave --merge out",
        lambda desk: ["export", desk.out(), desk.new() / "model", "--merge"],
    ),
    Mistake(
        "a run where a model is wanted",
        "no config.json",
        "/out",
        "/out/model",
        lambda desk: ["sample", desk.out(), "water"],
    ),
    Mistake(
        "a checkpoint where a model is wanted",
        "it is a checkpoint",
        "/out/checkpoint-2",
        "/out OUT` makes a model of it",
        lambda desk: ["sample", desk.out() / "checkpoint-2", "water"],
    ),
    Mistake(
        "a model where a run is wanted",
        "plan.yaml is missing",
        "/out/model",
        "give the `out` of a run file",
        lambda desk: ["show", desk.out() / "model"],
    ),
]
MISTAKES = [*RUN_FILES, *MACHINES, *([] if torch.cuda.is_available() else [NO_CARD]), *MODELS, *DATA, *RUNS]
