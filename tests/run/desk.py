"""Where mistakes are made: runs, models and data with something wrong in them, as commands that try them."""

import json
import shutil
import subprocess
import sys

import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig

from headrace.run.train import train as train_run

CHAT = {"messages": [{"role": "user", "content": "mill"}, {"role": "assistant", "content": "wheel"}]}


class Desk:
    """Where mistakes are made: a directory with the tiny model and its chats at hand."""

    def __init__(self, home, tiny):
        self.home, self.tiny = home, tiny
        self.count, self.others, self._done = 0, [], None

    def new(self):
        """A directory of its own."""
        self.count += 1
        path = self.home / str(self.count)
        path.mkdir()
        return path

    def file(self, name, content):
        path = self.new() / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def run(self, **values):
        """A run file with nothing wrong but these values (``section__key``)."""
        home = self.new()
        run = {
            "model": {"path": str(self.tiny / "model" / "config.json"), "dtype": "bf16"},
            "data": {"train": str(self.tiny / "chats.jsonl"), "context": 64},
            "train": {"steps": 2, "batch": 4, "micro_batch": 2},
            "memory": {"host": "4GiB"},
            "threads": {"compute": 1, "update": 2},
            "out": str(home / "out"),
        }
        for key, value in values.items():
            section, _, inner = key.partition("__")
            if inner:
                run.setdefault(section, {})[inner] = value
            else:
                run[section] = value
        path = home / "run.yaml"
        path.write_text(yaml.safe_dump(run), encoding="utf-8")
        return path

    def model(self):
        """A whole model to spoil."""
        directory = self.new() / "model"
        shutil.copytree(self.tiny / "model", directory)
        torch.manual_seed(0)
        drawn = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(directory))
        drawn.save_pretrained(directory)
        return directory

    def done(self):
        """The run file of a run that is finished, with chats of its own beside it."""
        if self._done is None:
            chats = self.file("chats.jsonl", (self.tiny / "chats.jsonl").read_text())
            self._done = self.run(data__train=str(chats), optim__lr=1e-3)
            train_run(self._done)
        return self._done

    def out(self):
        """The directory of that run."""
        return self.done().parent / "out"

    def busy(self):
        """The run file of a run that is going on in another process."""
        path = self.run(train__steps=100_000)
        command = [sys.executable, "-m", "headrace", "train", path]
        self.others.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert self.others[-1].stdout.readline().startswith(b"fresh run")
        return path

    def clear(self):
        """End what is going on."""
        while self.others:
            other = self.others.pop()
            other.kill()
            other.communicate()


def train(**values):
    return lambda desk: ["train", desk.run(**values)]


def plan(content, name="run.yaml"):
    return lambda desk: ["plan", desk.file(name, content)]


def override(*texts):
    return lambda desk: ["train", desk.run(), *texts]


def chats(*records, **values):
    text = "".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records)
    return lambda desk: ["train", desk.run(data__train=str(desk.file("chats.jsonl", text)), **values)]


def files(*names):
    def make(desk):
        home = desk.new()
        for name in names:
            (home / name).write_text("water, mill\n")
        given = [str(home / name) for name in names]
        return ["train", desk.run(data__train=given if len(given) > 1 else given[0])]

    return make


def model(spoil, **values):
    """Training from a model that was spoilt."""

    def make(desk):
        directory = desk.model()
        spoil(directory)
        return ["train", desk.run(model__path=str(directory), **values)]

    return make


def config(**values):
    def change(directory):
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return model(change)


def torn(directory):
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:40_000])


def pointer(directory):
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123512\n"
    (directory / "model.safetensors").write_text(text)


def without(*names):
    def remove(directory):
        for name in names:
            (directory / name).unlink()

    return remove


def pickled(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def foreign_out(desk):
    path = desk.run()
    (path.parent / "out").mkdir()
    (path.parent / "out" / "metrics.jsonl").write_text("of another program")
    return ["train", path]


def other_chats(desk):
    path = desk.done()
    data = yaml.safe_load(path.read_text())["data"]["train"]
    with open(data, "a") as file:
        file.write(json.dumps(CHAT) + "\n")
    return ["train", path, "train.steps=4"]


def export_without_checkpoint(desk):
    copy = desk.new() / "run"
    shutil.copytree(desk.out(), copy, ignore=shutil.ignore_patterns("checkpoint-*"))
    return ["export", copy, desk.new() / "model"]
