"""`headrace.train`: a run from its file to a Hugging Face directory, resumed where it was left."""

import json
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headrace.checkpoint.changes import refuse_changes
from headrace.checkpoint.config import WITHOUT_STATES
from headrace.checkpoint.directory import clean_leftovers, list_checkpoints
from headrace.checkpoint.manifest import Environment
from headrace.checkpoint.restore import Checkpoint, choose_checkpoint, leave_behind
from headrace.checkpoint.rng import capture_rng, restore_rng
from headrace.checkpoint.save import save_checkpoint
from headrace.checkpoint.space import check_space
from headrace.errors import UserError
from headrace.lanes import trace
from headrace.ledger import Ledger
from headrace.machine.cores import auto_threads
from headrace.memory.durable import replace_text
from headrace.memory.lock import DirectoryLock
from headrace.memory.process import peak_resident_bytes
from headrace.models.compiled import check_compiler
from headrace.models.source import find_source
from headrace.optim.offloaded import SkippedStep
from headrace.planner.workload import STATE
from headrace.run.base import base_of, check_base
from headrace.run.build import Job, build, device_of_plan, links_work, state_entries
from headrace.run.directory import RunDirectory
from headrace.run.file import RunFile, read_run_file, to_tree, validate
from headrace.run.interrupt import Interruption
from headrace.run.ownership import check_model, check_out, record_model
from headrace.run.plan import Plan, adopt, plan
from headrace.run.weights import refuse_weights_only, save_trained, weights_only, weights_writer
from headrace.training.closing import Outcome, closing
from headrace.training.metrics import Metrics, check_reports
from headrace.training.progress import Progress, StepReport, finished, fresh, resumed

LITTLE = 2**20
"""Bytes of a checkpoint beside its states."""


@dataclass
class _Session:
    """One process's share of a run."""

    plan: Plan
    directory: RunDirectory
    start: Checkpoint | None
    environment: Environment
    origins: dict[str, str]

    @property
    def run(self) -> RunFile:
        return self.plan.run


def train(source: str | Path | RunFile, overrides: Sequence[str] = ()) -> Path:
    """Train as a run file says, from its newest complete checkpoint if there is one.

    Args:
        source: a run file or a plan, by path or already read.
        overrides: ``section.key=value`` texts.

    Returns:
        The Hugging Face directory with the trained model.

    Raises:
        UserError: a mistake in the run file or its data, a budget too small, a run that is already going on.
        RunStopped: too many steps in a row had a gradient that is not finite, or the disk is full.
        KeyboardInterrupt: after Ctrl-C, with a checkpoint of the last whole step.
    """
    asked = source if isinstance(source, RunFile) else read_run_file(source, overrides)
    directory = RunDirectory(asked.out)
    check_out(directory, asked.model.path)
    with plain_warnings(), DirectoryLock(directory.path):
        clean_leftovers(directory.path)
        try:
            return _run(_open(asked, directory))
        finally:
            with suppress(OSError):  # it holds something
                directory.data.rmdir()


def _run(session: _Session) -> Path:
    if not _is_finished(session):
        return _work(session)
    assert session.start is not None
    print(finished(session.start.step, session.directory.model))
    return session.directory.model


def _open(asked: RunFile, directory: RunDirectory) -> _Session:
    """Decide where the run starts and which plan it executes."""
    resumable = asked.checkpoint.resume != "never" and directory.plan.exists()
    saved = directory.read_plan() if resumable else {}
    saved.pop("predicted", None)
    tree = to_tree(asked)
    tree.pop("predicted", None)
    going_on = plan(validate(adopt(saved, tree), "the run file"))
    environment = _environment(going_on.run)
    start = choose_checkpoint(directory.path, asked.checkpoint.resume, environment)
    if start is None:
        planned = plan(asked)
        return _Session(planned, directory, None, _environment(planned.run), _origins(asked, starts=True))
    if not saved:
        raise UserError(
            f"{directory.path} has checkpoints, but its plan.yaml is missing: bring a copy back, or start "
            "afresh with checkpoint.resume=never"
        )
    for change in refuse_changes(saved, to_tree(going_on.run), asked.checkpoint.accept_changes):
        warnings.warn(f"going on with a changed setting: {change}", stacklevel=2)
    return _Session(going_on, directory, start, environment, _origins(asked, starts=False))


def _is_finished(session: _Session) -> bool:
    """Whether all steps are done and the model is out, judged without loading anything."""
    if session.start is None or not session.directory.model.is_dir():
        return False
    saved, asked = session.start.state["length"], _length(session.run)
    steps = asked["steps"] or (session.start.state["steps"] if saved == asked else None)
    return steps is not None and session.start.step >= steps


def _work(session: _Session) -> Path:
    refuse_weights_only(session.start)
    verdict = session.plan.verdict
    if not verdict.fits:
        raise UserError(str(verdict))
    check_model(session.directory)
    check_reports(session.run.report)
    if session.run.train.compile:
        check_compiler(device_of_plan(session.plan))
    check_space(session.directory.path, _checkpoint_bytes(session), session.run.checkpoint.keep)
    print(_first_line(session), flush=True)
    if find_source(session.run.model.path).hub is not None:
        print(f"model: {session.run.model.path} of the hub's cache", flush=True)
    if not session.run.checkpoint.states:
        print(f"! {WITHOUT_STATES}", flush=True)
    job = build(session.plan, session.directory)
    with job.resources:
        for line in job.data.lines():
            print(line, flush=True)
        _restore(session, job)
        replace_text(session.directory.plan, session.plan.yaml())
        outcome = _train(session, job)
        return _finish(session, job, outcome)


def _checkpoint_bytes(session: _Session) -> int:
    shape, memory = session.plan.shape, session.run.memory
    disks = memory.disk if memory.states == "disk" else []
    if session.run.checkpoint.states and disks and links_work(session.directory.path, disks):
        return LITTLE  # the states are linked to, in space that is claimed with them
    if session.run.checkpoint.states:
        return STATE * shape.trained_numel
    lora = session.run.model.lora
    return session.plan.work.element * (shape.numel if lora is None else shape.trained_numel)


def _first_line(session: _Session) -> str:
    threads, metrics = _threads(session.run), session.directory.metrics
    if session.start is None:
        return fresh(threads, metrics, session.origins)
    return resumed(session.start.step, session.start.path, threads, metrics, session.origins)


def _origins(asked: RunFile, starts: bool) -> dict[str, str]:
    """What the numbers of threads that were left to us come from."""
    chosen = {lane: threads.origin for lane, threads in auto_threads().items()}
    autos = {lane: origin for lane, origin in chosen.items() if getattr(asked.threads, lane) == "auto"}
    return autos if starts else dict.fromkeys(autos, "as at its start")


def _restore(session: _Session, job: Job) -> None:
    """Put the job where the checkpoint was taken; later checkpoints belong to another future."""
    if session.start is not None:
        _check_data(session.start, job, session.run.checkpoint.accept_changes)
        accept = session.run.checkpoint.accept_changes
        check_base(session.start, session.run, job.model, accept, job.elsewhere)
        _take_up(session.start, job)
    leave_behind(session.directory.path, session.start)


def _check_data(start: Checkpoint, job: Job, accept: bool) -> None:
    if start.state["data"] == job.data.fingerprint:
        return
    if not accept:
        raise UserError(
            f"the data is not what {start.path} was trained on: bring the files back, choose "
            "another out, or go on all the same with checkpoint.accept_changes=true"
        )
    warnings.warn(f"going on with other data than {start.path} was trained on", stacklevel=2)


def _take_up(start: Checkpoint, job: Job) -> None:
    state = start.state
    start.check(state_entries(job.optimizer))
    job.optimizer.restore(state["counts"], start.fill, start.blocks)
    job.optimizer.lanes.step = start.step
    job.loop.skipped, job.loop.skipped_in_a_row = state["skipped"]
    _take_over(job.optimizer.ledger, Ledger.from_json(state["ledger"]))
    restore_rng(state["rng"])


def _take_over(ledger: Ledger, earlier: Ledger) -> None:
    """Go on with the account of earlier sessions; peaks are the highest of all."""
    ledger.steps, ledger.seconds = earlier.steps, earlier.seconds
    ledger.actions, ledger.stalls = earlier.actions, earlier.stalls
    for tier, held in earlier.peaks.items():
        for purpose, nbytes in held.items():
            ledger.hold(tier, purpose, nbytes)


def _train(session: _Session, job: Job) -> Outcome:
    begin, first, last, evaluated = time.monotonic(), None, None, None
    start = session.start.step if session.start else 0
    budgets = session.plan.budgets
    with (
        Interruption() as interruption,
        Metrics(session.directory.path, start, session.run.report, to_tree(session.run)) as metrics,
        Progress(job.steps, start, budgets) as progress,
    ):
        for report in job.loop.run(start):
            metrics.write(report.record())
            progress.step(report)
            first = report.loss if first is None else first
            last, evaluated = report.loss, report.eval_loss or evaluated
            if interruption.asked or _is_due(session.run, report, job.steps):
                _save(session, job, report.number)
            if interruption.asked and report.number < job.steps:
                goes_on = "the same command goes on from there"
                left = goes_on if session.run.checkpoint.states else "its weights are saved, it cannot go on"
                progress.say(f"stopped after step {report.number}: {left}")
                raise KeyboardInterrupt
    seconds, skipped = time.monotonic() - begin, (job.loop.skipped, job.loop.skipped_in_a_row)
    return Outcome(job.steps, seconds, first, last, evaluated, *skipped)


def _is_due(run: RunFile, report: StepReport, steps: int) -> bool:
    every = run.checkpoint.every
    return report.number == steps or bool(every and report.number % every == 0)


def _save(session: _Session, job: Job, step: int) -> None:
    state = {
        "steps": job.steps,
        "length": _length(session.run),
        "data": job.data.fingerprint,
        "base": base_of(session.run, job.model, job.elsewhere),
        "counts": job.optimizer.counts,
        "skipped": [job.loop.skipped, job.loop.skipped_in_a_row],
        "rng": capture_rng(),
        "ledger": job.optimizer.ledger.to_json(),
    }
    tables, beside, linked = state_entries(job.optimizer), None, None
    if not session.run.checkpoint.states:
        tables, state, beside = {}, weights_only(state), weights_writer(job, session.run)
    elif job.optimizer.on_disk:
        tables, linked = {}, job.optimizer.save_states
    save_checkpoint(
        session.directory.path,
        step,
        tables,
        state,
        environment=session.environment,
        keep=session.run.checkpoint.keep,
        beside=beside,
        linked=linked,
    )
    if job.disk:
        job.disk.top_up(list_checkpoints(session.directory.path).values())
    replace_text(session.directory.trace, trace.dump(job.optimizer.lanes.trace.last_steps()))


def _length(run: RunFile) -> dict[str, Any]:
    return {"steps": run.train.steps, "epochs": run.train.epochs}


def _finish(session: _Session, job: Job, outcome: Outcome) -> Path:
    """Write the model, compare the prediction with what was measured, say where things are."""
    ledger = job.optimizer.ledger
    target = session.directory.model
    speeds = tuple(job.disk.speeds.shares) if job.disk else ()
    job.optimizer.close()
    replacing = partial(record_model, session.directory)
    count = save_trained(target, job, session.run, overwrite=True, before_replacing=replacing)
    job.resources.close()
    _measure_process(ledger, session.plan)
    predicted = session.plan.predict_on(job.data.train.rows, job.steps, speeds)
    both = {"predicted": predicted.to_json(), "measured": ledger.to_json()}
    replace_text(session.directory.ledger, json.dumps(both))
    for line in closing(outcome, predicted, ledger):
        print(line)
    print(f"Model  {target}: {count} tensors written, read back, equal")
    print(f'Try    headrace sample {target} "Hello"')
    if session.run.model.lora is not None:
        print(f"Merge  headrace export {session.directory.path} OUT --merge")
    return target


def _measure_process(ledger: Ledger, plan: Plan) -> None:
    """Where the system knows the whole, the tier's peak is the system's figure."""
    ledger.process_peak = peak_resident_bytes()
    if ledger.process_peak:
        ledger.tier_peaks[plan.machine.host_tier] = ledger.process_peak
    if not plan.machine.unified:
        ledger.tier_peaks[plan.machine.device_tier] = torch.cuda.max_memory_allocated()


def _environment(run: RunFile) -> Environment:
    """What the last bits of this run depend on: the update's threads change none."""
    threads = _threads(run)
    del threads["update"]
    return Environment.here(threads)


def _threads(run: RunFile) -> dict[str, int]:
    assert run.threads.compute != "auto" and run.threads.update != "auto"
    return {"compute": run.threads.compute, "update": run.threads.update}


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Headrace's own warnings are sentences for the user: print them as such."""
    show = warnings.showwarning

    def plain(message: Any, category: Any, filename: Any, *rest: Any) -> None:
        if issubclass(category, SkippedStep):
            return  # the progress says it, with the step's number
        if issubclass(category, UserWarning) and "headrace" in Path(filename).parts:
            print(f"! {message}", flush=True)
        else:
            show(message, category, filename, *rest)

    warnings.showwarning = plain  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = show
