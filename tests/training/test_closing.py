"""The table at the end of a run."""

from headrace.ledger import Ledger
from headrace.schedule.action import parse
from headrace.training.closing import Outcome, closing, comparison_table

GIB = 2**30


def ledger(buffers: float, steps: int = 412, seconds: float = 0.0) -> Ledger:
    result = Ledger(steps=steps, seconds=seconds)
    for tier, purpose, size in (
        ("device", "weights", 15.3),
        ("host", "states", 30.5),
        ("host", "buffers", buffers),
    ):
        result.hold(tier, purpose, int(size * GIB))
    result.book(parse("0DOWN.b3"), 1.0, steps * 512)
    result.book(parse("0UP.b3"), 1.0, steps * 2**20)
    return result


def test_closing() -> None:
    predicted, measured = ledger(2.5), ledger(2.9, seconds=412 * 47.1)
    measured.stall("cpu", 100.0)
    measured.stall("d2h", 3.0)
    predicted.process_peak, measured.process_peak = 35 * GIB, int(34.1 * GIB)
    outcome = Outcome(412, 19443, 2.104, 1.307, 1.391, 1)
    assert closing(outcome, predicted, measured) == [
        "Done: 412 steps, 5 h 24 min, loss 2.104 → 1.307, eval 1.391, 1 step skipped",
        "              predicted   measured",
        "device peak    15.3 GiB       15.3     0.0 %  ok",
        "host peak      33.0 GiB       33.4    +1.2 %  ok",
        "  buffers       2.5 GiB        2.9   +16.0 %  ! above the prediction",
        "process peak   35.0 GiB       34.1    -2.6 %  ok",
        "down a step   512.0 B        512.0     0.0 %  ok",
        "up a step       1.0 MiB        1.0     0.0 %  ok",
        "step              – s         47.1",
        "stall             – %          0.5            243 ms a step on cpu",
    ]


def test_predicted_time_is_compared() -> None:
    lines = comparison_table(ledger(2.5, seconds=412 * 40.0), ledger(2.5, seconds=412 * 47.0))
    assert lines[-2].split() == ["step", "40.0", "s", "47.0", "+17.5", "%", "!", "above", "the", "prediction"]
    assert lines[-1].split() == ["stall", "0.0", "%", "0.0"]


def test_what_was_not_predicted_or_not_used_is_named() -> None:
    predicted, measured = ledger(2.5), ledger(0.0)
    measured.hold("disk", "states", GIB)
    lines = {line.split()[0]: line for line in comparison_table(predicted, measured)[1:]}
    assert lines["disk"].endswith("new  ! not predicted")
    assert lines["buffers"].endswith("-100.0 %  ! below the prediction")


def test_outcome_without_losses() -> None:
    empty = Ledger()
    assert closing(Outcome(1, 3.0, None, None, None, 0), empty, empty)[0] == "Done: 1 step, 3.0 s"


def test_steps_that_changed_nothing_at_the_end_are_named():
    empty = Ledger()
    lines = closing(Outcome(4, 3.0, 8.4, 9.1, None, 3, 3), empty, empty)
    assert lines[0].endswith("3 steps skipped")
    assert lines[1].startswith("! the last 3 steps changed nothing, for a gradient was not finite: ")
    assert "the model is that of step 1" in lines[1]
