"""The command line, with Ctrl-C early: `python early.py torch train RUN` presses it as torch is imported.

`pathlib.Path` instead of a module's name: as the first text file is read, outside of every import. `lost`: as
the model is loaded, in a finaliser, where Python prints the KeyboardInterrupt and goes on.
"""

import os
import pathlib
import signal
import sys


def press():
    os.kill(os.getpid(), signal.SIGINT)


class Finder:
    """Finds nothing; presses Ctrl-C when it is asked for the module."""

    def __init__(self, name):
        self.name = name

    def find_spec(self, name, path, target=None):
        if name == self.name:
            press()


class Pressing:
    def __del__(self):
        press()


def press_as_a_file_is_read():
    original = pathlib.Path.read_text

    def read_text(*arguments, **options):
        press()
        return original(*arguments, **options)

    pathlib.Path.read_text = read_text


def press_where_it_is_lost():
    from headrace.run import build

    original = build.load_model

    def load_model(*arguments, **options):
        Pressing()
        return original(*arguments, **options)

    build.load_model = load_model


if __name__ == "__main__":
    from headrace.cli.main import main

    moment = sys.argv.pop(1)
    if moment == "pathlib.Path":
        press_as_a_file_is_read()
    elif moment == "lost":
        from headrace.memory.process import prepare_process

        prepare_process()
        press_where_it_is_lost()
    else:
        sys.meta_path.insert(0, Finder(moment))
    main()
