"""The command line in a process that has everything imported already."""

import os
import sys

import pressing

TIMEOUT = 120


def execute(processes, output, arguments, moments=()):
    """`headrace ARGUMENTS` with Ctrl-C at the moments; returns its exit code, its output and its errors."""
    process = processes.Process(target=run, args=([str(a) for a in arguments], output, moments))
    process.start()
    process.join(TIMEOUT)
    assert process.exitcode is not None, "the command hangs"
    texts = (output.with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".out", ".err"))
    return process.exitcode, *texts


def run(arguments, output, moments=()):
    """What `execute` starts; prints to OUTPUT.out and OUTPUT.err."""
    from headrace.cli.main import main

    for stream, suffix in ((sys.stdout, ".out"), (sys.stderr, ".err")):
        with open(f"{output}{suffix}", "wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    if moments:
        pressing.press_in(moments)
    sys.argv = ["headrace", *arguments]
    main()
