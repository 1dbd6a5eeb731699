"""The picture of a run: what it shows, and that nothing in it lies on anything else."""

import math
from itertools import combinations

import pytest

pytest.importorskip("matplotlib")

from headrace.errors import UserError
from headrace.lanes.trace import Record
from headrace.ledger import Ledger
from headrace.run.directory import RunDirectory
from headrace.run.picture import Bar, draw, last_steps, memory_bars, picture, shortened, smoothed
from headrace.run.show import Findings
from headrace.schedule.action import parse

GIB = 2**30
TREE = {"model": {"path": "models/some-model", "dtype": "bf16"}, "update": {"policy": "sync"}}
STEP = [
    "0F0",
    "0B0",
    "0F1",
    "0B1",
    "0DOWN1.b0",
    "0NORM.b0",
    "0CLIP",
    "0U.b0",
    "0UP.b0",
    "0READ.b0@p0",
    "0WRITE.b0@p0",
]


def ledger(**tiers):
    return Ledger(peaks=tiers, tier_peaks={tier: 3 * sum(held.values()) // 4 for tier, held in tiers.items()})


def card(factor=1):
    device = {"weights": 15 * GIB, "activations": 3 * factor * GIB, "other": GIB}
    return ledger(device=device, host={"states": 91 * GIB, "gradients": 30 * factor * GIB})


def metrics(steps, **more):
    held = {"held": {"device": 20 * GIB, "host": 100 * GIB}}
    return [
        {"step": s, "loss": 2 + 1 / s, "seconds": 2.0, "stall": 0.1, **held, **more}
        for s in range(1, steps + 1)
    ]


def trace(steps=4):
    return [
        Record(number, parse(text), number + place / 12, number + (place + 1) / 12, 0)
        for number in range(steps)
        for place, text in enumerate(STEP)
    ]


def findings(tmp_path, *, steps=100, measured=True, traced=True):
    records = metrics(steps)
    if steps > 10:
        records[5] |= {"loss": None, "offender": "layers.0.mlp"}
        for record in records[9::10]:
            record["eval_loss"] = record["loss"]
    ledgers = card(), card(2) if measured else None
    return Findings(RunDirectory(tmp_path / "run"), TREE, records, *ledgers, trace() if traced else [])


def boxes(figure):
    """Every text and legend as drawn, ticks' numbers apart, with what it says."""
    renderer = figure.canvas.get_renderer()
    figure.draw(renderer)
    artists = [figure._suptitle]
    for axes in figure.axes:
        legend = axes.get_legend()
        artists += [axes._left_title, axes.xaxis.label, *axes.texts, *([legend] if legend else [])]
    found = ((artist, artist.get_window_extent(renderer)) for artist in artists)
    return [(str(artist), box) for artist, box in found if box.width > 1]


@pytest.mark.parametrize(
    "shown",
    [
        {},
        {"steps": 1},
        {"steps": 0, "measured": False, "traced": False},
        {"steps": 9, "measured": False},
        {"steps": 3000},
    ],
)
def test_nothing_lies_on_anything_else_or_outside(tmp_path, shown):
    figure = picture(findings(tmp_path, **shown))
    found = boxes(figure)
    assert len(found) >= 5
    for name, box in found:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, name
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, name
    assert not [(a, b) for (a, one), (b, other) in combinations(found, 2) if one.overlaps(other)]


def test_losses_of_all_sessions_are_shown_with_gaps_where_there_are_none(tmp_path):
    axes = picture(findings(tmp_path)).axes[0]
    train, smooth, evaluated, skipped = axes.get_lines()
    assert list(train.get_xdata()) == list(range(1, 101))
    assert math.isnan(train.get_ydata()[5]) and train.get_ydata()[7] == 2 + 1 / 8
    assert not any(math.isnan(loss) for loss in smooth.get_ydata())
    assert list(evaluated.get_xdata()) == list(range(10, 101, 10))
    assert list(skipped.get_xdata()) == [6, 6]


def test_memory_is_shown_purpose_by_purpose_then_the_whole(tmp_path):
    bars = memory_bars(findings(tmp_path))
    assert bars[:4] == [
        Bar("device: weights", 15 * GIB, 15 * GIB),
        Bar("device: activations", 3 * GIB, 6 * GIB),
        Bar("device: CUDA", GIB, GIB),
        Bar("device peak", 3 * 19 * GIB // 4, 3 * 22 * GIB // 4),
    ]
    assert [bar.label for bar in bars[4:]] == ["host: gradients", "host: master + moments", "host peak"]


def test_while_a_run_goes_on_only_its_peaks_are_known(tmp_path):
    bars = memory_bars(findings(tmp_path, measured=False))
    assert {bar.label: bar.measured for bar in bars if bar.measured} == {
        "device peak": 20 * GIB,
        "host peak": 100 * GIB,
    }


def test_lanes_show_the_last_steps_in_the_order_of_a_step(tmp_path):
    assert {record.step for record in last_steps(trace(5))} == {3, 4}
    axes = picture(findings(tmp_path)).axes[2]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["compute", "d2h (down)", "cpu (update)", "h2d (up)", "read:p0", "write:p0"]
    assert axes.get_xlabel() == "ms since the start of step 3"
    assert axes._left_title.get_text() == "Lanes: 2.0 s a step, compute waits 5.0 % of it"


def test_a_constant_is_smooth_and_early_steps_are_not_pulled_to_zero():
    assert smoothed([2.5] * 100) == pytest.approx([2.5] * 100)
    assert smoothed([math.nan, 1.0, math.nan])[1:] == [1.0, 1.0]


def test_long_titles_lose_their_middle():
    assert shortened("x" * 110) == "x" * 110
    short = shortened("a" * 100 + "b" * 100)
    assert len(short) <= 112 and short.startswith("aaa") and short.endswith("bbb") and " … " in short


@pytest.mark.parametrize("name", ["out.png", "new/directory/out.svg", "out.PDF"])
def test_it_is_written_in_the_format_of_its_suffix(tmp_path, name):
    draw(findings(tmp_path), tmp_path / name)
    head = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[name[-3:].lower()]
    assert (tmp_path / name).read_bytes().startswith(head)


def test_what_cannot_be_drawn_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    for name, sentence in {
        "out": r"--picture .*out has no suffix of a picture: give one of .*png",
        "out.txt": "has no suffix of a picture",
        "file/out.png": r"--picture .*file/out\.png cannot be written \(.*\): give another path",
    }.items():
        with pytest.raises(UserError, match=sentence):
            draw(findings(tmp_path), tmp_path / name)


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install headrace\[plots\]"):
        draw(findings(tmp_path), tmp_path / "out.png")
