"""Settings of the data: where records come from, what is trained, how rows are made."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from headrace.config import Config

Format = Literal["text", "completion", "messages", "alpaca", "sharegpt"]
LossOn = Literal["assistant", "completion", "all"]

_ALLOWED_LOSS: dict[Format, tuple[LossOn, ...]] = {
    "text": ("all",),
    "completion": ("completion", "all"),
    "messages": ("assistant", "completion", "all"),
    "alpaca": ("assistant", "completion", "all"),
    "sharegpt": ("assistant", "completion", "all"),
}
"""What can be trained; the first by default."""


def _share_or_paths(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value
    if isinstance(value, bool | int | float) and not (isinstance(value, float) and 0 < value < 1):
        written = str(value).lower() if isinstance(value, bool) else repr(value)
        raise ValueError(f"{written} is neither a share between 0 and 1 nor a path; write null for none")
    return value


def resolve_loss(format: Format, loss_on: LossOn | Literal["auto"]) -> LossOn:
    """What is trained in records of ``format``.

    Raises ValueError where the two exclude each other.
    """
    if loss_on == "auto":
        return _ALLOWED_LOSS[format][0]
    if loss_on not in _ALLOWED_LOSS[format]:
        allowed = " or ".join(_ALLOWED_LOSS[format])
        raise ValueError(
            f"data.loss_on={loss_on} has no meaning with data.format={format}; it can be {allowed}"
        )
    return loss_on


class DataConfig(Config):
    """A text file is one text, divided into documents; JSON and Parquet hold one record a line or row."""

    train: str | list[str] = Field(
        description="a .txt, .jsonl, .json or .parquet file, a directory of them, org/name[@revision] of a "
        "data set in the hub's local cache, or a list of one type"
    )
    eval: Annotated[float | str | list[str] | None, BeforeValidator(_share_or_paths)] = Field(
        None, description="a share of the training documents to hold out, or files like train's, or null"
    )
    format: Format | Literal["auto"] = Field("auto", description="auto looks at the first record's fields")
    loss_on: LossOn | Literal["auto"] = Field(
        "auto",
        description="assistant: every answer of a chat; completion: the completion, or a chat's last answer; "
        "auto: assistant for chats, completion for completion, all for text",
    )
    context: int = Field(2048, ge=2, description="most tokens of a document and of a packed row")
    packing: bool = Field(True, description="several documents a row, kept apart; false: one a row")
    over_long: Literal["cut", "skip", "error"] = Field(
        "error", description="records longer than context; long text is always divided, never lost"
    )
    bad_records: Literal["error", "skip"] = Field(
        "error", description="records that are broken, lack a field or hold nothing to train on"
    )

    @model_validator(mode="after")
    def _fitting_together(self) -> "DataConfig":
        if self.format != "auto":
            resolve_loss(self.format, self.loss_on)
        if [] in (self.train, self.eval):
            raise ValueError("data.train and data.eval need at least one file")
        return self
