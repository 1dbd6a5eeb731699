"""The documents of the model call that is running, for architectures that do not hand them to attention."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

import torch

from headrace.errors import UserError

Documents = Sequence[tuple[int, int, int]]
"""(row, start, stop) of every document, in order; positions in none are padding."""

Contexts = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]
"""Called at the forward of a layer: the contexts to run its forward and its recomputation in."""


@dataclass(frozen=True)
class _Given:
    """The documents of a model call.

    Attributes:
        model: the one that was called.
        documents: as the model was given them.
        recalled: whether layers that are recomputed in backward, outside the call, will find them again.
    """

    model: torch.nn.Module
    documents: Documents
    recalled: bool


_given: ContextVar[_Given | None] = ContextVar("documents of the model call that is running", default=None)


def watch_documents(model: torch.nn.Module) -> None:
    """Note the ``documents`` of every call of ``model`` while it runs."""
    model.register_forward_pre_hook(_note, with_kwargs=True)
    model.register_forward_hook(_forget, always_call=True)


def noted_documents(module: torch.nn.Module) -> Documents | None:
    """The documents of the call that is running; None where it has none.

    Raises UserError, naming ``module``, where its recomputation in backward would not find them again.
    """
    given = _given.get()
    if given is None:
        return None
    if not given.recalled and any(start > 0 for _, start, _ in given.documents):
        raise UserError(
            f"{type(module).__name__} is not handed the documents of a packed row by its model, and would "
            "not find them when it is recomputed; use headrace.models.recompute.recompute_layers, or set "
            "data.packing=false"
        )
    return given.documents


def both(outer: Contexts, inner: Contexts | None) -> Contexts:
    """Contexts of a layer that are entered one inside the other, for its forward as for its recomputation."""
    if inner is None:
        return outer

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        pairs = zip(outer(), inner(), strict=True)
        forward, again = (_nested(*pair) for pair in pairs)
        return forward, again

    return contexts


class Recalling:
    """For ``context_fn`` of ``torch.utils.checkpoint``: recompute a layer on the documents of its forward.

    Args:
        contexts: further ones, entered inside.
    """

    def __init__(self, contexts: Contexts | None = None) -> None:
        self._contexts = contexts

    def __call__(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """The contexts of one layer's forward and of its recomputation."""
        forward, again = self._contexts() if self._contexts else (nullcontext(), nullcontext())
        return forward, _Recalled(again, _given.get())


@contextmanager
def _nested(outer: AbstractContextManager, inner: AbstractContextManager) -> Iterator[None]:
    with outer, inner:
        yield


class _Recalled(AbstractContextManager):
    def __init__(self, inner: AbstractContextManager, given: _Given | None) -> None:
        self._inner = inner
        self._then = given
        self._token: Token | None = None

    def __enter__(self) -> None:
        self._token = _given.set(self._then)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        assert self._token is not None
        _given.reset(self._token)
        return self._inner.__exit__(*error)


def _note(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    documents = kwargs.get("documents")
    if documents is not None and _given.get() is None:  # a model inside a model tells nothing new
        _given.set(_Given(module, documents, all(map(_recalls, module.modules()))))


def _forget(module: torch.nn.Module, args: tuple, output: object) -> None:
    given = _given.get()
    if given is not None and given.model is module:
        _given.set(None)


def _recalls(module: torch.nn.Module) -> bool:
    """Whether a module is not recomputed, or in contexts that bring the documents back."""
    if not (module.training and getattr(module, "gradient_checkpointing", False)):
        return True
    checkpoint = getattr(module, "_gradient_checkpointing_func", None)
    return checkpoint is None or isinstance(getattr(checkpoint, "keywords", {}).get("context_fn"), Recalling)
