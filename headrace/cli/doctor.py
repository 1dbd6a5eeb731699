"""`headrace doctor`: what this machine has for training, and what will be slow and why."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headrace.run.doctor import Health

_GIB = 2**30


def doctor(
    path: Annotated[
        str,
        typer.Argument(metavar="[DIRECTORY]", help="where runs will lie; 256 MiB are written and removed"),
    ] = ".",
    as_json: Annotated[bool, typer.Option("--json", help="everything as JSON")] = False,
) -> None:
    """Look at versions, cores, threads, memory, disk and accelerator, and say what will be slow and why."""
    from headrace.run.doctor import examine

    health = examine(path)
    if as_json:
        print(json.dumps(health.to_json(), indent=2))
        return
    for title, text in (*_software(health), *_processor(health), *_storage(health)):
        print(f"{title:12} {text}")
    findings = health.findings()
    print("\nWill be slow:" if findings else "\nNothing was found that slows a run.")
    for finding in findings:
        print(f"! {finding.what}\n    why  {finding.why}\n    fix  {finding.fix}")


def _software(health: "Health") -> Iterator[tuple[str, str]]:
    from headrace.run.doctor import OPTIONAL

    yield "Versions", ", ".join(f"{n} {v}" for n, v in health.versions.items() if v and n not in OPTIONAL)
    present = [f"{name} {health.versions[name]}" for name in OPTIONAL if health.versions[name]]
    missing = [extra for name, extra in OPTIONAL.items() if not health.versions[name]]
    without = [f"without: pip install headrace[{','.join(missing)}]"] if missing else []
    yield "Extras", ", ".join([*present, *without])


def _processor(health: "Health") -> Iterator[tuple[str, str]]:
    cores = health.cores
    quota = f"time of {cores.quota:.1f} granted" if cores.quota is not None else "no quota"
    load = "" if cores.load is None else f", load {cores.load:.1f}"
    yield "Cores", f"{cores.affinity} of {cores.machine}, {quota}{load}; {cores.name}"
    notes = {"OMP_NUM_THREADS": " (not for the update)"}
    variables = [f"{name}={value}{notes.get(name, '')}" for name, value in health.variables.items()]
    threads = ", ".join(f"{lane} {count}" for lane, count in health.threads.items())
    yield "Threads", "; ".join([threads, ", ".join(variables)] if variables else [threads])
    speeds = ", ".join(f"{dtype} {flops / 1e9:,.0f} GFLOP/s" for dtype, flops in health.cpu_flops.items())
    yield "CPU speed", f"{speeds} (products of matrices)"
    card = health.accelerator
    text = f"none: {health.no_accelerator}"
    if card is not None:
        bf16 = "with" if card.native_bf16 else "without"
        text = f"{card.name}, {card.free / _GIB:.1f} of {card.total / _GIB:.1f} GiB free, {bf16} bf16 units"
    yield "Accelerator", text


def _storage(health: "Health") -> Iterator[tuple[str, str]]:
    from headrace.run.doctor import checkpoint_seconds

    memory, mount, disk = health.memory, health.mount, health.disk
    limit = "no cgroup limit" if memory.limit is None else f"cgroup limit {memory.limit / _GIB:.1f}"
    swap = f"{memory.swap_used / _GIB:.1f} of {memory.swap_total / _GIB:.1f} GiB swap used"
    swap = swap if memory.swap_total else "no swap"
    sizes = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    yield "Memory", f"{sizes}, {limit}, {swap}, huge pages: {memory.huge_pages or 'not known'}"
    room = f"{mount.free / _GIB:.1f} of {mount.total / _GIB:.1f} GiB free"
    yield "Disk", f"{mount.path} on {mount.kind or 'an unknown file system'}: {room}"
    if disk is not None:
        how = "O_DIRECT" if disk.direct else "no O_DIRECT"
        yield "", f"{how}, writes {disk.write / 1e9:.2f} GB/s, reads {disk.read / 1e9:.2f} GB/s"
        yield "", f"a checkpoint takes {checkpoint_seconds(disk):.1f} s and 11.2 GiB for 1 B parameters"
