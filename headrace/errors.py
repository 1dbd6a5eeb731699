"""The exceptions that end a run with one sentence: a user's mistake, and a training that failed."""


class UserError(ValueError):
    """A mistake in what the user asked for: a run file, an input file, a budget.

    The message is one clear sentence with the value, the place and the fix. The command line prints it
    without a traceback and ends with exit code 2.
    """


class RunStopped(RuntimeError):
    """A run that cannot go on though nothing was wrong with what was asked: its training failed.

    The message is one clear sentence with what happened and what to do. The command line prints it without a
    traceback and ends with exit code 1.
    """


def reason(error: BaseException) -> str:
    """What another library's error says, in one line that fits into a sentence."""
    text = getattr(error, "strerror", None) or str(error)
    line = next((line.strip() for line in str(text).splitlines() if line.strip()), "")
    # These hold no more than what was looked for, or nothing.
    named = not line or isinstance(error, LookupError | AssertionError | OverflowError | ArithmeticError)
    return f"{type(error).__name__}: {line}".rstrip(": ") if named else line.rstrip(".:")
